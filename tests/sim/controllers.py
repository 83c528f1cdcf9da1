"""A whole controller on a simulated fleet: what the command does, without the command."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from controller.core.next_steps import Next, next_steps
from controller.core.permissions import Grants
from controller.core.view import View
from controller.core.words import Step
from controller.layers.order import ORDER
from controller.layers.shared.truth import Fleet
from controller.run.ended import Ended
from controller.run.eyes import Eyes
from controller.run.once import Pass, Report
from controller.spec.load import load
from controller.spec.model import Specs
from controller.world.sim import SimWorld
from tests.sim.fleets import demo

SPECS = Path(__file__).parents[2] / "specs" / "demo"


def specs() -> Specs:
    """The demo's specs."""
    files = {file.name: file.read_bytes() for file in SPECS.glob("*.yaml") if not file.name.endswith(".sim.yaml")}
    return load(files)


@dataclass
class Told:
    """Who is told, and keeps it."""

    ended_: list[Ended] = field(default_factory=list)

    def started(self, step: Step) -> None:
        pass

    def ended(self, ended: Ended) -> None:
        self.ended_.append(ended)

    def waiting(self, message: str) -> None:
        pass


class Controller:
    """One controller with its own memory of a fleet that others may work on too."""

    def __init__(self, fleet: Fleet, name: str = "controller", wanted: Specs | None = None) -> None:
        self.specs = wanted if wanted is not None else specs()
        self.world = SimWorld(fleet, name, name, checked=True)
        self.eyes = Eyes(self.world, ORDER, self.specs)

    def look(self) -> Next:
        """Look at every host, and see what follows."""
        self.eyes.look(self.specs.hosts)
        return next_steps(ORDER, View(self.specs, self.eyes.facts))

    def once(self, timeout: float = 600.0) -> Report:
        """One pass, as ``--once`` makes it."""
        self.look()
        return Pass(self.world, ORDER, self.specs, Grants(self.specs), self.world.clock, Told(), timeout).run(self.eyes)


def new_world() -> Fleet:
    """The demo's fleet, as it is at first."""
    return demo()
