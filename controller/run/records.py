"""What is kept of what a controller sees and does: in its memory, and of each step in its audit log."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from controller.core.cause import Cause, cause_of
from controller.core.conditions import STEP_FAILED, Condition, Status, Type
from controller.core.next_steps import Next
from controller.core.permissions import Approval, Grants, lapsed
from controller.core.words import Drift, Step, Unseen
from controller.run.audit import Audit
from controller.run.ended import Ended, Result
from controller.run.git import Commit
from controller.run.memory import Event, Kept, Kind, Memory, Outcome
from controller.run.state import Identity, NoState
from controller.spec.model import Specs
from controller.spec.ref import Ref

OF_INTEREST = frozenset({Type.READY, Type.STALLED, Type.SUSPENDED})  # steps tell of what is being reconciled


class Records:
    """The records of one controller at work. Times (``at``) are UNIX seconds."""

    def __init__(self, memory: Memory, state: Path, controller: Identity, specs: Specs, commit: Commit) -> None:
        self.memory = memory
        self._audit = Audit(state, controller)
        self._run = f"{controller.id}-{secrets.token_hex(4)}"
        self._began: dict[
            str, tuple[str, float, str]
        ] = {}  # of a step at work: key of its events, since when, its cause
        self._in_use: dict[str, frozenset[str]] = {}  # the approvals that a step at work was begun by
        self._count = 0
        self.use(specs, commit)

    def use(self, specs: Specs, commit: Commit) -> None:
        """Go by other specs from now on."""
        self._specs = specs
        self._commit = str(commit)
        self._digests = {obj.ref: specs.digest_of(obj.ref) for obj in specs}

    def cause(self, ref: Ref) -> Cause:
        """Who made the object differ from its spec. Raises NoState."""
        return cause_of(ref, self._specs, self.memory.reached)

    def seen(self, upcoming: Next, conditions: Mapping[Ref, Sequence[Condition]], at: float) -> None:
        """Keep what a look at the fleet has shown: conditions with their times, drift, and how far each spec has come.

        Approvals of which the drift is over lapse, but for those of steps at work. Raises NoState.
        """
        drift: dict[tuple[Ref, str], tuple[str, str]] = {}
        before, drifting = self.memory.conditions(), self.memory.drifts()
        for judged in upcoming.judged:
            key, earlier = (judged.object, judged.layer), drifting.get((judged.object, judged.layer))
            if isinstance(judged.verdict, Drift):
                drift[key] = judged.verdict.reason, self.cause(judged.object)
            elif isinstance(judged.verdict, Unseen) and earlier is not None:
                drift[key] = earlier.reason, earlier.cause  # what cannot be seen now has not been put right
        ready = {ref for ref, of_it in conditions.items() if _is(of_it, Type.READY, Status.TRUE)}
        with self.memory.together():
            for ref, of_it in conditions.items():
                self._apply(ref, of_it, at)
                for kept in self.memory.keep_conditions(ref, of_it, self._digests.get(ref, ""), at):
                    if kept.type in OF_INTEREST and (ref in before or kept.type == Type.READY):
                        self._tell(ref, kept, at)
            self.memory.keep_drifts(drift, at)
            for ref in before.keys() - self._digests.keys():
                self.memory.forget(ref)
        in_use = {approval for of_step in self._in_use.values() for approval in of_step}
        for approval in self.memory.approvals(at):
            if approval.id not in in_use and (why := lapsed(approval, self._specs, ready)):
                self.memory.lapse(approval.id, at)
                self._event(
                    Kind.APPROVAL,
                    f"{approval.id}:lapse",
                    approval.object,
                    at,
                    action="lapse",
                    message=f"an approval has lapsed: {why}",
                )

    def started(self, step: Step, upcoming: Next, grants: Grants, at: float) -> None:
        """A step is about to be performed. Raises NoState: what cannot be recorded is not begun."""
        verdict = upcoming.verdict(step.object, step.layer)
        message = verdict.message if isinstance(verdict, Drift) else step.summary
        cause = self.cause(step.object)
        self._audit.started(step, grants, self._commit, at, cause=cause, message=message)
        self._count += 1
        key = f"{self._run}:{self._count}"
        self._began[step.id] = key, at, cause
        self._in_use[step.id] = frozenset(approval.id for approval in grants.needed(step))
        self._event(
            Kind.STEP_STARTED,
            f"{key}:started",
            step.object,
            at,
            step=step,
            cause=cause,
            message=message,
        )

    def ended(self, ended: Ended, grants: Grants, at: float) -> Grants:
        """A step has ended; the permissions that are left, without the approvals that it has used up.

        Of a job it comes twice when the job fails later: first that it was started, then how it ended.
        """
        step = ended.step
        self._in_use.pop(step.id, None)
        self._count += 1
        key, began, cause = self._began.pop(step.id, (f"{self._run}:{self._count}", at, ""))
        self._event(
            Kind.STEP_ENDED,
            f"{key}:ended",
            step.object,
            at,
            step=step,
            cause=cause,
            result=ended.result,
            message=ended.message,
            seconds=at - began,
        )
        try:
            self._audit.ended(ended, self._commit, at)
        except NoState as error:
            self.memory.lost(error)  # what was done is done: the next look goes on from it
        if ended.result is not Result.WORKED:
            return grants
        spent = grants.needed(step)
        for approval in spent:
            self.used(approval, step.id, at)
        return grants.without(spent)

    def used(self, approval: Approval, step: str, at: float) -> None:
        """An approval is used up: the step that it was for has worked."""
        self.memory.used(approval.id, at)
        message = f"{approval.gives} was used by {step}"
        self._event(Kind.APPROVAL, f"{approval.id}:use", approval.object, at, action="use", message=message)

    def _apply(self, ref: Ref, of_it: Sequence[Condition], at: float) -> None:
        digest = self._digests.get(ref)
        if digest is None:
            return
        if self.memory.applied(ref, digest, self._specs.canonical(ref), self._commit, at):
            message = f"spec {digest[:12]} is wanted"
            self._event(Kind.SPEC, f"{ref}:{digest}:{at}", ref, at, result=Outcome.APPLYING, message=message)
        if _is(of_it, Type.READY, Status.TRUE):
            self.memory.outcome(ref, digest, Outcome.REACHED, at)
        elif any(c.reason == STEP_FAILED for c in of_it):
            self.memory.outcome(ref, digest, Outcome.FAILED, at)

    def _tell(self, ref: Ref, kept: Kept, at: float) -> None:
        self._event(
            Kind.CONDITION,
            f"{ref}:{kept.type}:{kept.status}:{at}",
            ref,
            at,
            action=kept.type,
            result=kept.status,
            message=f"{kept.type} is {kept.status} ({kept.reason}): {kept.message}".rstrip(": "),
        )

    def _event(
        self,
        kind: Kind,
        key: str,
        ref: Ref,
        at: float,
        step: Step | None = None,
        action: str = "",
        cause: str = "",
        result: str = "",
        message: str = "",
        seconds: float | None = None,
    ) -> None:
        layer, action, name = (step.layer, step.action, step.id) if step is not None else ("", action, "")
        digest = self._digests.get(ref, "")
        self.memory.event(
            Event(key, at, kind, ref, layer, action, name, cause, result, message, digest, self._commit, seconds)
        )


def _is(conditions: Sequence[Condition], kind: Type, status: Status) -> bool:
    return any(c.type is kind and c.status is status for c in conditions)
