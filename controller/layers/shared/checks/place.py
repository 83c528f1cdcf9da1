"""What a server's folder and systemd say of it, where it runs."""

from __future__ import annotations

import json
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import files
from .asking import NoAnswer, Server, samples


@dataclass
class Place:
    """A server's folder, and the settings that lie in it. Raises OSError, KeyError when they are not there."""

    folder: Path
    units: Path = Path("/etc/systemd/system")

    def __post_init__(self) -> None:
        settings = files.read(self.folder / "checks.json")
        if settings is None or settings.get("schema") != files.SCHEMA:
            raise KeyError(f"no settings of schema {files.SCHEMA} in {self.folder}")
        self.settings: dict[str, Any] = settings

    def server(self) -> Server:
        """How it is asked."""
        return Server(self.settings["host"], self.settings["port"], self.settings["model"], self._key())

    def _key(self) -> str:
        """The server's own key, from where the engine gets it: its config file or a variable."""
        if not self.settings["key"]:
            return ""
        for file, pattern in (
            ("config.yaml", r"^api[-_]key:\s*(.+)$"),
            ("secrets.env", r"^[A-Z0-9_]*API_KEY=(.+)$"),
        ):
            try:
                text = (self.folder / file).read_text(encoding="utf-8")
            except FileNotFoundError:
                continue
            if match := re.search(pattern, text, re.MULTILINE):
                return _unquoted(match[1].strip())
        return ""

    def metrics(self, server: Server, timeout: float = 10.0) -> Metrics | None:
        """What the engine counts, None when it does not tell."""
        path, names = self.settings["http"]["metrics"], self.settings["metrics"]
        if not path:
            return None
        try:
            status, body = server.get(path, timeout)
        except NoAnswer:
            return None
        if status != 200:
            return None
        found = samples(body.decode("utf-8", "replace"))
        # All counters of tokens, unnamed ones too: some count while a request runs, others at its end.
        counters = {name: value for name, value in found.items() if "tokens" in name and name.endswith("_total")}
        return Metrics(
            {use: found[name] for use, name in names.items() if name and name in found},
            tuple(counters[name] for name in sorted(counters)),
        )

    def measured_on(self, process: str) -> dict[str, str]:
        """What a measurement rests on: the unit, its environment, the run of the server, and what is asked."""
        marker = files.read(self.folder / "marker.json") or {}
        arguments = files.read(self.folder / "args.json") or {}
        return {
            "unit": str(marker.get("digest", "")),
            "environment": str(arguments.get("env_digest", "")),
            "process": process,
            "asked": str(self.settings["canaries"]["asked"]),
        }

    def state(self) -> UnitState:
        """What systemd says of the unit. Raises OSError, subprocess.SubprocessError."""
        names = "ActiveState,SubState,MainPID,NRestarts,Result,ExecMainCode,ExecMainStatus"
        done = subprocess.run(
            ["systemctl", "show", "--property", names, self.settings["unit"]],
            capture_output=True, text=True, timeout=30, check=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        said = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
        pid = int(said.get("MainPID") or 0)
        return UnitState(
            active=said.get("ActiveState", ""),
            restarts=int(said.get("NRestarts") or 0),
            process=process(pid),
            ended=_ended(said),
        )


def _unquoted(value: str) -> str:
    """A value of YAML that we wrote (a JSON string), or of an environment file."""
    try:
        said = json.loads(value)
    except ValueError:
        return value.strip("'\"")
    return said if isinstance(said, str) else str(value)


@dataclass(frozen=True)
class Metrics:
    """Readings by their use: running, waiting, prompt_tokens, generation_tokens, accept_rate, drafted, ...

    ``moved`` changes whenever the engine gets on with anything.
    """

    of: dict[str, float]
    moved: tuple[float, ...] = ()

    def get(self, use: str) -> float | None:
        """A reading, None when the engine does not have it."""
        return self.of.get(use)


@dataclass(frozen=True)
class UnitState:
    """A unit: systemd's ActiveState, how often systemd started it again, its process ("PID START"), its last end."""

    active: str
    restarts: int
    process: str
    ended: str


def process(pid: int) -> str:
    """A process by its id and its start in clock ticks since boot, "" when there is none."""
    if pid <= 0:
        return ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return f"{pid} {fields[19]}"


def age(process: str) -> float:
    """Seconds since a process was started."""
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(process.split()[1]) / 100.0)


_SECRET = re.compile(r"(?i)api[_-]key|token=|authorization|bearer")
_CODES = {"1": "exited", "2": "killed", "3": "dumped"}


def _ended(said: dict[str, str]) -> str:
    code = _CODES.get(said.get("ExecMainCode", ""), said.get("ExecMainCode", ""))
    return f"{said.get('Result', '')}: {code} {said.get('ExecMainStatus', '')}"


def log(unit: str, lines: int) -> list[str]:
    """The end of a unit's log, but for lines that may hold its key; empty when there is none to be had."""
    try:
        done = subprocess.run(
            ["journalctl", "--unit", unit, "--lines", str(lines), "--output", "cat", "--no-pager", "--quiet"],
            capture_output=True, text=True, errors="replace", timeout=30, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.rstrip()[:500] for line in done.stdout.splitlines() if line.strip() and not _SECRET.search(line)]
