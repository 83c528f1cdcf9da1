"""Conditions: the states of an object that people and alerts read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from controller.core.next_steps import Judged, Next
from controller.core.suspension import SUSPENDED, Suspension
from controller.core.words import Block, Drift, InSync, Skipped, Step, Unseen, Wait
from controller.spec.ref import Ref


class Status(StrEnum):
    """The three answers of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Type(StrEnum):
    """The conditions of an object."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    SUSPENDED = "Suspended"
    ROLLED_BACK = "RolledBack"
    """Of a server: the last good engine and flags are there in place of those that the spec asks for, which failed."""


LOOKED_AT = (Type.READY, Type.RECONCILING, Type.STALLED)
"""What can be Unknown: it is told from facts."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition: a closed ``reason`` for machines, a message with the evidence for people."""

    type: Type
    status: Status
    reason: str
    message: str


IN_SYNC = "InSync"
NOT_LOOKED_AFTER = "not-looked-after"
NOT_PERMITTED = "permission-missing"
STEP_FAILED = "step-failed"
ROLLED_BACK = "rolled-back"
"""The reason of the drift that is left when the last good one was put back."""
NOT_SUSPENDED = "not-suspended"
SPEC_ERRORS = "spec-errors"
BREAKER_OPEN = "breaker-open"


Stops = Mapping[str, tuple[str, str]]
"""Why steps are not begun, by the step's id: a closed reason and a message."""


def of_object(ref: Ref, upcoming: Next, lacking: Mapping[str, str], failed: Mapping[str, str]) -> tuple[Condition, ...]:
    """The conditions of one object.

    ``lacking`` maps the id of a step to the permissions that it waits for, ``failed`` to how it failed.
    """
    return of_all([ref], upcoming, lacking, failed)[ref]


def _of_chain(ref: Ref, chain: Sequence[Judged], stops: Stops) -> tuple[Condition, ...]:
    found = _of_layers(ref, chain, stops)
    return (*found, _rolled_back(chain, found[0])) if ref.kind == "ModelServer" else found


def _of_layers(ref: Ref, chain: Sequence[Judged], stops: Stops) -> tuple[Condition, ...]:
    for judged in sorted(chain, key=_is_told_only):  # what is at work, or stuck, before what is only told
        match judged.verdict:
            case Unseen(reason, message):
                return tuple(Condition(each, Status.UNKNOWN, reason, message) for each in LOOKED_AT)
            case Drift() as drift:
                return _of_drift(judged.layer, drift, stops)
    if ref.kind != "Host" and chain and all(isinstance(judged.verdict, Skipped) for judged in chain):
        # Nobody looked: a container on a host in maintenance is not ready because nothing is said against it.
        why = next((judged.verdict.why for judged in chain if isinstance(judged.verdict, Skipped)), "")
        return tuple(Condition(each, Status.UNKNOWN, NOT_LOOKED_AFTER, why) for each in LOOKED_AT)
    return (
        Condition(Type.READY, Status.TRUE, IN_SYNC, _all_right(ref, chain)),
        Condition(Type.RECONCILING, Status.FALSE, IN_SYNC, ""),
        Condition(Type.STALLED, Status.FALSE, IN_SYNC, ""),
    )


def _all_right(ref: Ref, chain: Sequence[Judged]) -> str:
    """What is said of an object that is as it should be: of a server, what there is to know all the same."""
    notes = [
        f"{judged.layer}: {judged.verdict.note}"
        for judged in chain
        if ref.kind == "ModelServer" and isinstance(judged.verdict, InSync) and judged.verdict.note
    ]
    return "; ".join(["everything is as the spec says", *notes])


def _rolled_back(chain: Sequence[Judged], ready: Condition) -> Condition:
    """Whether it serves with what is not asked for; not known when what it serves with is not."""
    for judged in chain:
        if isinstance(judged.verdict, Drift) and judged.verdict.reason == ROLLED_BACK:
            return Condition(Type.ROLLED_BACK, Status.TRUE, ROLLED_BACK, judged.verdict.message)
    if ready.status is Status.UNKNOWN:
        return Condition(Type.ROLLED_BACK, Status.UNKNOWN, ready.reason, ready.message)
    return Condition(Type.ROLLED_BACK, Status.FALSE, IN_SYNC, "")


def _is_told_only(judged: Judged) -> bool:
    verdict = judged.verdict
    return isinstance(verdict, Drift) and isinstance(verdict.remedy, Block) and not verdict.remedy.holds


def _of_drift(layer: str, drift: Drift, stops: Stops) -> tuple[Condition, ...]:
    ready = Condition(Type.READY, Status.FALSE, drift.reason, f"{layer}: {drift.message}")
    stalled = _why_stalled(drift.remedy, stops)
    if stalled is not None:
        return (
            ready,
            Condition(Type.RECONCILING, Status.FALSE, *stalled),
            # What somebody has suspended is not stalled: it is as they want it.
            Condition(Type.STALLED, Status.FALSE if stalled[0] == SUSPENDED else Status.TRUE, *stalled),
        )
    return (
        ready,
        Condition(Type.RECONCILING, Status.TRUE, drift.reason, drift.message),
        Condition(Type.STALLED, Status.FALSE, drift.reason, ""),
    )


def _why_stalled(remedy: Step | Block | Wait, stops: Stops) -> tuple[str, str] | None:
    match remedy:
        case Block() as block:
            return block.reason, f"{block.message}; {block.needs}"
        case Step() as step:
            return stops.get(step.id)
    return None


def of_all(
    refs: Sequence[Ref],
    upcoming: Next,
    lacking: Mapping[str, str],
    failed: Mapping[str, str],
    stopped: Stops | None = None,
    suspensions: Mapping[Ref, Suspension] | None = None,
) -> dict[Ref, tuple[Condition, ...]]:
    """The conditions of many objects; ``stopped`` are steps that are not begun for other reasons than these two.

    A step that is held by one of ``suspensions`` is in ``stopped`` (``suspension.stopped``).
    """
    stops: dict[str, tuple[str, str]] = {step: (NOT_PERMITTED, f"waits for {what}") for step, what in lacking.items()}
    stops.update({step: (STEP_FAILED, how) for step, how in failed.items()})
    stops.update(stopped or {})
    chains: dict[Ref, list[Judged]] = {ref: [] for ref in refs}
    for judged in upcoming.judged:
        if judged.object in chains:
            chains[judged.object].append(judged)
    held = suspensions or {}
    return {ref: (*_of_chain(ref, chain, stops), _suspended(held.get(ref))) for ref, chain in chains.items()}


def _suspended(suspension: Suspension | None) -> Condition:
    if suspension is None:
        return Condition(Type.SUSPENDED, Status.FALSE, NOT_SUSPENDED, "")
    return Condition(Type.SUSPENDED, Status.TRUE, SUSPENDED, str(suspension))
