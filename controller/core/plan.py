"""The predicted chain of steps: effects applied to a copy of the facts until nothing is left to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from controller.core.next_steps import Next, next_steps
from controller.core.view import View
from controller.core.words import Layer, Step
from controller.facts.words import FleetFacts
from controller.spec.model import Specs
from controller.spec.ref import Ref


class PlanLoop(Exception):  # noqa: N818 - named for what it found
    """The prediction came back to a state that it had been in: two layers undo each other's work."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
        super().__init__("cannot plan: these steps undo each other: " + " -> ".join(s.id for s in steps))


@dataclass(frozen=True)
class Planned:
    """A step of the plan and the ids of the earlier ones that it comes after."""

    step: Step
    requires: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What is, what would be done about it in order, and what would then still not be right."""

    now: Next
    steps: tuple[Planned, ...]
    then: Next


def plan(
    layers: Sequence[Layer],
    specs: Specs,
    facts: FleetFacts,
    takes: Callable[[Ref, str], bool] = lambda ref, layer: True,
) -> Plan:
    """Predict the whole chain as if every permission were given. Raises PlanLoop.

    ``takes`` narrows it, as a pass is narrowed: no step of a layer of an object that it does not take is expected.
    """
    now = then = next_steps(layers, View(specs, facts))
    states: list[FleetFacts] = [facts]
    steps: list[Step] = []
    while step := next((s for s in then.ready if takes(s.object, s.layer)), None):
        facts = step.effect(facts)
        steps.append(step)
        if facts in states:
            raise PlanLoop(steps[states.index(facts) :])
        states.append(facts)
        then = next_steps(layers, View(specs, facts))
    return Plan(now, tuple(_planned(steps)), then)


def _planned(steps: Sequence[Step]) -> list[Planned]:
    """A step comes after the latest earlier step on each of its hosts and its object."""
    planned: list[Planned] = []
    for index, step in enumerate(steps):
        requires: list[str] = []
        for earlier in reversed(steps[:index]):
            if (set(earlier.hosts) & set(step.hosts) or earlier.object == step.object) and not requires:
                requires.append(earlier.id)
        planned.append(Planned(step, tuple(requires)))
    return planned
