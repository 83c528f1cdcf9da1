"""Which of the ready steps may run side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from controller.core.words import Step
from controller.spec.model import Limits


def batch(
    ready: Iterable[Step], limits: Limits, busy: frozenset[str] = frozenset(), at_work: Sequence[Step] = ()
) -> tuple[Step, ...]:
    """The first steps, in order, that overlap neither with each other or those ``at_work``, nor on ``busy`` hosts.

    What is at work on a busy host counts as a step that disrupts: nobody can say that it does not.
    """
    chosen: list[Step] = []
    hosts = {*busy, *(host for step in at_work for host in step.hosts)}
    for step in ready:
        if hosts & kept_apart(step.hosts, limits.never_together):
            continue
        beside = (*at_work, *chosen)
        if any(step.object == other.object or _share(step, other) for other in beside):
            continue
        if step.disrupts and len(busy) + sum(1 for other in beside if other.disrupts) >= limits.disruptive_at_once:
            continue
        chosen.append(step)
        hosts |= set(step.hosts)
    return tuple(chosen)


def kept_apart(hosts: Iterable[str], never_together: Sequence[Sequence[str]]) -> set[str]:
    """These hosts, and those that must not be worked on at the same time as one of them."""
    apart = set(hosts)
    for group in never_together:
        if apart & set(group):
            apart |= set(group)
    return apart


def _share(one: Step, other: Step) -> bool:
    return bool({d.object for d in one.disrupts} & {d.object for d in other.disrupts})
