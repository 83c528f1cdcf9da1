"""What is at work on a host: the section ``world``, printed by ``controller/world/host/world.sh``.

Times are seconds since the host's boot. A unit is a step (short, one at a time) or a job (long, beside others).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from controller.facts.words import ParseError, Section

SCHEMA = 1
"""The version of the state on the host that this release reads and writes."""


class How(StrEnum):
    """How a unit is, or how it ended."""

    RUNNING = "running"
    STALLED = "stalled"  # a job at work that has reported no progress for three minutes, after it had reported some
    EXIT = "exit"  # its script came to an end of its own, well or not
    TIMEOUT = "timeout"  # its time was up; it and all its children were killed
    KILLED = "killed"  # by a signal of somebody else's
    INTERRUPTED = "interrupted"  # the host went down under it
    VANISHED = "vanished"  # it ended and its result could not be written
    NEVER_BEGUN = "never-begun"  # laid down; whoever was starting it was killed before that


@dataclass(frozen=True, slots=True)
class Lease:
    """Who may start units: a controller's stable id, its name for people, until when."""

    id: str
    name: str
    until: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is, in a unit of its own; ``total`` is 0 while not known; ``since`` when it last moved."""

    done: int
    total: int
    since: float | None


@dataclass(frozen=True, slots=True)
class Unit:
    """One run of a script: the id of its step, the object it is for, and how it is or ended.

    ``rc`` is None while it runs and when its result is not known; 124 after a timeout, 128+n for a signal.
    ``began`` and ``ended`` are None when it has not, or when that was before the host's last boot.
    """

    id: str
    object: str
    how: How
    rc: int | None = None
    began: float | None = None
    ended: float | None = None

    @property
    def running(self) -> bool:
        """Whether it is at work now."""
        return self.how in (How.RUNNING, How.STALLED)


@dataclass(frozen=True, slots=True)
class Job(Unit):
    """A long unit, by name. ``log`` holds its last lines unless it ended well."""

    name: str = ""
    progress: Progress | None = None
    log: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """``running``, ``stalled``, ``done`` or ``failed``."""
        if self.running:
            return self.how.value
        return "done" if self.rc == 0 else "failed"


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """What an order has to match (``generation``, ``boot_id``), who holds the host, and what is at work on it.

    ``step`` is the last step that was laid down, at work or ended; ``step_number`` is its generation.
    """

    generation: int
    boot_id: str
    lease: Lease | None = None
    step: Unit | None = None
    step_number: int = 0
    jobs: tuple[Job, ...] = ()

    @property
    def running(self) -> Unit | None:
        """The step that is at work now: no other can be begun beside it."""
        return self.step if self.step is not None and self.step.running else None

    @property
    def rebooting(self) -> bool:
        """Whether the last step asked for a reboot, which has not come about yet: the host is about to go down."""
        last = self.step
        return last is not None and last.id.startswith("reboot-host-") and last.rc == 0 and last.ended is not None

    def job(self, name: str) -> Job | None:
        """The job of that name, if its directory is still on the host."""
        return next((job for job in self.jobs if job.name == name), None)


def parse(section: Section) -> UnitFacts:
    """Read the section. Raises ParseError: ``unreadable``, ``garbled`` or ``newer-schema``."""
    if section.rc != 0:
        raise ParseError("unreadable", section.err.strip() or f"the question ended with {section.rc}")
    try:
        return _read(section.out.encode("utf-8", "surrogateescape"))
    except (ValueError, IndexError) as error:
        if isinstance(error, ParseError):
            raise
        raise ParseError("garbled", f"cannot understand what the host says of its units: {error}") from error


def _read(data: bytes) -> UnitFacts:
    """One value after the other, each where it has to be."""
    lines = _Lines(data)
    schema = int(lines.take("schema"))
    if schema != SCHEMA:
        raise ParseError("newer-schema", f"the state on the host has schema {schema}, this release knows {SCHEMA}")
    generation = int(lines.take("generation"))
    boot_id = lines.take("boot")
    if re.fullmatch(r"[0-9a-f-]{36}", boot_id) is None:
        raise ValueError(f"{boot_id!r} is no boot id")
    lease = None
    if lines.next_is("lease"):
        holder, until, name = lines.take("lease").split(" ", 2)
        lease = Lease(holder, name, int(until))
    step, number = None, 0
    if lines.next_is("step"):
        first, *rest = lines.take("step").split(" ")
        step, number = Unit(*_unit(rest)), int(first)
    jobs = tuple(_jobs(lines))
    lines.take("end")
    return UnitFacts(generation, boot_id, lease, step, number, jobs)


def _jobs(lines: _Lines) -> Iterator[Job]:
    while lines.next_is("job"):
        name, *rest = lines.take("job").split(" ")
        progress, log = None, b""
        if lines.next_is("progress"):
            done, total, since = lines.take("progress").split(" ")
            progress = Progress(int(done), int(total), _time(since))
        if lines.next_is("log"):
            log = lines.block(int(lines.take("log")))
        yield Job(*_unit(rest), name=name, progress=progress, log=last_lines(log))


def _unit(fields: list[str]) -> tuple[str, str, How, int | None, float | None, float | None]:
    how, rc, began, ended, step, ref = fields
    return step, ref, How(how), None if rc == "-" else int(rc), _time(began), _time(ended)


def _time(text: str) -> float | None:
    return None if text == "-" else float(text)


_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-_])")


def last_lines(log: bytes, count: int = 20) -> tuple[str, ...]:
    r"""The last lines of a log as people would see them: no escapes, no control characters, what \r overwrote gone."""
    lines = []
    for raw in log.decode("utf-8", "replace").split("\n"):
        line = _ESCAPE.sub("", raw).rstrip("\r").rpartition("\r")[2].replace("\t", "    ").rstrip()
        line = "".join(c for c in line if c.isprintable())
        if line:
            lines.append(line)
    return tuple(lines[-count:])


class _Lines:
    """A cursor over lines ``word rest``, and blocks of bytes between them."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def _line(self) -> str:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise ValueError("the answer breaks off")
        return self.data[self.at : end].decode("utf-8", "replace")

    def next_is(self, word: str) -> bool:
        return self._line().split(" ", 1)[0] == word

    def take(self, word: str) -> str:
        """What stands behind this word, which has to come now."""
        line = self._line()
        first, _, rest = line.partition(" ")
        if first != word:
            raise ValueError(f"{line[:60]!r} where {word!r} should be")
        self.at = self.data.index(b"\n", self.at) + 1
        return rest

    def block(self, size: int) -> bytes:
        """So many bytes and the newline behind them."""
        found = self.data[self.at : self.at + size]
        if self.data[self.at + size : self.at + size + 1] != b"\n":
            raise ValueError("a log is not as long as it says")
        self.at += size + 1
        return found
