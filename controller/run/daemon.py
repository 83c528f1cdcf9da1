"""`reconcile run`: the loop in real time. Threads look, perform and watch files; one alone decides.

A thread looks at hosts, one performs each step, one watches the spec files. All they do is to put news into one queue;
the main thread takes them from there, tells the loop, and hands out what is due.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import watchfiles

from controller.engines import checking
from controller.facts.hub import HubFacts
from controller.facts.words import Observation
from controller.run import secrets
from controller.run import specs as spec_files
from controller.run.eyes import models_of
from controller.run.git import commit_of
from controller.run.loop import Loop, Moment
from controller.run.memory import Event, Kind, Memory
from controller.run.picture import Board
from controller.run.state import NoState
from controller.spec.errors import Code, SpecError
from controller.spec.load import Reading, read
from controller.spec.model import Place, Specs, Unreadable
from controller.world.port import Look, Lost, Order, Outcome, World
from controller.world.sim import SimWorld

TURN = 1.0  # seconds between turns at most: what other processes write into the memory is seen that soon
PINNED = 0.5  # seconds between pictures at least, while nothing but looks happens
SETTLED = 1.0  # seconds that an object has to be missing in the spec files before it is believed to be gone
RESCAN = 10.0  # seconds after which spec files are read again though no change was told (network file systems)
ASKED_AGAIN = 60.0  # seconds after which the Hub is asked again about models that it did not tell of
LEAVING = 60.0  # seconds that steps at work are waited for when the controller is stopped; what is left goes on

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Performed:
    step: str
    said: Outcome


@dataclass(frozen=True, slots=True)
class _Files:
    """Something may have changed under the specs."""


@dataclass(frozen=True, slots=True)
class _Models:
    """What the Hub says of the models of the specs."""

    told: HubFacts | None


_News = Observation | _Performed | _Files | _Models | None  # None: wake up


class SpecFiles:
    """The spec files as they were read last, and what is believed of them."""

    def __init__(self, where: Path, memory: Memory) -> None:
        self._where = where
        self._memory = memory
        self._shown: dict[str, bytes | str] | None = None  # what was read last
        self._problem = ""
        self._known: Specs | None = None
        self._secrets: dict[str, str | Unreadable] = {}
        self._missing_since: float | None = None
        self._clusters: dict[str, str] = {}
        self._file = memory.file  # where it is remembered what was good
        self.commit = commit_of(where)

    def read(self, now: float, clusters: dict[str, str]) -> tuple[Reading, SpecError | None] | None:
        """What the files say, and why they say nothing; None when that is as before, or not yet to be believed.

        Editors and version control take files away for a moment. So an object that is missing has to stay so for a
        while, before the files without it are believed.
        """
        texts, problem = self._on_disk()
        before = (self._shown, self._problem, self._clusters, self._secrets, self._file)
        file = self._memory.file
        shown = {path: text if isinstance(text, bytes) else str(text) for path, text in texts.items()}
        known = secrets.read(self._known.fleet.secrets) if self._known is not None else {}
        if self._missing_since is None and (shown, problem, clusters, known, file) == before:
            return None
        reading = read(texts, last_good=self._memory.last_good(), clusters=clusters, check_server=checking.problems)
        found = secrets.read(reading.specs.fleet.secrets)
        lost = self._known is not None and any(obj.ref not in reading.specs for obj in self._known)
        if lost and problem is None:
            self._missing_since = self._missing_since if self._missing_since is not None else now
            if now < self._missing_since + SETTLED:
                return None
        reading = dataclasses.replace(reading, specs=dataclasses.replace(reading.specs, secrets=found))
        self._missing_since, self._shown, self._problem, self._clusters = None, shown, problem, dict(clusters)
        self._known, self._secrets, self._file = reading.specs, found, file
        self.commit = commit_of(self._where)
        if problem:
            place = Place(str(self._where), 1)
            return reading, SpecError(place, Code.UNREADABLE, problem, todo="put the spec files back")
        self._remember(texts, reading)
        return reading, None

    @property
    def unsettled(self) -> bool:
        """Whether they are to be read again soon."""
        return self._missing_since is not None

    def _on_disk(self) -> tuple[dict[str, bytes | OSError], str]:
        """What is there; when there is nothing, what was last good, and why."""
        try:
            return spec_files.read(self._where), ""
        except spec_files.NoSpecs as error:
            return dict(self._memory.last_good()), str(error)

    def _remember(self, texts: dict[str, bytes | OSError], reading: Reading) -> None:
        good = {p: text for p, text in texts.items() if isinstance(text, bytes) and p not in reading.failed}
        with self._memory.together():
            self._memory.keep_good(good)
            for path in self._memory.last_good().keys() - texts.keys():
                self._memory.forget_file(path)


class Daemon:
    """The loop at work on a world, until ``stop``."""

    def __init__(self, loop: Loop, world: World, where: Path, memory: Memory, board: Board) -> None:
        self._loop = loop
        self._world = world
        self._where = where
        self._memory = memory
        self._board = board
        self._files = SpecFiles(where, memory)
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._stop = threading.Event()  # begin nothing any more
        self._over = threading.Event()  # wait for nothing any more
        self._hurry = threading.Event()
        self._other_specs = threading.Event()
        self._hosts: object = None
        self._told = 0  # the number of the last event that was logged
        self._file = memory.file  # and in which file of the memory
        self._trouble = ""
        self._unread = False  # whether others have written what the loop has not read yet
        self._errors: set[str] = set()

    def stop(self) -> None:
        """Begin nothing any more, and end when what is at work has ended; asked again, at once. For signal handlers."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()
        self._news.put(None)

    def run(self) -> None:
        """Work until stopped."""
        self._told = max((event.number for event in self._memory.events(limit=1)), default=0)
        self._loop.begin(self._moment())
        threads = [
            threading.Thread(target=self._hear, name="eyes"),
            threading.Thread(target=self._watch, name="specs"),
            threading.Thread(target=self._ask_hub, name="hub", daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            self._turn_until_stopped()
        finally:
            self._stop.set()
            self._over.set()
            self._other_specs.set()
            for thread in threads:
                thread.join(5.0)

    def _turn_until_stopped(self) -> None:
        leave_at: float | None = None
        pinned, unpinned = 0.0, False
        news: Sequence[_News] = [_Files()]
        read_at = time.monotonic()
        while True:
            moment = self._moment()
            self._tell(news, moment)  # first: what has happened must not be lost because the memory cannot be used
            changed = bool(news)
            if any(isinstance(one, _Files) for one in news):
                read_at = moment.now
            try:
                if moment.now >= read_at:
                    self._take_specs(moment)
                    read_at = moment.now + (SETTLED if self._files.unsettled else RESCAN)
                changed = self._hear_of_decisions(moment) or changed
                for task in self._loop.tasks(moment):
                    self._hand_out(task)
                unpinned = unpinned or changed
                if (unpinned and moment.now >= pinned + PINNED) or self._log_events():
                    self._board.pin(self._loop.picture())
                    pinned, unpinned = moment.now, False
                self._trouble = ""
            except NoState as error:
                self._complain(error)
            self._board.moved(time.time())  # the date of this machine, whatever that of a simulated fleet is
            if self._stop.is_set():
                self._loop.stop()
                if leave_at is None:
                    leave_at = moment.now + LEAVING
                    if not self._loop.idle:
                        _log.info("asked to stop: waits until what is at work has ended, %.0f s at most", LEAVING)
                if self._loop.idle or self._hurry.is_set() or moment.now >= leave_at:
                    return
            soon = min(TURN, self._loop.due(moment), max(0.0, read_at - moment.now))
            news = self._wait(TURN if self._trouble else soon)  # what is due cannot be done without the memory

    def _wait(self, seconds: float) -> list[_News]:
        """What has happened; as soon as something has, or after so long."""
        news: list[_News] = []
        with contextlib.suppress(queue.Empty):
            news.append(self._news.get(timeout=max(0.01, seconds)))
            while True:
                news.append(self._news.get_nowait())
        return news

    def _tell(self, news: Sequence[_News], moment: Moment) -> None:
        """Tell the loop what has happened."""
        for one in news:
            match one:
                case Observation():
                    self._loop.seen(one, moment)
                case _Performed(step, said):
                    self._loop.performed(step, said, moment)
                case _Models(told):
                    self._loop.described(told)

    def _hear_of_decisions(self, moment: Moment) -> bool:
        """Have the loop read what other processes have written; whether there was something. Raises NoState."""
        self._unread = self._memory.changed() or self._unread
        if not self._unread:
            return False
        self._loop.reconsider(moment)
        self._unread = False  # only now: something may be suspended
        return True

    def _hand_out(self, task: Look | Order) -> None:
        if isinstance(task, Look):
            self._world.ask([task])
        else:  # a daemon thread: who waits for a host does not keep the process from ending
            threading.Thread(target=self._perform, args=(task,), name=f"step {task.step.id}", daemon=True).start()

    def _perform(self, order: Order) -> None:
        try:
            said = self._world.perform(order)
        except Exception as error:
            _log.exception("performing %s went wrong", order.step.id)
            said = Lost(f"a defect of reconcile: {error!r}")
        self._news.put(_Performed(order.step.id, said))

    def _take_specs(self, moment: Moment) -> None:
        found = self._files.read(moment.now, self._loop.clusters)
        if found is None:
            return
        reading, problem = found
        errors = {error.text() for error in (*reading.errors, *([problem] if problem is not None else []))}
        for text in sorted(errors - self._errors):
            _log.error("%s", text)
        self._errors = errors
        hosts = dict(reading.specs.hosts)
        if hosts != self._hosts:
            self._world.use(reading.specs)
            self._hosts = hosts
        self._loop.take_specs(reading, moment, self._files.commit, problem)
        self._other_specs.set()

    def _log_events(self) -> bool:
        """Log what was remembered since the last time, by whomever; whether there was something."""
        if self._memory.file != self._file:
            self._file, self._told = self._memory.file, 0  # another file counts from one
        events = self._memory.events(after=self._told)
        for event in events:
            _log.log(_level(event), "%s", event.message, extra={"about": _shown(event)})
            self._told = event.number
        return bool(events)

    def _complain(self, error: NoState) -> None:
        if str(error) != self._trouble:
            _log.error("%s; nothing is begun meanwhile", error)
        self._trouble = str(error)

    def _moment(self) -> Moment:
        date = self._world.clock.date() if isinstance(self._world, SimWorld) else datetime.now(UTC)
        return Moment(time.monotonic(), date)

    # --- threads ---

    def _hear(self) -> None:
        last = time.monotonic()
        while not self._over.is_set():
            if isinstance(self._world, SimWorld):  # its time goes by as the real one does
                now = time.monotonic()
                self._world.go_by(now - last)
                last = now
            try:
                for seen in self._world.hear(0.5):
                    self._news.put(seen)
            except Exception:
                _log.exception("looking at hosts went wrong")
                self._over.wait(1.0)

    def _ask_hub(self) -> None:
        """Ask about models, now and then and when there are other specs."""
        while not self._stop.is_set():
            if self._other_specs.wait(ASKED_AGAIN):
                self._other_specs.clear()
            if self._stop.is_set():
                return
            try:
                self._news.put(_Models(models_of(self._world, self._loop.specs)))
            except Exception:
                _log.exception("asking the Hub went wrong")

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                there = self._where.stat()
                for changes in watchfiles.watch(
                    self._where,
                    watch_filter=None,
                    debounce=400,
                    step=50,
                    stop_event=self._stop,
                    rust_timeout=1000,
                    yield_on_timeout=True,
                    raise_interrupt=False,
                ):
                    if changes:
                        self._news.put(_Files())
                    now = self._where.stat()
                    if (now.st_dev, now.st_ino) != (there.st_dev, there.st_ino):
                        break  # another folder (or file) of that name: what is watched is the old one
            except (OSError, RuntimeError):  # it is not there: for an editor's moment, or for good
                pass
            self._news.put(_Files())
            self._stop.wait(0.2)


def _level(event: Event) -> int:
    bad = event.kind == Kind.BREAKER or event.result in ("failed", "lost", "refused")
    return logging.WARNING if bad else logging.INFO


def _shown(event: Event) -> dict[str, object]:
    fields = {
        "kind": str(event.kind),
        "object": str(event.object) if event.object is not None else "",
        "layer": event.layer,
        "action": event.action,
        "step": event.step,
        "cause": event.cause,
        "result": str(event.result),
        "seconds": event.seconds,
    }
    return {name: value for name, value in fields.items() if value not in ("", None)}
