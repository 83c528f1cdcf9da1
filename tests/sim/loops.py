"""The loop on a simulated fleet, played in simulated time: no threads, and the same again for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from controller.layers.order import ORDER
from controller.layers.shared.truth import Fleet
from controller.run.eyes import models_of
from controller.run.git import Commit
from controller.run.loop import Loop, Moment
from controller.run.memory import Memory
from controller.run.picture import Board
from controller.run.records import Records
from controller.run.state import Identity
from controller.spec.load import read
from controller.spec.model import Specs
from controller.world.port import Look
from controller.world.sim import SimWorld
from controller.world.sim.faults import Killed


class Player:
    """One controller's loop, and what drives it. ``kill`` ends it as SIGKILL does; ``start`` gives it its next life."""

    def __init__(
        self, fleet: Fleet, state: Path, texts: dict[str, bytes], name: str = "controller", seed: int = 1
    ) -> None:
        self.fleet = fleet
        self.state = state
        self.texts = texts
        self.name = name
        self.chance = random.Random(seed)
        self.performed: list[str] = []
        self.start()

    def start(self) -> None:
        """Begin a life on what the state directory holds."""
        self.memory = Memory.open(self.state)
        self.world = self.enter()
        self.board = Board(clock=self.world.clock.now)
        records = Records(self.memory, self.state, Identity(self.name, self.name), Specs(), Commit())
        self.loop = Loop(ORDER, records, self.board, self.chance)
        self.loop.begin(self.moment)
        self.save(self.texts)

    def enter(self) -> SimWorld:
        """Its world in a new life."""
        return SimWorld(self.fleet, self.name, self.name)

    def kill(self) -> None:
        """End at once."""
        self.memory.close()

    def save(self, texts: dict[str, bytes]) -> None:
        """Spec files as somebody has saved them."""
        self.texts = texts
        reading = read(texts, last_good=self.memory.last_good())
        good = {path: text for path, text in texts.items() if path not in reading.failed}
        self.memory.keep_good(good)
        self.loop.take_specs(reading, self.moment)
        self.loop.described(models_of(self.world, reading.specs))

    @property
    def moment(self) -> Moment:
        """Now, in the fleet's time."""
        return Moment(self.world.clock.now(), self.world.clock.date())

    def turn(self) -> bool:
        """Do all that is due now, one after the other in any order; whether there was something."""
        if self.memory.changed():
            self.loop.reconsider(self.moment)
        tasks = self.loop.tasks(self.moment)
        self.chance.shuffle(tasks)
        for task in tasks:
            if isinstance(task, Look):
                self.loop.seen(self.world.observe([task])[task.host], self.moment)
            else:
                self.performed.append(task.step.action)
                said = self.world.perform(task)
                self.loop.performed(task.step.id, said, self.moment)
        return bool(tasks)

    def play(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let so much time go by, or stop when something holds; whether it did. Faults may kill the controller."""
        end = self.world.clock.now() + seconds
        while self.world.clock.now() < end:
            if until():
                return True
            try:
                busy = self.turn()
            except Killed:
                self.kill()
                self.start()
                continue
            if not busy:
                self.world.clock.wait(
                    min(max(0.01, self.loop.due(self.moment)), max(0.01, end - self.world.clock.now()))
                )
        return until()

    def condition(self, name: str, kind: str = "Ready") -> str:
        """An object's condition as the picture shows it: ``Container/ct129`` to True, False or Unknown."""
        found = {str(ref): of_it for ref, of_it in self.loop.picture().conditions.items()}
        return next((c.status for c in found.get(name, ()) if c.type == kind), "")
