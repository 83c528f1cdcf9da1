"""Who has to agree to what a step disrupts, and did they."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from controller.core.words import Disruption, Step
from controller.spec.model import Specs
from controller.spec.policy import Mode, Permission
from controller.spec.ref import Ref


@dataclass(frozen=True, slots=True)
class Approval:
    """A permission that somebody gave for one step, which they were shown, and for no other.

    ``permission`` of ``object``, which the step disrupts and which may be in no spec. The step is known by the object
    that it puts right (``of``), its layer, its action and the reason of the drift, and by the digest of the spec that
    ``of`` had then; ``summary`` says what exactly it does, "" where that was not known when it was shown. ``until`` is
    in UNIX seconds, None: for as long as the drift lasts. ``why``, ``by`` and ``at`` are for people.
    """

    id: str
    permission: Permission
    object: Ref
    of: Ref
    layer: str
    action: str
    reason: str
    digest: str
    until: float | None
    why: str
    by: str
    at: float
    summary: str = ""

    def covers(self, step: Step, digest: str) -> bool:
        """Whether the step is the one that was shown; ``digest`` is of the present spec of its object."""
        shown = self.of, self.layer, self.action, self.reason, self.digest
        same = shown == (step.object, step.layer, step.action, step.reason, digest)
        return same and self.summary in ("", step.summary)

    @property
    def gives(self) -> Disruption:
        """The permission that it gives, to the step that it covers."""
        return Disruption(self.object, self.permission)


def lapsed(approval: Approval, specs: Specs, ready: Collection[Ref]) -> str:
    """Why an approval is good for nothing any more, "" while it may be: its drift is gone, or the spec is another."""
    if approval.of not in specs:
        return f"{approval.of} is in no spec any more"
    if approval.digest != specs.digest_of(approval.of):
        return f"the spec of {approval.of} has changed"
    return f"{approval.of} is ready" if approval.of in ready else ""


@dataclass(frozen=True)
class Grants:
    """The permissions of one run.

    What the specs allow for good; what is ``given`` on the command line; ``approvals``, each for a step.
    """

    specs: Specs
    given: frozenset[Disruption] = frozenset()
    approvals: tuple[Approval, ...] = ()

    def missing(self, step: Step) -> tuple[Disruption, ...]:
        """The permissions that a step still lacks, from every object that it disrupts."""
        approved = {approval.gives for approval in self._covering(step)}
        return tuple(d for d in step.disrupts if not self._has(d) and d not in approved)

    def needed(self, step: Step) -> tuple[Approval, ...]:
        """The approvals without which the step might not be started: they are used up when it has worked."""
        without = dataclasses.replace(self, approvals=())
        if without.may(step):
            return ()
        missing = set(without.missing(step))
        own_mode = self.mode_of(step.object) is not Mode.ENFORCE and all(d.object != step.object for d in self.given)
        used: dict[Disruption, Approval] = {}
        for approval in self._covering(step):
            if approval.gives in missing or (own_mode and approval.object == step.object):
                used.setdefault(approval.gives, approval)  # of several for alike steps, one is for this step
        return tuple(used.values())

    def without(self, spent: Collection[Approval]) -> Grants:
        """The permissions that are left when these approvals are used up."""
        return dataclasses.replace(self, approvals=tuple(a for a in self.approvals if a not in spent))

    def source(self, step: Step, disruption: Disruption) -> str:
        """Where a permission of a step comes from: ``spec``, ``command line``, ``approval ID``; "" when it lacks."""
        if self._allowed(disruption):
            return "spec"
        if disruption in self.given:
            return "command line"
        return next((f"approval {a.id}" for a in self._covering(step) if a.gives == disruption), "")

    def mode_of(self, ref: Ref) -> Mode:
        """An object's own mode; an object in no spec has given nothing."""
        obj = self.specs.get(ref)
        return obj.policy.mode if obj is not None else Mode.REPORT

    def may(self, step: Step) -> bool:
        """Whether the step may be started now: nothing is missing, and its object is not only reported on."""
        if self.missing(step):
            return False
        if self.mode_of(step.object) is Mode.ENFORCE or any(d.object == step.object for d in self.given):
            return True
        return any(approval.object == step.object for approval in self._covering(step))

    def _covering(self, step: Step) -> tuple[Approval, ...]:
        of_object = [approval for approval in self.approvals if approval.of == step.object]
        if not of_object or step.object not in self.specs:
            return ()
        digest = self.specs.digest_of(step.object)
        return tuple(approval for approval in of_object if approval.covers(step, digest))

    def _has(self, disruption: Disruption) -> bool:
        return disruption in self.given or self._allowed(disruption)

    def _allowed(self, disruption: Disruption) -> bool:
        obj = self.specs.get(disruption.object)
        return obj is not None and obj.policy.mode is Mode.ENFORCE and disruption.permission in obj.policy.allow


def asked_for(steps: Iterable[Step]) -> frozenset[Disruption]:
    """Every permission that a plan's steps ask for: what ``--yes`` gives, and no more."""
    return frozenset(d for step in steps for d in step.disrupts)
