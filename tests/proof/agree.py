"""What a plan expects of a step beside what the simulated hosts show after it: field by field."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from controller.core.next_steps import next_steps
from controller.core.permissions import Grants
from controller.core.view import View
from controller.core.words import Drift, Step
from controller.facts.words import FleetFacts, Known, Later
from controller.layers.order import ORDER
from controller.layers.shared.truth import Fleet
from controller.run.eyes import Eyes
from controller.run.once import Pass
from controller.spec.model import Specs
from controller.world.port import Done, Order, Outcome
from controller.world.sim import SimWorld
from tests.proof.fleets import Document, specs_of, start
from tests.proof.odd import make_odd
from tests.proof.schedule import edit_documents
from tests.sim.controllers import Told


@dataclasses.dataclass(frozen=True)
class Difference:
    """A field that was expected to be other than it then was."""

    layer: str
    action: str
    where: str  # section.field.field, indexes left out
    expected: object
    found: object


class _Asking(SimWorld):
    """Notes the facts before each step that ends well, the step, and the facts after it."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet, "one", "one")
        self.done: list[tuple[Step, FleetFacts, FleetFacts]] = []
        self.eyes: Eyes | None = None

    def perform(self, order: Order) -> Outcome:
        assert self.eyes is not None
        before = self.eyes.look(self.fleet.hosts)
        said = super().perform(Order(order.step, order.generation, order.boot_id))
        step = order.step
        host = self.fleet.hosts[step.hosts[0]]
        if step.job is not None and isinstance(said, Done):
            unit = host.jobs[step.job]
            while unit.runs and unit.ends is not None:
                self.clock.wait_until(unit.ends)
            if unit.rc != 0:
                return said
        if isinstance(said, Done) and said.rc == 0 and step.action != "reboot-host":
            self.done.append((step, before, self.eyes.look(self.fleet.hosts)))
        return said


def differences(fleet: Fleet, documents: list[Document]) -> tuple[list[Difference], list[str]]:
    """Of a pass over a fleet: where expectation and outcome differ, and the actions that were done."""
    specs = specs_of(documents)
    world = _Asking(fleet)
    world.eyes = Eyes(world, ORDER, specs)
    eyes = Eyes(world, ORDER, specs)
    eyes.look(specs.hosts)
    Pass(world, ORDER, specs, Grants(specs), world.clock, Told(), 7200.0).run(eyes)
    found: list[Difference] = []
    for step, before, after in world.done:
        expected = step.effect(before)
        foretold, is_so = (_verdict(specs, facts, step) for facts in (expected, after))
        if foretold != is_so:
            found.append(Difference(step.layer, step.action, "verdict", foretold, is_so))
        for host in after:
            for name, seen in after[host].sections.items():
                wanted = expected[host].section(name)
                if name.startswith("server.") and not step.layer.startswith("server."):
                    continue  # what is in a container is seen while it runs, and it is another step that changes it
                if name != "world" and isinstance(seen, Known) and isinstance(wanted, Known):
                    for where, one, other in _differ(name, wanted.value, seen.value):
                        found.append(Difference(step.layer, step.action, where, one, other))
    return found, [f"{step.layer} {step.action}" for step, _, _ in world.done]


def _verdict(specs: Specs, facts: FleetFacts, step: Step) -> str:
    """What the step's own layer says of its object."""
    verdict = next_steps(ORDER, View(specs, facts)).verdict(step.object, step.layer)
    if not isinstance(verdict, Drift):
        return type(verdict).__name__
    remedy = verdict.remedy
    return f"{verdict.reason}: {remedy.action if isinstance(remedy, Step) else type(remedy).__name__}"


def random_case(seed: int) -> tuple[Fleet, list[Document]]:
    """A fleet in some odd state, and specs that were edited."""
    chance = Random(seed)
    fleet, documents = start(chance.choice(["story", "story-done", "alive-done", "two-done", "alive", "boxes", "demo"]))
    for _ in range(chance.randrange(4)):
        make_odd(chance, fleet)
    for _ in range(chance.randrange(3)):
        edited = json.loads(json.dumps(documents))
        edit_documents(chance, edited)
        try:
            specs_of(edited)
        except Exception:
            continue
        documents = edited
    return fleet, documents


def _differ(where: str, one: Any, other: Any) -> Iterator[tuple[str, object, object]]:
    if isinstance(one, Later) or isinstance(other, Later) or one == other:
        return
    if dataclasses.is_dataclass(one) and type(one) is type(other):
        for field in dataclasses.fields(one):
            yield from _differ(f"{where}.{field.name}", getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for mine, theirs in zip(one, other, strict=True):
            yield from _differ(where, mine, theirs)
    elif isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        for key in one:
            yield from _differ(f"{where}.{key}", one[key], other[key])
    else:
        yield where, one, other
