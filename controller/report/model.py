"""The JSON that commands print. Stable; ``reconcile schema plan`` and ``reconcile schema status`` print its schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from controller.core.conditions import Condition
from controller.core.next_steps import Judged, Next
from controller.core.permissions import Grants
from controller.core.plan import Plan, Planned
from controller.core.words import Drift, InSync, Skipped, Step, Unseen
from controller.facts.words import FleetFacts, Known
from controller.layers.gpu_health.facts import GpuFacts
from controller.spec.model import GpuOwner, Lifecycle, Specs
from controller.spec.policy import Mode, Permission
from controller.spec.ref import Ref

STOPPING = frozenset(
    {
        Permission.RESTART_SERVER,
        Permission.RESTART_CONTAINER,
        Permission.MOVE_CONTAINER,
        Permission.TAKE_OVER_CONTAINER,
    }
)
DELETING = frozenset({Permission.DELETE_ENVIRONMENT, Permission.DELETE_WEIGHTS, Permission.PRUNE})


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DriftRow(_Row):
    """A layer's difference between spec and facts."""

    object: str
    layer: str
    reason: str
    message: str
    evidence: dict[str, str]


class PermissionRow(_Row):
    """A permission that a step needs, of which object, and whether it is given."""

    permission: str
    object: str
    given: bool


class StepRow(_Row):
    """A step of the predicted chain. ``requires`` are ids of steps that come before it."""

    id: str
    hosts: list[str]
    object: str
    layer: str
    action: str
    reason: str
    summary: str
    disrupts: list[str]
    permissions: list[PermissionRow]
    requires: list[str]
    provisional: bool
    diff: str
    script: str | None = None


class BlockedRow(_Row):
    """A drift that cannot be put right, and what it needs."""

    object: str
    layer: str
    reason: str
    message: str
    needs: str


class UnknownRow(_Row):
    """A layer that could not be judged."""

    object: str
    layer: str
    reason: str
    message: str


class StopRow(_Row):
    """What would be stopped, and for how many seconds at most."""

    object: str
    at_most_seconds: float


class Summary(_Row):
    """The end of a plan. ``leaves_alone`` is for people."""

    objects: int
    drifted: int
    steps: int
    not_permitted: int
    blocked: int
    unknown: int
    deletes: list[str]
    stops: list[StopRow]
    reboots: list[str]
    leaves_alone: list[str]


class PlanReport(_Row):
    """What ``reconcile plan -o json`` prints."""

    drift: list[DriftRow]
    steps: list[StepRow]
    blocked: list[BlockedRow]
    unknown: list[UnknownRow]
    summary: Summary

    @property
    def changes(self) -> bool:
        """Whether anything differs from the specs."""
        return bool(self.drift)


class ConditionRow(_Row):
    """One condition of an object."""

    type: str
    status: str
    reason: str
    message: str


class ObjectRow(_Row):
    """An object's conditions, and the layers of it that have drifted."""

    object: str
    host: str
    mode: str
    conditions: list[ConditionRow]
    drift: list[DriftRow]


class StatusReport(_Row):
    """What ``reconcile status -o json`` prints."""

    objects: list[ObjectRow]


def plan_report(
    plan: Plan, specs: Specs, facts: FleetFacts, grants: Grants, wanted: Callable[[Ref, str], bool], scripts: bool
) -> PlanReport:
    """The plan as rows; ``wanted`` narrows it to some layers of some objects."""
    drift = [
        drift_row(j, j.verdict) for j in plan.now.judged if isinstance(j.verdict, Drift) and wanted(j.object, j.layer)
    ]
    steps = [_step_row(p, grants, scripts) for p in plan.steps if wanted(p.step.object, p.step.layer)]
    blocked = [
        BlockedRow(object=str(j.object), layer=j.layer, reason=b.reason, message=b.message, needs=b.needs)
        for j, b in plan.then.blocked
        if wanted(j.object, j.layer)
    ]
    unknown = unknown_rows(plan.now, wanted)
    refs = {ref for obj in specs if wanted(ref := obj.ref, "")}
    chosen = [p.step for p in plan.steps if wanted(p.step.object, p.step.layer)]
    summary = Summary(
        objects=len(refs),
        drifted=len({row.object for row in drift}),
        steps=len(steps),
        not_permitted=sum(1 for step in chosen if not grants.may(step)),
        blocked=len(blocked),
        unknown=len(unknown),
        deletes=_of_class(chosen, DELETING),
        stops=_stops(chosen),
        reboots=_of_class(chosen, frozenset({Permission.REBOOT_HOST})),
        leaves_alone=leaves_alone(specs, facts, refs),
    )
    return PlanReport(drift=drift, steps=steps, blocked=blocked, unknown=unknown, summary=summary)


def status_report(specs: Specs, upcoming: Next, conditions: Mapping[Ref, Sequence[Condition]]) -> StatusReport:
    """The conditions of every object that ``conditions`` names."""
    rows = []
    for ref, of_it in conditions.items():
        obj = specs.get(ref)
        if obj is None:
            continue
        rows.append(
            ObjectRow(
                object=str(ref),
                host=_host_of(specs, ref),
                mode=obj.policy.mode,
                conditions=[
                    ConditionRow(type=c.type, status=c.status, reason=c.reason, message=c.message) for c in of_it
                ],
                drift=[
                    drift_row(j, j.verdict) for j in upcoming.judged if j.object == ref and isinstance(j.verdict, Drift)
                ],
            )
        )
    return StatusReport(objects=rows)


def unknown_rows(upcoming: Next, wanted: Callable[[Ref, str], bool]) -> list[UnknownRow]:
    """Every layer that could not be judged."""
    return [
        UnknownRow(object=str(j.object), layer=j.layer, reason=j.verdict.reason, message=j.verdict.message)
        for j in upcoming.judged
        if isinstance(j.verdict, Unseen) and wanted(j.object, j.layer)
    ]


def drift_row(judged: Judged, drift: Drift) -> DriftRow:
    """One drift."""
    return DriftRow(
        object=str(judged.object),
        layer=judged.layer,
        reason=drift.reason,
        message=drift.message,
        evidence=dict(drift.evidence),
    )


def all_right(upcoming: Next, wanted: Callable[[Ref, str], bool]) -> bool:
    """Whether everything that is wanted is known and as the specs say."""
    return all(isinstance(j.verdict, InSync | Skipped) for j in upcoming.judged if wanted(j.object, j.layer))


def _step_row(planned: Planned, grants: Grants, scripts: bool) -> StepRow:
    step = planned.step
    missing = set(grants.missing(step))
    return StepRow(
        id=step.id,
        hosts=list(step.hosts),
        object=str(step.object),
        layer=step.layer,
        action=step.action,
        reason=step.reason,
        summary=step.summary,
        disrupts=[str(d.object) for d in step.disrupts],
        permissions=[
            PermissionRow(permission=d.permission, object=str(d.object), given=d not in missing) for d in step.disrupts
        ],
        requires=list(planned.requires),
        provisional=step.provisional,
        diff=step.diff,
        script=f"# {step.script.name} {' '.join(step.args)}\n{step.script.text}" if scripts else None,
    )


def _of_class(steps: Iterable[Step], classes: frozenset[Permission]) -> list[str]:
    return list(dict.fromkeys(str(d.object) for step in steps for d in step.disrupts if d.permission in classes))


def _stops(steps: Iterable[Step]) -> list[StopRow]:
    longest: dict[str, float] = {}
    for step in steps:
        for disruption in step.disrupts:
            if disruption.permission in STOPPING:
                name = str(disruption.object)
                longest[name] = longest.get(name, 0.0) + step.timeout
    return [StopRow(object=name, at_most_seconds=seconds) for name, seconds in longest.items()]


def leaves_alone(specs: Specs, facts: FleetFacts, refs: set[Ref]) -> list[str]:
    """What is seen and not touched: other owners' cards, objects that are only reported on, hosts in maintenance."""
    lines: list[str] = []
    for host in specs.hosts.values():
        if Ref("Host", host.name) not in refs:
            continue
        if host.lifecycle is Lifecycle.MAINTENANCE:
            lines.append(f"{host.name}: in maintenance, everything on it")
        seen = facts[host.name].section("host.gpu-health") if host.name in facts else None
        if isinstance(seen, Known) and isinstance(seen.value, GpuFacts):
            lines.extend(_cards_left_alone(host.name, {g.pci: g.owner for g in host.gpus}, seen.value))
    reported = sorted(str(obj.ref) for obj in specs if obj.policy.mode is Mode.REPORT and obj.ref in refs)
    if reported:
        lines.append(f"only reported on (mode: report): {', '.join(reported)}")
    return lines


def _cards_left_alone(host: str, owners: Mapping[str, GpuOwner], facts: GpuFacts) -> list[str]:
    of_vms = [f.pci.removeprefix("0000:") for f in facts.functions if f.is_gpu and owners.get(f.pci) is GpuOwner.VMS]
    unlisted = [f.pci.removeprefix("0000:") for f in facts.functions if f.is_gpu and f.pci not in owners]
    lines = []
    if of_vms:
        lines.append(f"{host}: GPUs of virtual machines: {', '.join(of_vms)}")
    if unlisted:
        lines.append(f"{host}: GPUs that no spec lists: {', '.join(unlisted)}")
    return lines


def _host_of(specs: Specs, ref: Ref) -> str:
    if ref.kind == "Host":
        return ref.name
    if ref.kind == "Container":
        return specs.containers[ref.name].host
    return specs.host_of(specs.servers[ref.name]) or ""
