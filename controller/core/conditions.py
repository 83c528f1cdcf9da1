"""Conditions: the states of an object that people and alerts read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from controller.core.next_steps import Judged, Next
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
    ROLLED_BACK = "RolledBack"
    """Of a server: the last good engine and flags are there in place of those that the spec asks for, which failed."""


_OF_ALL = (Type.READY, Type.RECONCILING, Type.STALLED)


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


def of_object(ref: Ref, upcoming: Next, lacking: Mapping[str, str], failed: Mapping[str, str]) -> tuple[Condition, ...]:
    """The conditions of one object.

    ``lacking`` maps the id of a step to the permissions that it waits for, ``failed`` to how it failed.
    """
    chain = [judged for judged in upcoming.judged if judged.object == ref]
    found = _of_chain(ref, chain, lacking, failed)
    return (*found, _rolled_back(chain, found[0])) if ref.kind == "ModelServer" else found


def _of_chain(
    ref: Ref, chain: Sequence[Judged], lacking: Mapping[str, str], failed: Mapping[str, str]
) -> tuple[Condition, ...]:
    for judged in sorted(chain, key=_is_told_only):  # what is at work, or stuck, before what is only told
        match judged.verdict:
            case Unseen(reason, message):
                return tuple(Condition(each, Status.UNKNOWN, reason, message) for each in _OF_ALL)
            case Drift() as drift:
                return _of_drift(judged.layer, drift, lacking, failed)
    if ref.kind != "Host" and chain and all(isinstance(judged.verdict, Skipped) for judged in chain):
        # Nobody looked: a container on a host in maintenance is not ready because nothing is said against it.
        why = next((judged.verdict.why for judged in chain if isinstance(judged.verdict, Skipped)), "")
        return tuple(Condition(each, Status.UNKNOWN, NOT_LOOKED_AFTER, why) for each in _OF_ALL)
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


def _of_drift(layer: str, drift: Drift, lacking: Mapping[str, str], failed: Mapping[str, str]) -> tuple[Condition, ...]:
    ready = Condition(Type.READY, Status.FALSE, drift.reason, f"{layer}: {drift.message}")
    stalled = _why_stalled(drift.remedy, lacking, failed)
    if stalled is not None:
        return (
            ready,
            Condition(Type.RECONCILING, Status.FALSE, *stalled),
            Condition(Type.STALLED, Status.TRUE, *stalled),
        )
    return (
        ready,
        Condition(Type.RECONCILING, Status.TRUE, drift.reason, drift.message),
        Condition(Type.STALLED, Status.FALSE, drift.reason, ""),
    )


def _why_stalled(
    remedy: Step | Block | Wait, lacking: Mapping[str, str], failed: Mapping[str, str]
) -> tuple[str, str] | None:
    match remedy:
        case Block() as block:
            return block.reason, f"{block.message}; {block.needs}"
        case Step() as step if step.id in failed:
            return STEP_FAILED, failed[step.id]
        case Step() as step if step.id in lacking:
            return NOT_PERMITTED, f"waits for {lacking[step.id]}"
    return None


def of_all(
    refs: Sequence[Ref], upcoming: Next, lacking: Mapping[str, str], failed: Mapping[str, str]
) -> dict[Ref, tuple[Condition, ...]]:
    """The conditions of many objects."""
    return {ref: of_object(ref, upcoming, lacking, failed) for ref in refs}
