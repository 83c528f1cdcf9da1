"""The predicted chain of steps: effects applied to a copy of the facts until nothing is left to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
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
    states: list[tuple[FleetFacts, int]] = [(facts, 0)]
    steps: list[Step] = []
    while side_by_side := _apart(step for step in then.ready if takes(step.object, step.layer)):
        for step in side_by_side:
            facts = step.effect(facts)
        steps.extend(side_by_side)
        came_back = next((done for state, done in states if state == facts), None)
        if came_back is not None:
            raise PlanLoop(steps[came_back:])
        states.append((facts, len(steps)))
        then = next_steps(layers, View(specs, facts))
    return Plan(now, tuple(_planned(steps)), then)


def _apart(ready: Iterable[Step]) -> list[Step]:
    """The first steps, in order, that share no host and no object: one's effect is no business of the others.

    Judging a fleet takes time in proportion to its size. One step at a time, that would be for every object again.
    """
    chosen: list[Step] = []
    hosts: set[str] = set()
    objects: set[Ref] = set()
    for step in ready:
        touched = {step.object, *(d.object for d in step.disrupts)}
        if hosts.isdisjoint(step.hosts) and objects.isdisjoint(touched):
            chosen.append(step)
        hosts.update(step.hosts)  # of one left out, too: what comes after it on a host waits for it
        objects.update(touched)
    return chosen


def _planned(steps: Sequence[Step]) -> list[Planned]:
    """A step comes after the latest earlier step that shares a host or its object with it.

    What comes after a provisional step of its own object is provisional as well.
    """
    provisional: set[Ref] = set()
    latest: dict[str | Ref, int] = {}
    planned: list[Planned] = []
    for index, step in enumerate(steps):
        shared = [latest[what] for what in (*step.hosts, step.object) if what in latest]
        if step.provisional:
            provisional.add(step.object)
        shown = dataclasses.replace(step, provisional=step.object in provisional)
        planned.append(Planned(shown, (steps[max(shared)].id,) if shared else ()))
        latest.update(dict.fromkeys((*step.hosts, step.object), index))
    return planned
