"""What the controller knows, for Prometheus: each scrape reads the picture that hangs on the board.

Nothing is kept between scrapes, so that a series goes when its object goes. Labels hold names and closed lists, never
a message. What is not known has no series: a graph ends there and does not fall to zero.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import controller
from controller.core.conditions import Status
from controller.core.view import View
from controller.core.words import Drift, InSync, NotKnown, Step, Wait
from controller.layers.devices.facts import GuestFacts
from controller.layers.driver.facts import DriverFacts
from controller.layers.gpu_health import problem_of
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.shared.assignment import Assigned, assign, model_of
from controller.layers.shared.reboot import NoReboot
from controller.layers.userland.facts import UserlandFacts
from controller.report import server_metrics
from controller.run.picture import BUCKETS, Board, Picture
from controller.spec.model import GpuOwner, Host, Lifecycle, ModelServer, Specs
from controller.spec.ref import Ref

_log = logging.getLogger(__name__)

OBJECT = ("kind", "name")
GPU = ("host", "pci", "uuid", "model")
Row = tuple[tuple[str, ...], float]
T = TypeVar("T")


class FleetCollector(Collector):
    """The metrics of the picture on a board."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        """All of it as it is now."""
        picture = self._board.picture
        yield _gauge("build_info", "The running release.", ("version",), [((controller.__version__,), 1)])
        yield from _of_loop(self._board)
        for family in FAMILIES:
            yield from family(picture)


def registry(board: Board) -> CollectorRegistry:
    """A registry with the metrics of a board in it, and no others."""
    found = CollectorRegistry()
    found.register(FleetCollector(board))
    return found


def _gauge(name: str, about: str, labels: tuple[str, ...], rows: Iterable[Row]) -> Metric:
    """A family of gauges. Its series are those of ``rows``: none, when nothing is known.

    Prometheus refuses a whole page for one series that is there twice, or for one byte that is no text; some labels
    are what a host has said, so neither leaves this function.
    """
    family = GaugeMetricFamily(f"reconcile_{name}", about, labels=labels)
    for values, value in {tuple(_text(value) for value in values): value for values, value in rows}.items():
        family.add_metric(values, value)
    return family


def _text(label: str) -> str:
    return label.encode("utf-8", "replace").decode()


# The controller itself


def _of_loop(board: Board) -> Iterator[Metric]:
    last = board.last_pass
    yield _gauge(
        "loop_last_pass_timestamp_seconds",
        "When the loop last came round.",
        (),
        [] if last is None else [((), last)],
    )
    steps = CounterMetricFamily(
        "reconcile_steps",
        "Steps that have ended, by how; intentional ones follow a changed spec, corrective ones a changed world.",
        labels=("layer", "action", "cause", "result"),
    )
    for kind, count in board.steps().items():
        steps.add_metric(kind, count)
    yield steps
    durations = HistogramMetricFamily(
        "reconcile_step_duration_seconds", "How long steps took.", labels=("layer", "action")
    )
    for key, taken in board.durations().items():
        reached = [sum(taken.counts[: place + 1]) for place in range(len(taken.counts))]
        bounds = [*(str(bound) for bound in BUCKETS), "+Inf"]
        durations.add_metric(key, list(zip(bounds, reached, strict=True)), taken.sum)
    yield durations


def _of_specs(picture: Picture) -> Iterator[Metric]:
    yield _gauge("spec_errors", "Errors in the spec files that are on disk now.", (), [((), len(picture.spec_errors))])
    yield _gauge(
        "spec_last_load_timestamp_seconds",
        "When the spec files were last read without an error.",
        (),
        [] if picture.loaded is None else [((), picture.loaded)],
    )
    commit = f"{picture.commit}-dirty" if picture.dirty else picture.commit
    yield _gauge(
        "spec_info",
        "The git commit of the specs; -dirty when the work tree differs from it.",
        ("commit",),
        [((commit,), 1)] if picture.commit else [],
    )


# Objects


def _of_objects(picture: Picture) -> Iterator[Metric]:
    refs = [obj.ref for obj in picture.specs]
    yield _gauge(
        "object_info",
        "What a spec says of an object.",
        (*OBJECT, "host", "container", "engine", "engine_version", "model", "revision", "mode"),
        [_info(picture.specs, ref) for ref in refs],
    )
    yield _gauge(
        "object_condition",
        "Conditions of an object: one of the three statuses is 1.",
        (*OBJECT, "type", "status", "reason"),
        [
            ((*ref, kept.type, status, kept.reason), kept.status == status)
            for ref in refs
            for kept in picture.conditions.get(ref, ())
            for status in Status
        ],
    )
    suspended = dict.fromkeys([*refs, *picture.suspensions])  # what is in no spec can be suspended as well
    yield _gauge(
        "object_suspended",
        "Whether somebody has told the controller to leave an object alone.",
        OBJECT,
        [(ref, ref in picture.suspensions) for ref in suspended],
    )
    yield _gauge(
        "last_success_timestamp_seconds",
        "When an object was last seen to be as its spec says.",
        OBJECT,
        [(ref, picture.last_success[ref]) for ref in refs if ref in picture.last_success],
    )
    yield _gauge(
        "backoff_seconds",
        "For how long the last failed step of an object is left alone; 0 when none is.",
        OBJECT,
        [(ref, picture.backoff.get(ref, 0)) for ref in refs],
    )


def _info(specs: Specs, ref: Ref) -> Row:
    obj = specs.get(ref)
    assert obj is not None  # noqa: S101 - the refs are those of the specs
    host, container, engine = "", "", ("", "", "", "")
    match obj:
        case Host():
            host = obj.name
        case ModelServer():
            host, container = specs.host_of(obj) or "", obj.container or ""
            engine = (obj.engine.name, obj.engine.version, obj.model.repo, obj.model.revision)
        case _:
            host, container = obj.host, obj.name
    return (*ref, host, container, *engine, obj.policy.mode.value), 1


def _of_drift(picture: Picture) -> Iterator[Metric]:
    judged = [j for j in picture.upcoming.judged if isinstance(j.verdict, Drift | InSync)]
    yield _gauge(
        "drift",
        "Whether a layer differs from the spec; no series where it was not observed, or does not concern the object.",
        (*OBJECT, "layer"),
        [((*j.object, j.layer), isinstance(j.verdict, Drift)) for j in judged],
    )
    yield _gauge(
        "drift_since_timestamp_seconds",
        "Since when a layer has differed from the spec.",
        (*OBJECT, "layer"),
        [
            ((*j.object, j.layer), picture.drifts[j.object, j.layer].since)
            for j in judged
            if isinstance(j.verdict, Drift) and (j.object, j.layer) in picture.drifts
        ],
    )
    waiting = Counter((*p.object, p.layer, p.waiting_for.value) for p in picture.pending)
    yield _gauge(
        "steps_pending",
        "What has to be put right and waits, and for what.",
        (*OBJECT, "layer", "waiting_for"),
        waiting.items(),
    )


# Hosts


def _of_hosts(picture: Picture) -> Iterator[Metric]:
    hosts = {name: looked for name, looked in picture.hosts.items() if name in picture.specs.hosts}
    away = {host.name for host in picture.specs.hosts.values() if host.lifecycle is not Lifecycle.ACTIVE}
    yield _gauge(
        "host_up",
        "Whether a host answered the last look; no series while one in maintenance, or decommissioned, does not.",
        ("host",),
        [((name,), h.up) for name, h in hosts.items() if h.up or name not in away],
    )
    yield _gauge(
        "host_last_seen_timestamp_seconds",
        "When a host last answered.",
        ("host",),
        [((name,), h.last_seen) for name, h in hosts.items() if h.last_seen is not None],
    )
    yield _gauge(
        "observe_duration_seconds",
        "How long the last look at a host took.",
        ("host",),
        [((name,), h.seconds) for name, h in hosts.items() if h.seconds is not None],
    )
    needed = {
        j.object.name for j in picture.upcoming.judged if isinstance(j.verdict, Drift) and _asks_for_reboot(j.verdict)
    }
    yield _gauge(
        "host_reboot_required",
        "Whether a host has to be rebooted to be as its spec says.",
        ("host",),
        [((name,), name in needed) for name, h in hosts.items() if h.up],
    )


def _asks_for_reboot(drift: Drift) -> bool:
    match drift.remedy:
        case Step(action=action):
            return action == "reboot-host"
        case Wait(what=what):
            return what == "reboot"
        case block:
            return block.reason in frozenset(NoReboot)


def _of_drivers(picture: Picture) -> Iterator[Metric]:
    yield _gauge(
        "driver_version_info",
        "Versions of the NVIDIA driver: the loaded module, and the libraries of the host and of its containers.",
        ("host", "scope", "version"),
        [row for of_scope in (_module, _libraries, _libraries_of_containers) for row in _each_host(picture, of_scope)],
    )


def _module(view: View, host: Host) -> Iterator[Row]:
    if (module := view.fact(host.name, "host.gpu-health", GpuFacts).module) is not None:
        yield (host.name, "module", module.version), 1


def _libraries(view: View, host: Host) -> Iterator[Row]:
    for version in view.fact(host.name, "host.driver", DriverFacts).libraries:
        yield (host.name, "host", version), 1


def _libraries_of_containers(view: View, host: Host) -> Iterator[Row]:
    names = {container.id: container.name for container in view.containers_on(host.name)}
    for userland in view.fact(host.name, "container.userland", UserlandFacts).containers:
        for version in userland.libraries:
            yield (host.name, names.get(userland.id, f"CT {userland.id}"), version), 1


def _of_gpus(picture: Picture) -> Iterator[Metric]:
    yield _gauge(
        "gpu_info",
        "A GPU that is in a host: whose it is by the spec (none, when it is not listed), and the driver that has it.",
        (*GPU, "owner", "driver"),
        _each_host(picture, _infos),
    )
    yield _gauge(
        "gpu_healthy",
        "Whether a GPU of the spec is there, is the card that the spec says, and has no errors.",
        GPU,
        _each_host(picture, _health),
    )
    rows = list(_each_host(picture, _memory))
    yield _gauge(
        "gpu_memory_used_bytes", "Memory of a GPU that is in use.", GPU, [(gpu, used) for gpu, used, _ in rows]
    )
    yield _gauge("gpu_memory_total_bytes", "Memory of a GPU.", GPU, [(gpu, total) for gpu, _, total in rows])
    yield _gauge(
        "gpu_assignment_info",
        "Which container a GPU is assigned to, and which servers in it use it.",
        ("host", "pci", "container", "server"),
        _each_host(picture, _assignments),
    )


def _gpu(view: View, host: Host, pci: str) -> tuple[str, str, str, str]:
    """The labels of a card. One that is gone is named as the spec does."""
    facts = view.fact(host.name, "host.gpu-health", GpuFacts)
    row, card = facts.row(pci), facts.gpu(pci)
    listed = next((gpu.model for gpu in host.gpus if gpu.pci == pci), "")
    uuid = (row.uuid if row else "") or (card.uuid if card else "")
    return host.name, pci, uuid, model_of(facts, pci) or listed


def _infos(view: View, host: Host) -> Iterator[Row]:
    owners = {gpu.pci: gpu.owner.value for gpu in host.gpus}
    for function in view.fact(host.name, "host.gpu-health", GpuFacts).functions:
        if function.is_gpu:
            pci = function.pci
            yield (*_gpu(view, host, pci), owners.get(pci, "none"), function.driver or "none"), 1


def _health(view: View, host: Host) -> Iterator[Row]:
    for gpu in host.gpus:
        yield _gpu(view, host, gpu.pci), problem_of(view, host, gpu) is None


def _memory(view: View, host: Host) -> Iterator[tuple[tuple[str, ...], float, float]]:
    """Of each card: used, and in all. One that shares the machine's memory does not tell (0 in all)."""
    for row in view.fact(host.name, "host.gpu-health", GpuFacts).smi:
        if row.memory_total:
            yield _gpu(view, host, row.pci), row.memory_used, row.memory_total


def _assignments(view: View, host: Host) -> Iterator[Row]:
    gpus = view.fact(host.name, "host.gpu-health", GpuFacts)
    own = tuple(gpu.pci for gpu in host.gpus if gpu.owner is GpuOwner.HOST)
    places: dict[str, tuple[str, ...]] = {"": own}
    if host.platform == "proxmox":
        guests = view.fact(host.name, "container.devices", GuestFacts)
        found = assign(view.specs, host, gpus, guests)
        places |= {name: a.pcis for name, a in found.items() if isinstance(a, Assigned)}
    for container, pcis in places.items():
        servers = [
            s for s in view.specs.servers.values() if (s.container == container if container else s.host == host.name)
        ]
        for place, pci in enumerate(pcis):
            uuid = _gpu(view, host, pci)[2]
            users = [s.name for s in servers if s.gpus == "all" or {place, pci, uuid} & set(s.gpus)]
            for user in users or ([""] if container else []):
                yield (host.name, pci, container, user), 1


def _each_host(picture: Picture, rows: Callable[[View, Host], Iterable[T]]) -> Iterator[T]:
    """The rows of every host of which enough is known; what stumbles over one host keeps those of the others."""
    view = View(picture.specs, picture.facts)
    for host in picture.specs.hosts.values():
        try:
            yield from list(rows(view, host))
        except NotKnown:
            continue
        except Exception:
            _log.exception("cannot tell the metrics of %s", host.name)


# Servers


def _of_downloads(picture: Picture) -> Iterator[Metric]:
    there, sizes, stalled = server_metrics.downloads(picture)
    labels = ("host", "model")
    yield _gauge("download_bytes", "Bytes of a model's files that are on a host.", labels, there)
    yield _gauge("download_size_bytes", "Bytes that a model's files have.", labels, sizes)
    yield _gauge("download_stalled", "Whether the download of a model stands still.", labels, stalled)


def _of_servers(picture: Picture) -> Iterator[Metric]:
    passed, at, seconds, failures = server_metrics.checks(picture)
    labels = ("name", "check")
    yield _gauge(
        "check_success",
        "Whether what a server answered was right, the last time that it could be told.",
        labels,
        passed,
    )
    yield _gauge("check_last_run_timestamp_seconds", "When a server was asked last.", labels, at)
    yield _gauge("check_duration_seconds", "How long the asking took.", labels, seconds)
    failed = CounterMetricFamily(
        "reconcile_check_failures", "How often a server's answers were wrong, and how.", labels=(*labels, "reason")
    )
    for values, count in failures:
        failed.add_metric(tuple(_text(value) for value in values), count)
    yield failed
    fast, accepted = server_metrics.speeds(picture)
    yield _gauge("server_tokens_per_second", "How fast a server was when it was measured last.", ("name",), fast)
    yield _gauge(
        "server_draft_acceptance_ratio",
        "The share of drafts that a server accepted when it was measured.",
        ("name",),
        accepted,
    )


FAMILIES: tuple[Callable[[Picture], Iterator[Metric]], ...] = (
    _of_specs,
    _of_objects,
    _of_drift,
    _of_hosts,
    _of_drivers,
    _of_gpus,
    _of_downloads,
    _of_servers,
)
"""Everything that is told of the fleet."""
