"""The text of a server's systemd unit, and of its file of secrets, with everything quoted as systemd reads it.

Quoting is systemd's own (systemd.syntax(7), systemd.service(5) "Command lines", systemd.exec(5) EnvironmentFile):
within double quotes a backslash begins a C escape; ``%`` begins a specifier everywhere, ``$`` a variable in a command.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from controller.layers.server_unit.facts import Arguments, folder

RESTART_SECONDS = 10  # between an end and the next start
STARTS = 5  # after so many that did not last, systemd gives up; they may each take the whole startup budget


@dataclass(frozen=True, slots=True)
class Supervision:
    """How systemd looks after the process.

    ``restart`` and ``kill_mode`` are systemd's words; ``prevent`` are exit codes after which another start would end
    the same way, ``success`` those of a proper stop besides 0. ``stop_seconds`` is how long it may take to end when
    asked to, ``startup_seconds`` its startup budget.
    """

    restart: str = "always"
    prevent: tuple[int, ...] = ()
    success: tuple[int, ...] = ()
    stop_seconds: int = 90
    kill_mode: str = "mixed"
    startup_seconds: int = 1200


def unit_text(name: str, description: str, what: Arguments, digest: str, how: Supervision) -> str:
    """The unit's file. ``digest`` is that of ``what``, which the unit notes at each start."""
    here = folder(name)
    note = f"{here}/note.sh"
    lines = [
        "# Written by reconcile, which sees when this is edited. args.json in its folder says what it means:",
        f"# {here}",
        "[Unit]",
        f"Description={_specifiers(_one_line(description))}",
        "Wants=network-online.target",
        "After=network-online.target",
        f"StartLimitIntervalSec={STARTS * (how.startup_seconds + RESTART_SECONDS)}",
        f"StartLimitBurst={STARTS}",
        "",
        "[Service]",
        "Type=exec",
        f"WorkingDirectory={here}",
        *(f"Environment={quoted(f'{key}={value}')}" for key, value in what.environment),
        *([f"EnvironmentFile={here}/secrets.env"] if what.secrets else []),
        f"ExecStartPre=/bin/sh {note} start {name} {digest}",
        f"ExecStart={command(what.argv)}",
        f"ExecStopPost=-/bin/sh {note} end {name}",
        f"Restart={how.restart}",
        f"RestartSec={RESTART_SECONDS}",
        *([f"RestartPreventExitStatus={' '.join(map(str, how.prevent))}"] if how.prevent else []),
        *([f"SuccessExitStatus={' '.join(map(str, how.success))}"] if how.success else []),
        f"TimeoutStopSec={how.stop_seconds}",
        f"KillMode={how.kill_mode}",
        "LimitNOFILE=1048576",
        "LimitMEMLOCK=infinity",  # pinned host memory for transfers to the GPUs
        "TasksMax=infinity",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
        "",
    ]
    return "\n".join(lines)


def command(argv: Iterable[str]) -> str:
    """A command line of ExecStart and its like."""
    return " ".join(quoted(argument).replace("$", "$$") for argument in argv)


def quoted(text: str) -> str:
    """Text as one word of a unit's setting. Raises ValueError: a NUL byte, which no setting can hold."""
    return f'"{_specifiers(_escaped(text))}"'


def secrets_text(values: Mapping[str, str]) -> str:
    """The file of an EnvironmentFile setting; nothing is expanded in it."""
    return "".join(f'{name}="{_in_file(value)}"\n' for name, value in sorted(values.items()))


_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def _escaped(text: str) -> str:
    if "\0" in text:
        raise ValueError("a unit's setting cannot hold a NUL byte")
    return "".join(_ESCAPES.get(c, f"\\x{ord(c):02x}" if c < " " or c == "\x7f" else c) for c in text)


def _specifiers(text: str) -> str:
    return text.replace("%", "%%")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _in_file(value: str) -> str:
    if "\0" in value or "\n" in value:
        raise ValueError("a secret is one line of text")
    return "".join(f"\\{c}" if c in '"\\`$' else c for c in value)
