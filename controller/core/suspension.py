"""Objects that somebody has told the controller to leave alone for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from controller.core.words import Step
from controller.spec.model import Specs
from controller.spec.ref import Ref


@dataclass(frozen=True, slots=True)
class Suspension:
    """An object is left alone: since ``at``, until ``until`` (UNIX seconds; None: until somebody resumes it)."""

    object: Ref
    until: float | None
    reason: str
    by: str
    at: float


def held_by(step: Step, suspensions: Mapping[Ref, Suspension], specs: Specs) -> Suspension | None:
    """The suspension that keeps a step from being performed, None when there is none.

    A step is held by its object and what that stands on, by the hosts that it touches, and by all that it disrupts and
    what that stands on: of a suspended host, nothing on it is touched.
    """
    if not suspensions:
        return None
    return next((suspensions[ref] for ref in _touched(step, specs) if ref in suspensions), None)


def _touched(step: Step, specs: Specs) -> Iterator[Ref]:
    for ref in (step.object, *(d.object for d in step.disrupts)):
        yield from specs.below(ref)
    yield from (Ref("Host", host) for host in step.hosts)
