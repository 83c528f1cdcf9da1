"""The JSON that commands print. Stable; ``reconcile schema NAME`` prints the schema of each part of ``PRINTED``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict, JsonValue

from controller.core import observe
from controller.core.conditions import Condition
from controller.core.next_steps import Judged, Next
from controller.core.permissions import Grants
from controller.core.plan import Plan, Planned
from controller.core.suspension import Suspension, stopped
from controller.core.view import View
from controller.core.words import Block, Drift, InSync, NotKnown, Skipped, Step, Unseen, Wait
from controller.facts.units import Job
from controller.facts.words import FleetFacts, Known
from controller.layers.boot.next_boot import next_boot
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.kernel.facts import KernelFacts
from controller.layers.power.facts import PowerFacts
from controller.layers.server_process.facts import ProcessFacts
from controller.run.drain import Drain
from controller.run.ended import Ended
from controller.run.memory import Backoff, Drifting, Kept, Key
from controller.run.once import Report
from controller.spec.model import GpuOwner, Lifecycle, ModelServer, Specs
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
    """A layer's difference between spec and facts; ``since`` (UNIX seconds) where it is remembered."""

    object: str
    layer: str
    reason: str
    message: str
    evidence: dict[str, str]
    since: float | None = None


class PermissionRow(_Row):
    """A permission that a step needs, of which object, and whether it is given."""

    permission: str
    object: str
    given: bool


class StepRow(_Row):
    """A step of the predicted chain.

    ``requires`` are ids of steps that come before it; ``suspended`` says which suspension holds it, if one does.
    """

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
    suspended: str | None = None


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


class WaitRow(_Row):
    """A drift that is being put right already (``what``: a job, a reboot), and on which hosts."""

    object: str
    layer: str
    what: str
    message: str
    hosts: list[str]


class StopRow(_Row):
    """What would be stopped, for how many seconds at most, and by what; a server until it is ready again."""

    object: str
    at_most_seconds: float
    why: list[str] = []


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
    waiting: list[WaitRow]
    unknown: list[UnknownRow]
    summary: Summary

    @property
    def changes(self) -> bool:
        """Whether anything differs from the specs."""
        return bool(self.drift)


class NextBootReport(_Row):
    """What ``reconcile plan --next-boot -o json`` prints: the kernels that boot next, what would be wrong."""

    kernels: dict[str, str]
    wrong: list[BlockedRow]
    unknown: list[UnknownRow]


class ConditionRow(_Row):
    """One condition of an object; ``since`` (UNIX seconds) is when its status last changed, if that is remembered."""

    type: str
    status: str
    reason: str
    message: str
    since: float | None


class ObjectRow(_Row):
    """An object's conditions, and the layers of it that have drifted."""

    object: str
    host: str
    mode: str
    conditions: list[ConditionRow]
    drift: list[DriftRow]


class RunningRow(_Row):
    """A step or job that is at work on a host now; ``state`` is running or stalled.

    ``done`` and ``total`` are a job's progress, in a unit of its own; ``total`` is 0 while it is not known.
    """

    host: str
    id: str
    object: str
    state: str
    done: int | None = None
    total: int | None = None


class StatusReport(_Row):
    """What ``reconcile status -o json`` prints. ``at`` is when, in UNIX seconds."""

    at: float
    objects: list[ObjectRow]
    running: list[RunningRow]


class LayerRow(_Row):
    """A layer of an object. ``verdict`` is ok, skipped, unknown or drift; ``waits_for`` what comes next, or has to.

    ``since`` (UNIX seconds) is when it began to drift, where that is remembered.
    """

    object: str
    layer: str
    verdict: str
    reason: str
    message: str
    evidence: dict[str, str]
    waits_for: str
    since: float | None = None


class WhyReport(_Row):
    """What ``reconcile why -o json`` prints: the layers of an object and of what it stands on, lowest first.

    ``first`` is the first one that is not right, None when all are. ``suspended`` are the suspensions of the object and
    of what it stands on. ``at`` is when, in UNIX seconds.
    """

    at: float
    suspended: list[str]
    object: str
    first: LayerRow | None
    layers: list[LayerRow]


class PerformedRow(_Row):
    """A step that was performed. ``result`` is worked, failed, stale, refused or lost."""

    id: str
    object: str
    layer: str
    action: str
    hosts: list[str]
    result: str
    message: str


class OnceReport(_Row):
    """What ``reconcile --once -o json`` prints.

    ``failed``: ids of steps that were given up, and how they failed. ``waiting_for_window``: ids of steps, and which
    maintenance window they wait for. ``suspended``: ids of steps, and which suspension holds them.
    """

    performed: list[PerformedRow]
    in_wanted_state: bool
    failed: dict[str, str]
    blocked: list[BlockedRow]
    waiting_for_permission: list[str]
    waiting_for_window: dict[str, str]
    suspended: dict[str, str]
    reported_only: list[str]
    waiting: list[WaitRow]
    unknown: list[UnknownRow]
    timed_out: bool


class PlaceRow(_Row):
    """A place in a spec file; line and column count from 1."""

    file: str
    line: int
    column: int


class ErrorRow(_Row):
    """Why a command could not be carried out. Of spec files: where, and a way out; of all else, the message alone."""

    message: str
    code: str | None = None
    file: str | None = None
    line: int | None = None
    column: int | None = None
    object: str | None = None
    field: str | None = None
    found: str | None = None
    allowed: str | None = None
    nearest: str | None = None
    next: str | None = None
    see_also: list[PlaceRow] = []


class ValidateReport(_Row):
    """What ``reconcile validate -o json`` prints when the specs are valid; ``errors`` is empty then.

    ``warnings`` keep nothing from being done: options that a later version refuses, versions that are known bad.
    """

    objects: list[str]
    errors: list[ErrorRow]
    warnings: list[ErrorRow] = []


class FitGpuRow(_Row):
    """A GPU of a server; ``memory`` in bytes, None when nobody knows."""

    pci: str
    model: str
    memory: int | None


class FitLineRow(_Row):
    """A line of the sum for one GPU: bytes that are there, or (negative) taken away; None for what takes none of it."""

    what: str
    how: str
    bytes: int | None


class FitProblemRow(_Row):
    """Why it would not start, or why that is doubtful."""

    code: str
    message: str
    next: str


class FitReport(_Row):
    """What ``reconcile fit -o json`` prints.

    ``outcome`` is fits, short (it starts, and cannot hold one request of the longest context), doubtful (by the sum it
    would not start, which may be wrong by as much), refuses, or unknown (``message`` says why there is no sum).
    Bytes are those of one GPU. ``pool_tokens`` is what the KV cache holds in all, ``tokens`` what one request can have
    of ``context``, ``requests`` how many may run at once.
    """

    server: str
    outcome: str
    message: str
    engine: str
    engine_version: str
    model: str
    revision: str
    gpus: list[FitGpuRow] = []
    tensor_parallel: int | None = None
    weight_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    state_bytes_per_request: int | None = None
    kv_how: str = ""
    state_how: str = ""
    context: int | None = None
    pool_tokens: int | None = None
    tokens: int | None = None
    requests: int | None = None
    min_context: int | None = None
    lines: list[FitLineRow] = []
    problems: list[FitProblemRow] = []
    notes: list[str] = []
    warnings: list[ErrorRow] = []


class ErrorsReport(_Row):
    """What every command prints with ``-o json`` when it could not be carried out."""

    errors: list[ErrorRow]


class KeyRow(_Row):
    """The key of a server on the way to a host. ``known_by`` is what trusts it, or expects another key."""

    server: str
    known_as: str
    key: str
    trusted: bool
    changed: bool
    known_by: str
    pinned: bool


class TrustReport(_Row):
    """What ``reconcile trust -o json`` prints. Without ``--yes`` nothing is pinned."""

    keys: list[KeyRow]


class VersionReport(_Row):
    """What ``reconcile version -o json`` prints."""

    version: str


class CandidateRow(_Row):
    """A host that could take a container; or why it cannot, and what that needs."""

    host: str
    can: bool
    reason: str
    message: str
    needs: str


class LeavingRow(_Row):
    """A container that lies on a host, the servers in it, who could take it, and where its spec stands."""

    object: str
    id: int
    runs: bool
    servers: list[str]
    wanted_on: str
    spec: str
    candidates: list[CandidateRow]


class DrainReport(_Row):
    """What ``reconcile drain HOST -o json`` prints. ``guests_in_no_spec`` are left alone."""

    host: str
    containers: list[LeavingRow]
    servers: list[str]
    guests_in_no_spec: list[str]


class SinceRow(_Row):
    """A condition of an object, since when its status is so, and the digest of the spec that it is about."""

    type: str
    status: str
    reason: str
    message: str
    since: float
    spec_digest: str


class DriftingRow(_Row):
    """A layer that is not right. ``cause``: intentional (the spec changed) or corrective (the world did)."""

    layer: str
    reason: str
    message: str
    evidence: dict[str, str]
    cause: str | None
    since: float | None


class PendingRow(_Row):
    """What an object waits for in a layer: permission, window, backoff, budget, job or blocked; and what exactly."""

    layer: str
    waiting_for: str
    message: str


class SuspendedRow(_Row):
    """That an object is left alone: until when (None: until somebody resumes it), by whom and why."""

    until: float | None
    by: str
    reason: str
    at: float


class PresentRow(_Row):
    """An object as the controller sees it. ``unknown`` are the layers that could not be judged."""

    object: str
    host: str
    mode: str
    conditions: list[SinceRow]
    drift: list[DriftingRow]
    unknown: list[UnknownRow]
    pending: list[PendingRow]
    suspended: SuspendedRow | None
    backoff_seconds: float
    last_success: float | None


class LookedRow(_Row):
    """How a host was last looked at: whether it answered, when it last did, and how many seconds the look took."""

    host: str
    up: bool
    last_seen: float | None
    observe_seconds: float | None


class FollowedRow(_Row):
    """The specs that are followed: their git commit, when they were last read without an error, and errors now."""

    commit: str
    dirty: bool
    loaded: float | None
    errors: list[ErrorRow]


class ControllerReport(_Row):
    """What a running controller answers at ``/status``. Times are UNIX seconds.

    ``healthy``: the loop moves. ``ready``: specs are loaded, and every host was looked at once. ``notes`` are for
    people.
    """

    version: str
    healthy: bool
    ready: bool
    last_pass: float | None
    specs: FollowedRow
    hosts: list[LookedRow]
    objects: list[PresentRow]
    running: list[RunningRow]
    notes: list[str]


class EventRow(_Row):
    """Something that happened. ``number`` counts up; ``at`` is in UNIX seconds, ``seconds`` how long a step took.

    ``kind``: step-started, step-ended, condition, spec, approval, suspension, breaker, controller. ``cause``:
    intentional (the spec changed) or corrective (the world did).
    """

    number: int
    at: float
    kind: str
    object: str | None
    layer: str
    action: str
    step: str
    cause: str
    result: str
    message: str
    spec_digest: str
    commit: str
    seconds: float | None


class EventsReport(_Row):
    """What ``reconcile events -o json`` prints; with ``--follow``, one such object a line for each event."""

    events: list[EventRow]


class AppliedRow(_Row):
    """A spec of an object that was applied. Times are in UNIX seconds.

    ``outcome``: applying, reached, failed or superseded.
    ``diff`` is against the spec before it, where ``--diff`` asks for it.
    """

    object: str
    spec_digest: str
    commit: str
    at: float
    outcome: str
    outcome_at: float
    spec: dict[str, JsonValue]
    diff: str | None


class HistoryReport(_Row):
    """What ``reconcile history -o json`` prints; the last one first."""

    applied: list[AppliedRow]


class ApprovalRow(_Row):
    """A permission for one step: ``of`` what object, in which layer, for which reason. Times are in UNIX seconds."""

    id: str
    permission: str
    object: str
    of: str
    layer: str
    action: str
    reason: str
    summary: str
    until: float | None
    why: str
    by: str
    at: float


class ApproveReport(_Row):
    """What ``reconcile approve -o json`` prints: the steps that were shown, and the approvals that were given.

    Without an argument: no steps, and the approvals in force.
    """

    steps: list[StepRow]
    approvals: list[ApprovalRow]


class SuspensionRow(_Row):
    """An object that is left alone. Times are in UNIX seconds; ``until`` None: until somebody resumes it."""

    object: str
    until: float | None
    reason: str
    by: str
    at: float


class SuspensionsReport(_Row):
    """What ``reconcile suspend`` and ``resume`` print with ``-o json``: the suspensions in force afterwards."""

    suspensions: list[SuspensionRow]


class WaitReport(_Row):
    """What ``reconcile wait -o json`` prints: the condition at the end, and whether it was the one asked for."""

    object: str
    condition: ConditionRow
    wanted: str
    reached: bool
    seconds: float


class GpuRow(_Row):
    """A card of a host. Memory in bytes, None where nobody tells.

    ``owner`` is what the spec says: containers, vms, host, or "" for a card that it does not list. ``driver`` is the
    one it is bound to, "" for none. ``containers`` and ``servers`` are to have it; ``guests`` have it by their configs.
    ``pending`` is what differs, in words.
    """

    host: str
    pci: str
    model: str
    uuid: str
    memory_used: int | None
    memory_total: int | None
    owner: str
    driver: str
    containers: list[str]
    servers: list[str]
    guests: list[str]
    pending: list[str]


class GpusReport(_Row):
    """What ``reconcile gpus -o json`` prints. ``unknown``: hosts whose cards could not be observed."""

    gpus: list[GpuRow]
    unknown: list[UnknownRow]


Printed = (
    PlanReport
    | EventsReport
    | HistoryReport
    | ApproveReport
    | SuspensionsReport
    | WaitReport
    | GpusReport
    | DrainReport
    | NextBootReport
    | ControllerReport
    | OnceReport
    | StatusReport
    | WhyReport
    | FitReport
    | ValidateReport
    | ErrorsReport
    | TrustReport
    | VersionReport
)
PRINTED: Mapping[str, type[Printed]] = {
    "plan": PlanReport,
    "next-boot": NextBootReport,
    "controller": ControllerReport,
    "once": OnceReport,
    "status": StatusReport,
    "gpus": GpusReport,
    "events": EventsReport,
    "history": HistoryReport,
    "approve": ApproveReport,
    "suspend": SuspensionsReport,
    "wait": WaitReport,
    "drain": DrainReport,
    "why": WhyReport,
    "fit": FitReport,
    "validate": ValidateReport,
    "errors": ErrorsReport,
    "trust": TrustReport,
    "version": VersionReport,
}


@dataclass(frozen=True)
class Remembered:
    """What of the controller's memory is shown beside what is seen now, ``at`` a time in UNIX seconds."""

    at: float
    conditions: Mapping[Ref, Sequence[Kept]]
    drifts: Mapping[tuple[Ref, str], Drifting]
    suspensions: Mapping[Ref, Suspension]
    backoffs: Mapping[Key, Backoff]

    def since(self, ref: Ref, condition: Condition) -> float | None:
        """Since when a condition has the status that it has, None when that was not seen to begin."""
        kept = next((kept for kept in self.conditions.get(ref, ()) if kept.type == condition.type), None)
        return kept.since if kept is not None and kept.status == condition.status else None

    def since_drift(self, judged: Judged) -> float | None:
        """Since when a layer is not right, None when that was not seen to begin."""
        drifting = self.drifts.get((judged.object, judged.layer))
        return drifting.since if drifting is not None else None

    def tried(self, drift: Drift) -> str:
        """How often a running controller has tried to put a drift right in vain, and how that ended; "" if never."""
        step = drift.remedy
        backoff = self.backoffs.get((step.object, step.layer, step.action)) if isinstance(step, Step) else None
        if backoff is None or not backoff.message:
            return ""
        times = "once" if backoff.tries == 1 else f"{backoff.tries} times"
        return f"failed {times}, is tried again in {max(0.0, backoff.until - self.at):.0f} s: {backoff.message}"


def plan_report(
    plan: Plan,
    specs: Specs,
    facts: FleetFacts,
    grants: Grants,
    wanted: Callable[[Ref, str], bool],
    scripts: bool,
    suspensions: Mapping[Ref, Suspension] = MappingProxyType({}),
) -> PlanReport:
    """The plan as rows; ``wanted`` narrows it to some layers of some objects."""
    drift = [
        drift_row(j, j.verdict) for j in plan.now.judged if isinstance(j.verdict, Drift) and wanted(j.object, j.layer)
    ]
    held = stopped((p.step for p in plan.steps), suspensions, specs)
    steps = [step_row(p, grants, scripts, held) for p in plan.steps if wanted(p.step.object, p.step.layer)]
    blocked = blocked_rows(plan.then, wanted)
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
        stops=_stops(chosen, _stand_still(specs, facts), specs),
        reboots=_of_class(chosen, frozenset({Permission.REBOOT_HOST})),
        leaves_alone=leaves_alone(specs, facts, refs),
    )
    waiting = wait_rows(plan.now, wanted)
    return PlanReport(drift=drift, steps=steps, blocked=blocked, waiting=waiting, unknown=unknown, summary=summary)


def once_report(
    done: Report, grants: Grants, wanted: Callable[[Ref, str], bool], excused: Callable[[Ref], bool]
) -> OnceReport:
    """What a pass did and left. Nothing unknown is a fault of an object that is ``excused``."""

    def asked(ref: Ref, layer: str) -> bool:
        return wanted(ref, layer) and not excused(ref)

    lacking = [s for s in done.upcoming.ready if not grants.may(s) and wanted(s.object, s.layer)]
    return OnceReport(
        performed=[_performed_row(ended) for ended in done.ended],
        in_wanted_state=all_right(done.upcoming, asked),
        failed=done.failed,
        blocked=blocked_rows(done.upcoming, wanted),
        waiting_for_permission=list(dict.fromkeys(str(d) for s in lacking for d in grants.missing(s))),
        waiting_for_window=done.closed,
        suspended=done.suspended,
        reported_only=list(dict.fromkeys(str(s.object) for s in lacking if not grants.missing(s))),
        waiting=wait_rows(done.upcoming, wanted),
        unknown=unknown_rows(done.upcoming, asked),
        timed_out=done.timed_out,
    )


def why_report(
    ref: Ref,
    parts: Sequence[Ref],
    upcoming: Next,
    grants: Grants,
    remembered: Remembered,
) -> WhyReport:
    """The layers of an object; ``parts`` are it and what it stands on, the lowest first."""
    held = stopped(upcoming.ready, remembered.suspensions, grants.specs)
    layers = [_layer_row(j, grants, held, remembered) for part in parts for j in upcoming.judged if j.object == part]
    first = next((row for row in layers if row.verdict in ("unknown", "drift")), None)
    suspended = [str(remembered.suspensions[part]) for part in parts if part in remembered.suspensions]
    return WhyReport(at=remembered.at, object=str(ref), first=first, layers=layers, suspended=suspended)


def _layer_row(judged: Judged, grants: Grants, held: Mapping[str, tuple[str, str]], remembered: Remembered) -> LayerRow:
    verdict, reason, message, evidence, waits_for = "ok", "", "", {}, ""
    match judged.verdict:
        case InSync(note):
            message = note
        case Skipped(because):
            verdict, message = "skipped", because
        case Unseen(why, what):
            verdict, reason, message = "unknown", why, what
        case Drift() as drift:
            verdict, reason, message, evidence = "drift", drift.reason, drift.message, dict(drift.evidence)
            waits_for = remedy(drift, judged.held, grants, held, remembered.tried(drift))
    return LayerRow(
        object=str(judged.object),
        layer=judged.layer,
        verdict=verdict,
        reason=reason,
        message=message,
        evidence=evidence,
        waits_for=waits_for,
        since=remembered.since_drift(judged) if verdict == "drift" else None,
    )


def remedy(
    drift: Drift,
    held: str,
    grants: Grants,
    suspended: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    tried: str = "",
) -> str:
    """What will be done about a drift, or has to be, in words.

    ``suspended`` says what suspension holds a step, ``tried`` how often it was tried in vain.
    """
    match drift.remedy:
        case Block(_, message, needs):
            return f"blocked: {message}. To do: {needs}"
        case Wait(what, message, _):
            return f"waits for a {what}: {message}"
        case Step() as step if held:
            return f"waits for {held}; then: {step.summary}"
        case Step() as step if step.id in suspended:
            return f"waits, as {suspended[step.id][1]}; then: {step.summary}"
        case Step() as step if missing := grants.missing(step):
            return f"waits for a permission: {', '.join(map(str, missing))}; then: {step.summary}"
        case Step() as step if not grants.may(step):
            return f"waits for policy: {{mode: enforce}} in {step.object}; then: {step.summary}"
        case step if tried:
            return f"{tried}; then: {step.summary}"
        case step:
            return f"next: {step.summary}"


def running_rows(facts: FleetFacts) -> list[RunningRow]:
    """What is at work on each host that was observed."""
    rows = []
    for name, host in facts.items():
        units = observe.units(host)
        if units is None:
            continue
        at_work = [unit for unit in (units.running, *units.jobs) if unit is not None and unit.running]
        for unit in at_work:
            progress = unit.progress if isinstance(unit, Job) else None
            rows.append(
                RunningRow(
                    host=name,
                    id=unit.id,
                    object=unit.object,
                    state=unit.how.value,
                    done=progress.done if progress is not None else None,
                    total=progress.total if progress is not None else None,
                )
            )
    return rows


def next_boot_report(specs: Specs, facts: FleetFacts, hosts: Sequence[str]) -> NextBootReport:
    """What would be wrong with hosts after a reboot now."""
    kernels: dict[str, str] = {}
    wrong: list[BlockedRow] = []
    unknown: list[UnknownRow] = []
    view = View(specs, facts)
    for name in hosts:
        host = str(Ref("Host", name))
        try:
            found = next_boot(view, specs.hosts[name])
            kernels[name] = view.fact(name, "host.kernel", KernelFacts).next
        except NotKnown as what:
            unknown.append(UnknownRow(object=host, layer="host.boot", reason=what.reason, message=what.message))
            continue
        wrong += (
            BlockedRow(object=host, layer=w.layer, reason=w.reason, message=w.message, needs=w.needs) for w in found
        )
    return NextBootReport(kernels=kernels, wrong=wrong, unknown=unknown)


def drain_report(found: Drain, specs: Specs) -> DrainReport:
    """What lies on a host that is to be empty."""
    return DrainReport(
        host=found.host,
        containers=[
            LeavingRow(
                object=str(leaving.container.ref),
                id=leaving.container.id,
                runs=leaving.runs,
                servers=[f"ModelServer/{name}" for name in leaving.servers],
                wanted_on=leaving.container.host,
                spec=str(specs.places.get(leaving.container.ref, "its spec")),
                candidates=[
                    CandidateRow(host=c.host, can=c.can, reason=c.reason, message=c.message, needs=c.needs)
                    for c in leaving.candidates
                ],
            )
            for leaving in found.containers
        ],
        servers=[f"ModelServer/{name}" for name in found.servers],
        guests_in_no_spec=[f"{'CT' if kind == 'lxc' else 'VM'} {vmid}" for kind, vmid in found.foreign],
    )


def status_report(
    specs: Specs,
    upcoming: Next,
    conditions: Mapping[Ref, Sequence[Condition]],
    running: Sequence[RunningRow],
    remembered: Remembered,
) -> StatusReport:
    """The conditions of every object that ``conditions`` names, and what is at work on their hosts."""
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
                    ConditionRow(
                        type=c.type,
                        status=c.status,
                        reason=c.reason,
                        message=c.message,
                        since=remembered.since(ref, c),
                    )
                    for c in of_it
                ],
                drift=[
                    drift_row(j, j.verdict, remembered.since_drift(j))
                    for j in upcoming.judged
                    if j.object == ref and isinstance(j.verdict, Drift)
                ],
            )
        )
    hosts = {row.host for row in rows}
    return StatusReport(at=remembered.at, objects=rows, running=[row for row in running if row.host in hosts])


def unknown_rows(upcoming: Next, wanted: Callable[[Ref, str], bool]) -> list[UnknownRow]:
    """Every layer that could not be judged."""
    return [
        UnknownRow(object=str(j.object), layer=j.layer, reason=j.verdict.reason, message=j.verdict.message)
        for j in upcoming.judged
        if isinstance(j.verdict, Unseen) and wanted(j.object, j.layer)
    ]


def blocked_rows(upcoming: Next, wanted: Callable[[Ref, str], bool]) -> list[BlockedRow]:
    """Every drift that cannot be put right."""
    return [
        BlockedRow(object=str(j.object), layer=j.layer, reason=b.reason, message=b.message, needs=b.needs)
        for j, b in upcoming.blocked
        if wanted(j.object, j.layer)
    ]


def wait_rows(upcoming: Next, wanted: Callable[[Ref, str], bool]) -> list[WaitRow]:
    """Every drift that is being put right already."""
    return [
        WaitRow(object=str(j.object), layer=j.layer, what=w.what, message=w.message, hosts=list(w.hosts))
        for j, w in upcoming.waiting
        if wanted(j.object, j.layer)
    ]


def _performed_row(ended: Ended) -> PerformedRow:
    step = ended.step
    return PerformedRow(
        id=step.id,
        object=str(step.object),
        layer=step.layer,
        action=step.action,
        hosts=list(step.hosts),
        result=ended.result.value,
        message=ended.message,
    )


def drift_row(judged: Judged, drift: Drift, since: float | None = None) -> DriftRow:
    """One drift."""
    return DriftRow(
        object=str(judged.object),
        layer=judged.layer,
        reason=drift.reason,
        message=drift.message,
        evidence=dict(drift.evidence),
        since=since,
    )


def all_right(upcoming: Next, wanted: Callable[[Ref, str], bool]) -> bool:
    """Whether everything that is wanted is known and as the specs say."""
    return all(isinstance(j.verdict, InSync | Skipped) for j in upcoming.judged if wanted(j.object, j.layer))


def step_row(
    planned: Planned, grants: Grants, scripts: bool, held: Mapping[str, tuple[str, str]] = MappingProxyType({})
) -> StepRow:
    """A step of a plan; ``held`` says of steps which suspension holds them."""
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
        suspended=held[step.id][1] if step.id in held else None,
    )


def _of_class(steps: Iterable[Step], classes: frozenset[Permission]) -> list[str]:
    return list(dict.fromkeys(str(d.object) for step in steps for d in step.disrupts if d.permission in classes))


def _stops(steps: Iterable[Step], standing: frozenset[str], specs: Specs) -> list[StopRow]:
    longest: dict[str, float] = {}
    why: dict[str, list[str]] = {}
    for step in steps:
        for disruption in step.disrupts:
            name = str(disruption.object)
            if disruption.permission in STOPPING and name not in standing:
                longest[name] = longest.get(name, 0.0) + step.timeout
                why.setdefault(name, []).append(step.summary)
    for server in specs.servers.values():
        if str(server.ref) in longest:
            longest[str(server.ref)] += server.checks.startup_budget.total_seconds()
    return [StopRow(object=name, at_most_seconds=seconds, why=why[name]) for name, seconds in longest.items()]


def _stand_still(specs: Specs, facts: FleetFacts) -> frozenset[str]:
    """The containers, and the servers in them, that none of the hosts that tell runs: a step takes nothing from them.

    Of one that a silent host may run no step is planned but to take it over, which rests on that host being dead.
    """
    seen = [host.section("container.power") for host in facts.values()]
    told = [section.value for section in seen if isinstance(section, Known) and isinstance(section.value, PowerFacts)]
    standing = {
        str(container.ref)
        for container in specs.containers.values()
        if told and not any(power.of(container.id) or container.id in power.between for power in told)
    }
    servers = {
        str(server.ref)
        for server in specs.servers.values()
        if (server.container and f"Container/{server.container}" in standing) or _is_down(specs, facts, server)
    }
    return frozenset(standing | servers)


def _is_down(specs: Specs, facts: FleetFacts, server: ModelServer) -> bool:
    """Whether nothing of a server runs anywhere, as far as its own host and all others tell."""
    told = {name: host.section("server.process") for name, host in facts.items()}
    here = told.get(specs.host_of(server) or "")
    return isinstance(here, Known) and not any(
        (found := place.of(server.name)) is not None and found.main is not None
        for section in told.values()
        if isinstance(section, Known) and isinstance(section.value, ProcessFacts)
        for _, place in section.value.places
    )


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
