"""Who has to agree to what a step disrupts, and did they."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from controller.core.words import Disruption, Step
from controller.spec.model import Specs
from controller.spec.policy import Mode
from controller.spec.ref import Ref


@dataclass(frozen=True)
class Grants:
    """The permissions of one run: what the specs allow for good, and ``given`` on the command line or by approval."""

    specs: Specs
    given: frozenset[Disruption] = frozenset()

    def missing(self, step: Step) -> tuple[Disruption, ...]:
        """The permissions that a step still lacks, from every object that it disrupts."""
        return tuple(d for d in step.disrupts if not self._has(d))

    def mode_of(self, ref: Ref) -> Mode:
        """An object's own mode; an object in no spec has given nothing."""
        obj = self.specs.get(ref)
        return obj.policy.mode if obj is not None else Mode.REPORT

    def may(self, step: Step) -> bool:
        """Whether the step may be started now: nothing is missing, and its object is not only reported on."""
        if self.missing(step):
            return False
        return self.mode_of(step.object) is Mode.ENFORCE or any(d.object == step.object for d in self.given)

    def _has(self, disruption: Disruption) -> bool:
        if disruption in self.given:
            return True
        obj = self.specs.get(disruption.object)
        return obj is not None and obj.policy.mode is Mode.ENFORCE and disruption.permission in obj.policy.allow


def asked_for(steps: Iterable[Step]) -> frozenset[Disruption]:
    """Every permission that a plan's steps ask for: what ``--yes`` gives, and no more."""
    return frozenset(d for step in steps for d in step.disrupts)
