"""Watches one server from beside it, and leaves what it sees in ``health.json``.

It asks little. While the engine's counters move it asks nothing; when they rest it asks for one token now and then.
Gauges of requests are not trusted alone: an engine may show a request that has ended long ago. What says that a server
is stuck is that it has work, that nothing moves, and that our own request gets no token either.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import files
from .asking import NoAnswer, Refused, Server, others
from .place import Metrics, Place, age, log

EVERY = 10.0
"""Seconds between two looks."""
PROBE_EVERY = 60.0
"""Seconds between two requests of ours while nothing moves."""
PROBE_TIMEOUT = 60.0
ANSWER_TIMEOUT = 20.0
"""Seconds that an answer may take which needs no tokens."""
HEARTBEAT = 60.0
"""Seconds after which the file is written again though nothing has changed."""
CANARIES_EVERY = 6 * 3600.0
CANARIES_SOONER = 900.0
"""Seconds until the canaries are run again, and when some of them could not be judged."""
KEPT_CRASHES = 3
TELLING = 40
"""Lines of a log that are kept of each crash."""

LEVELS = ("no-answer", "wrong-model", "wrapper-only", "generation-fails", "generates", "inconclusive")


@dataclass
class Seen:
    """What one look found: a level, the text it was judged by, and readings where the engine gives any."""

    level: str
    evidence: str
    metrics: Metrics | None = None


@dataclass
class Memory:
    """What a watch remembers of the run of the server that it looks at. Times are of a clock that never goes back."""

    process: str = ""
    ready: bool = False
    took: float | None = None
    moved: tuple[float, ...] | None = None
    moved_at: float = 0.0
    probed_at: float = float("-inf")
    probe: Seen | None = None
    failures: int = 0


@dataclass
class Watch:
    """The watch of one server."""

    place: Place
    clock: Callable[[], float] = time.monotonic
    memory: Memory = field(default_factory=Memory)
    restarts: int | None = None
    ends: list[float] = field(default_factory=list)
    crashes: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server: Server = self.place.server()

    def look(self) -> dict[str, Any]:
        """One look: what is to stand in health.json. Raises OSError, subprocess.SubprocessError."""
        state = self.place.state()
        self._count(state.restarts, state.ended, state.active)
        if state.process != self.memory.process:
            self.memory = Memory(state.process, moved_at=self.clock())
        seen = self._seen() if state.process else Seen("no-answer", f"it does not run ({state.active}, {state.ended})")
        memory = self.memory
        if seen.level == "generates" and not memory.ready:
            memory.ready, memory.took = True, age(state.process)
        readings = seen.metrics
        return {
            "schema": files.SCHEMA,
            "level": seen.level,
            "evidence": seen.evidence[:1000],
            "process": state.process,
            "unit": state.active,
            "starting": 0 if memory.ready or not state.process else round(age(state.process)),
            "took": None if memory.took is None else round(memory.took, 1),
            "stuck": round(self._stuck(seen)),
            "running": _whole(readings, "running"),
            "waiting": _whole(readings, "waiting"),
            "ends": len(self.ends),
            "crashes": self.crashes,
        }

    def _count(self, restarts: int, ended: str, active: str) -> None:
        """Note the ends that nobody asked for: systemd counts the starts of its own."""
        now = self.clock()
        new = max(0, restarts - self.restarts) if self.restarts is not None else 0
        if self.restarts is not None and restarts < self.restarts:
            self.ends = []  # it was told to start: what ended before that says nothing of what runs now
        self.restarts = restarts
        gave_up = active == "failed" and not (self.crashes and self.crashes[-1].get("last"))
        if new or gave_up:
            self.ends += [now] * max(1, new)
            crash = {"how": ended, "lines": log(self.place.settings["unit"], TELLING)}
            self.crashes = [*self.crashes, {**crash, "last": True} if gave_up else crash][-KEPT_CRASHES:]
        self.ends = [end for end in self.ends if now - end < 3600]

    def _seen(self) -> Seen:
        """How far up the server is."""
        try:
            wrong = self._names_the_model()
            if wrong is not None:
                return wrong
        except NoAnswer as none:
            if not none.timed_out:
                return Seen("no-answer", str(none))
            return self._busy_or(Seen("no-answer", str(none)), self.place.metrics(self.server))
        readings = self.place.metrics(self.server)
        if self._moved(readings):
            return Seen("generates", "its counters move", readings)
        if self.clock() - self.memory.probed_at >= PROBE_EVERY or not self.memory.ready:
            self.memory.probed_at = self.clock()
            self.memory.probe = self._probe(readings)
            after = self.place.metrics(self.server)
            self._moved(after)  # what our own request moved is no sign of others
        return self.memory.probe or Seen("inconclusive", "it has been asked nothing yet", readings)

    def _names_the_model(self) -> Seen | None:
        http = self.place.settings["http"]
        if not self.place.settings["lists_model"]:
            return self._is_live(http["live"])
        status, body = self.server.get(http["models"], ANSWER_TIMEOUT)
        if status in (401, 403):
            return Seen("inconclusive", f"it refuses the key that it was given (HTTP {status})")
        if status != 200:
            return Seen("wrapper-only", f"{http['models']} answers HTTP {status}: {_text(body)}")
        names = _names(body)
        if names is None:
            return Seen("wrong-model", f"{http['models']} answers with no list of models: {_text(body)}")
        if self.server.model not in names:
            return Seen("wrong-model", f"it serves {', '.join(names) or 'nothing'}, not {self.server.model}")
        return None

    def _is_live(self, path: str) -> Seen | None:
        """Whether an engine that does not list what it serves answers at all; our own request names the model."""
        status, body = self.server.get(path, ANSWER_TIMEOUT)
        if status != 200:
            return Seen("wrapper-only", f"{path} answers HTTP {status}: {_text(body)}")
        return None

    def _moved(self, readings: Metrics | None) -> bool:
        """Whether the engine got on with anything since the last look; the first look of a run only remembers."""
        if readings is None:
            return False
        was, self.memory.moved = self.memory.moved, readings.moved
        if was is None or was == readings.moved:
            return False
        self.memory.moved_at = self.clock()
        self.memory.failures = 0
        return True

    def _probe(self, readings: Metrics | None) -> Seen:
        """Ask for a few tokens."""
        timeout = PROBE_TIMEOUT
        try:
            reply = self.server.chat([{"role": "user", "content": "Say OK."}], 4, timeout)
        except Refused as refusal:
            if refusal.status in (401, 403, 429):
                return Seen("inconclusive", f"asked to say OK: {refusal}", readings)
            level = "wrapper-only" if refusal.status == 503 else "generation-fails"
            return self._twice(Seen(level, f"asked to say OK: {refusal}", readings))
        except NoAnswer as none:
            failing = Seen("generation-fails", f"asked to say OK: {none}", readings)
            return self._busy_or(failing, readings) if none.timed_out else self._twice(failing)
        if not reply.content and not reply.reasoning and not reply.tokens:
            return self._twice(Seen("generation-fails", f"asked to say OK: {reply.shown()}", readings))
        self.memory.failures = 0
        self.memory.moved_at = self.clock()
        return Seen("generates", "", readings)

    def _busy_or(self, failing: Seen, readings: Metrics | None) -> Seen:
        """A silence is nothing when there is traffic that cannot be counted; else it is what it looks like."""
        if readings is None and others(self.server.port, ours=1) > 0:
            return Seen("inconclusive", f"{failing.evidence}, and others are connected to it", readings)
        return self._twice(failing)

    def _twice(self, failing: Seen) -> Seen:
        """One failure of a server that was well is not a verdict yet."""
        self.memory.failures += 1
        self.memory.probed_at = float("-inf")
        if self.memory.ready and self.memory.failures < 2:
            return Seen("inconclusive", f"once: {failing.evidence}", failing.metrics)
        return failing

    def _stuck(self, seen: Seen) -> float:
        """Seconds for which it has had work, and neither its counters moved nor our own request was answered."""
        if seen.metrics is None or not self.memory.ready or seen.level not in ("generation-fails", "no-answer"):
            return 0.0
        has_work = seen.metrics.get("running") or seen.metrics.get("waiting")
        return self.clock() - self.memory.moved_at if has_work else 0.0


def _whole(readings: Metrics | None, use: str) -> int | None:
    value = readings.get(use) if readings else None
    return None if value is None else int(value)


def _names(body: bytes) -> list[str] | None:
    try:
        return [str(each["id"]) for each in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        return None


def _text(body: bytes) -> str:
    return " ".join(body[:300].decode("utf-8", "replace").split())


def keep_watch(place: Place, wait: Callable[[float], None] = time.sleep) -> int:
    """Look until the unit is stopped on purpose; its exit code. One that fails stays watched: somebody may start it."""
    folder, watch = place.folder, Watch(place)
    before = files.read(folder / "health.json") or {}
    watch.crashes = list(before.get("crashes") or [])[-KEPT_CRASHES:]
    written: dict[str, Any] = {}
    written_at = float("-inf")
    while True:
        health = watch.look()
        if health["unit"] == "inactive":
            files.write(folder / "health.json", health)
            return 0
        if _apart(health) != _apart(written) or time.monotonic() - written_at >= HEARTBEAT:
            files.write(folder / "health.json", health)
            written, written_at = health, time.monotonic()
        beat(folder)
        if health["level"] == "generates":
            run_canaries(place, health)
        wait(EVERY)


def _apart(health: dict[str, Any]) -> dict[str, Any]:
    """What has to be written at once when it changes: all but figures that always do."""
    return {name: value for name, value in health.items() if name not in ("running", "waiting", "starting", "stuck")}


def beat(folder: Path) -> None:
    """Say that the watch lives: the host's uptime in whole seconds."""
    files.replace(folder / "health.beat", f"{int(time.clock_gettime(time.CLOCK_BOOTTIME))}\n".encode(), 0o644)


def run_canaries(place: Place, health: dict[str, Any]) -> None:
    """Run the canaries when they are due again. The first run on a unit is a step, asked for and seen."""
    result = files.read(place.folder / "checks/output.json")
    if result is None or result["measured_on"] != place.measured_on(health["process"]):
        return
    undecided = any(each["result"] == "inconclusive" for each in result["checks"])
    if time.time() - result["at"] < (CANARIES_SOONER if undecided else CANARIES_EVERY):
        return
    # A process of its own: what hangs in there does not keep us from watching for ever.
    command = [sys.executable, "-I", sys.argv[0], "output", str(place.folder), "again"]
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=3600, check=False)
    except subprocess.TimeoutExpired:
        print("the canaries have not ended within an hour", flush=True)
