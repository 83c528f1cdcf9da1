"""What runs in every place: the processes of servers' units, and who listens on which port.

A unit notes its starts and ends itself (``note.sh``): ``/run/reconcile-server/NAME.started`` holds the digest of what
it was started with, when, and the digest of its secrets; ``NAME.ends`` one line for each of its last ends since the
controller has started it. Both go with the place's power.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from controller.facts.words import Later, ParseError, Section
from controller.layers.shared.inside import Inside, read

RUN = "/run/reconcile-server"


@dataclass(frozen=True, slots=True)
class Process:
    """The first process of a unit: ``pid`` as the host counts, ``started`` in clock ticks since the host's boot.

    ``argv`` is its command line as /proc tells it (a program may have written over its own), ``gpus`` what its
    CUDA_VISIBLE_DEVICES names, None when it has none.
    """

    pid: int
    started: int | Later
    argv: tuple[str, ...] = ()
    gpus: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class End:
    """An end of the unit's process, as systemd told its ExecStopPost: when (Unix seconds), ``result``, code, status."""

    at: int
    result: str  # success, exit-code, signal, oom-kill, timeout, core-dump, …
    code: str  # exited, killed, dumped
    status: str  # an exit code or a signal's name


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """One server's unit, as it runs.

    ``main`` is None when it has no process; ``others`` is how many more it has. ``digest`` is that of the meaning it
    was last started with, ``secrets`` that of its secrets then, ``since`` when (Unix seconds); "" and 0 when it was not
    started since its place was.
    ``ends`` are its last ends, oldest first. ``down`` is whether systemd does not start it again by itself: its last
    end, or start, is longer ago than a restart takes.
    """

    name: str
    main: Process | None = None
    others: int = 0
    digest: str = ""
    secrets: str = ""
    since: int = 0
    ends: tuple[End, ...] = ()
    down: bool = False


@dataclass(frozen=True, slots=True)
class Listener:
    """Who listens on a TCP port: its process and systemd unit, pid 0 when it cannot be told. ``address`` as a hint."""

    port: int
    pid: int = 0
    unit: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True)
class ProcessesHere:
    """All of a place. ``shm`` is the size of its /dev/shm in bytes, None when it cannot be told."""

    servers: tuple[ServerProcess, ...] = ()
    listeners: tuple[Listener, ...] = ()
    shm: int | None = None

    def of(self, name: str) -> ServerProcess | None:
        """The server of that name, None when nothing of it runs or ran since the place was started."""
        return next((server for server in self.servers if server.name == name), None)

    def on(self, port: int) -> Listener | None:
        """Who listens on the port."""
        return next((each for each in self.listeners if each.port == port), None)


@dataclass(frozen=True, slots=True)
class ProcessFacts(Inside[ProcessesHere]):
    """What runs in every place of a host."""


_END = re.compile(r"(\d+) (\S+) (\S+) (\S+)")


def parse(section: Section) -> ProcessFacts:
    """Read the section's text. Raises ParseError."""
    told, between = read(section.out)
    places = tuple((where, _here(one.lines)) for where, one in told.items())
    return ProcessFacts(places, between)


def _here(lines: tuple[str, ...]) -> ProcessesHere:
    servers: dict[str, dict[str, object]] = {}
    listeners: list[Listener] = []
    shm: int | None = None
    for line in lines:
        kind, _, rest = line.partition(" ")
        name, _, value = rest.partition(" ")
        server = servers.setdefault(name, {}) if kind not in ("listen", "shm") else {}
        match kind:
            case "server":
                pass
            case "main":
                pid, started, others = value.split(" ")
                server.update(pid=int(pid), ticks=int(started), others=int(others))
            case "argv":
                server["argv"] = _arguments(value)
            case "gpus":
                server["gpus"] = tuple(gpu for gpu in value.split(",") if gpu)
            case "started":
                digest, at, secrets = value.split(" ")
                server.update(digest=digest, since=int(at), secrets="" if secrets == "-" else secrets)
            case "end":
                server["ends"] = (*_ends(server), _end(value))
            case "down":
                server["down"] = True
            case "listen":
                listeners.append(_listener(rest))
            case "shm":
                shm = int(rest)
            case _:
                raise ParseError("garbage", f"cannot read {line[:80]!r}")
    return ProcessesHere(tuple(_server(name, has) for name, has in sorted(servers.items())), tuple(listeners), shm)


def _arguments(value: str) -> tuple[str, ...]:
    r"""A command line as the fragment carries it: \1 behind each argument, \2 for a newline in one."""
    return tuple(part.replace("\x02", "\n") for part in value.removesuffix("\x01").split("\x01")) if value else ()


def _ends(server: dict[str, object]) -> tuple[End, ...]:
    found = server.get("ends", ())
    return found if isinstance(found, tuple) else ()


def _end(value: str) -> End:
    match = _END.fullmatch(value)
    if match is None:
        raise ParseError("garbage", f"cannot read the end of a unit from {value[:60]!r}")
    return End(int(match[1]), match[2], match[3], match[4])


def _listener(value: str) -> Listener:
    port, pid, unit, command = value.split(" ", 3)
    return Listener(int(port), int(pid), "" if unit == "-" else unit, command)


def _server(name: str, has: dict[str, object]) -> ServerProcess:
    main = None
    if "pid" in has:
        main = Process(has["pid"], has["ticks"], has.get("argv", ()), has.get("gpus"))  # type: ignore[arg-type]
    return ServerProcess(
        name,
        main,
        has.get("others", 0),  # type: ignore[arg-type]
        has.get("digest", ""),  # type: ignore[arg-type]
        has.get("secrets", ""),  # type: ignore[arg-type]
        has.get("since", 0),  # type: ignore[arg-type]
        _ends(has),
        bool(has.get("down", False)),
    )
