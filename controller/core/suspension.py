"""Objects that somebody has told the controller to leave alone for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

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

    def __str__(self) -> str:
        until = f"until {datetime.fromtimestamp(self.until, UTC):%Y-%m-%d %H:%M} UTC" if self.until else "until resumed"
        return f"{self.object} is suspended by {self.by} {until}" + (f": {self.reason}" if self.reason else "")


SUSPENDED = "suspended"
"""The reason of a step that is not begun, and of the condition."""


def stopped(steps: Iterable[Step], suspensions: Mapping[Ref, Suspension], specs: Specs) -> dict[str, tuple[str, str]]:
    """The steps that suspensions hold, by id: the reason and a message."""
    held = ((step, held_by(step, suspensions, specs)) for step in steps)
    return {step.id: (SUSPENDED, str(by)) for step, by in held if by is not None}


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
