"""The loop in real time on a memory that cannot always be used, or that is taken away."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controller.core.suspension import Suspension
from controller.facts.words import Observation
from controller.layers.order import ORDER
from controller.run.daemon import Daemon
from controller.run.git import Commit
from controller.run.loop import Loop
from controller.run.memory import Kind, Memory
from controller.run.picture import Board
from controller.run.records import Records
from controller.run.state import Identity, NoState
from controller.spec.model import Specs
from controller.spec.ref import Ref
from controller.world.sim import SimWorld
from controller.world.sim.faults import Fault, Name
from tests.run.test_daemon import wait_for
from tests.sim.controllers import SPECS
from tests.sim.fleets import demo

CT = Ref("Container", "ct129")


class Held(SimWorld):
    """A fleet whose answers are kept back while ``hold`` is set."""

    def __init__(self) -> None:
        super().__init__(demo())
        self.hold = threading.Event()
        self.held: list[Observation] = []

    def hear(self, seconds: float) -> list[Observation]:
        self.held += super().hear(seconds)
        if self.hold.is_set():
            return []
        told, self.held = self.held, []
        return told


class Running:
    """`reconcile run` in a thread of the test."""

    def __init__(self, folder: Path, *, hold: bool = False) -> None:
        self.specs = folder / "specs"
        self.specs.mkdir()
        for file in SPECS.glob("*.yaml"):
            if not file.name.endswith(".sim.yaml"):
                shutil.copy(file, self.specs)
        self.state = folder / "state"
        self.memory = Memory.open(self.state)
        self.world = Held()
        if hold:
            self.world.hold.set()
        self.board = Board()
        records = Records(self.memory, self.state, Identity("me", "me"), Specs(), Commit())
        loop = Loop(ORDER, records, self.board, random.Random(1))
        self.daemon = Daemon(loop, self.world, self.specs, self.memory, self.board)
        self.thread = threading.Thread(target=self.daemon.run)
        self.thread.start()

    def condition(self, kind: str = "Ready") -> str:
        of_it = self.board.picture.conditions.get(CT, ())
        return next((c.status for c in of_it if c.type == kind), "")

    def is_ready(self) -> bool:
        return self.condition() == "True"

    def close(self) -> None:
        self.world.hold.clear()
        self.daemon.stop()
        self.thread.join(60.0)
        self.memory.close()
        self.world.close()


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Running]:
    monkeypatch.setattr("controller.run.loop.PERIOD", 1.0)
    made = Running(tmp_path, hold=getattr(request, "param", "") == "hold")
    try:
        yield made
    finally:
        made.close()


class Failing:
    """A method of a memory that cannot be used while ``on``; counts how often that was met."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, memory: Memory, name: str, on: Callable[[int], bool]) -> None:
        self.times = 0
        self.on = on
        self._real = getattr(memory, name)
        monkeypatch.setattr(memory, name, self)

    def __call__(self, *args: object) -> object:
        if self.on(self.times):
            self.times += 1
            raise NoState(Path("/state"), OSError(5, "Input/output error"))
        return self._real(*args)


def test_a_suspension_that_could_not_be_read_at_first_is_read_again(running, monkeypatch):
    wait_for(running.is_ready)
    before = len(running.memory.events(kind=Kind.STEP_STARTED))
    failing = Failing(monkeypatch, running.memory, "suspensions", lambda times: times == 0)
    other = Memory.open(running.state)  # as another process does
    other.suspend(Suspension(CT, None, "I am at it", "me", time.time()))
    other.close()
    wait_for(lambda: failing.times == 1)
    running.world.inject(Fault(Name.CT_STOP, "kpro5", guest=129))
    wait_for(lambda: running.condition("Suspended") == "True" and running.condition() == "False")
    assert len(running.memory.events(kind=Kind.STEP_STARTED)) == before


@pytest.mark.parametrize("running", ["hold"], indirect=True)
def test_what_happens_while_the_memory_cannot_be_read_is_not_lost_and_no_work_is_wasted(running, monkeypatch):
    wait_for(lambda: len({seen.host for seen in running.world.held}) == 2)
    unusable = threading.Event()
    unusable.set()
    failing = Failing(monkeypatch, running.memory, "last_good", lambda times: unusable.is_set())
    (running.specs / "ct129.yaml").write_text((SPECS / "ct129.yaml").read_text() + "# another text\n")
    wait_for(lambda: failing.times >= 3)
    began, times = time.monotonic(), failing.times
    running.world.hold.clear()
    wait_for(lambda: not running.world.held and failing.times >= times + 8)
    assert time.monotonic() - began > 2.0, "once a second, and when something is told"
    unusable.clear()
    wait_for(running.is_ready)


def test_a_memory_that_is_deleted_is_filled_again_and_what_happens_next_is_logged(running, caplog):
    caplog.set_level("INFO")
    wait_for(running.is_ready)
    numbers = len(running.memory.events())
    assert numbers > 5
    for file in running.state.glob("memory.db*"):
        file.unlink()
    wait_for(lambda: CT in running.memory.conditions())
    wait_for(running.is_ready)
    caplog.clear()
    running.world.inject(Fault(Name.CT_STOP, "kpro5", guest=129))
    wait_for(lambda: any(e.action == "start" and e.result == "worked" for e in running.memory.events()))
    wait_for(lambda: any(getattr(r, "about", {}).get("action") == "start" for r in caplog.records))
    wait_for(lambda: len(running.memory.last_good()) == 2)
