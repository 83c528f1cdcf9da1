"""container.placement: the config lies on the wanted node and nowhere else, and no other host runs the container.

From a node that answers the container is moved (``pct migrate``); from one that is gone, and that its spec says is
decommissioned, it is taken over: its config is renamed to the target, as Proxmox's documentation has it
(pmxcfs.adoc, "Recovering/Moving Guests from Failed Nodes"). It is left stopped: what it needs at its new place is put
right by the layers after this one before ``container.power`` starts it. Everything that could keep it from running
there is looked at before anything is stopped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from controller.core.package import text
from controller.core.view import View
from controller.core.words import Block, Disruption, Drift, Effect, InSync, Layer, NotKnown, Skipped, Step, Verdict
from controller.facts.words import FleetFacts, HostFacts, Known, Unknown
from controller.layers.access.facts import AccessFacts, Cluster
from controller.layers.devices.facts import Guest, GuestFacts
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.mounts import is_dropped, missing_at, missing_block
from controller.layers.placement.facts import PlacementFacts, parse
from controller.layers.placement.reasons import Reason
from controller.layers.power.facts import PowerFacts
from controller.layers.shared import fitting, guest_script, preparing
from controller.layers.shared.assignment import Unassigned, assign, is_known_later
from controller.layers.shared.pve_conf import PctConf
from controller.layers.shared.pve_conf import parse as parse_conf
from controller.layers.shared.volumes import Volume, binds, volumes
from controller.spec.model import Container, Host, Lifecycle
from controller.spec.policy import Permission
from controller.spec.ref import Ref

NAME = "container.placement"
_RBD = text("controller.layers.shared", "rbd.sh")
MOVE = guest_script("controller.layers.placement", "move.sh")
TAKE_OVER = guest_script("controller.layers.placement", "take-over.sh")
MOVE_TIMEOUT = 600.0  # seconds: a minute to shut down, a forced stop, unmapping its disks, and ssh to the target
_BACKUPS = ("backup", "snapshot", "snapshot-delete", "rollback")  # of the locks that pve-container has


def check(view: View, container: Container) -> Verdict:
    """Whether the container's config lies where its spec wants it, and what can be done if not."""
    host = view.host(container.host)
    if host.lifecycle is not Lifecycle.ACTIVE:
        return Skipped(f"{host.name}: {host.lifecycle}")
    cluster = _cluster(view, host.name)
    node = cluster.node_of(container.id)
    if not cluster.quorate:
        if node == host.name:
            raise NotKnown(
                Reason.NO_QUORUM,
                f"{host.name} is in no quorate part of its cluster, and what it says of it may be long past",
            )
        return _blocked(_no_quorum(host.name))
    if node is None:
        return _blocked(_nowhere(view, container, cluster))
    if (container.id, node, "lxc") not in cluster.guests:
        return _blocked(
            Block(
                Reason.ID_TAKEN,
                f"{container.id} is a virtual machine on {node}",
                f"correct `id` in the spec of {container.name}",
            )
        )
    if node != host.name:
        return _elsewhere(view, container, cluster, node)
    runs_on = _runs_elsewhere(view, container, cluster)
    if runs_on:
        return _blocked(
            Block(
                Reason.RUNS_ELSEWHERE,
                f"the config of CT {container.id} lies on {host.name}, and {runs_on} still runs it",
                f"stop it there (`lxc-stop -n {container.id}`; pct does not know it there any more), before its disk "
                "is written from two places",
            )
        )
    return InSync()


def _cluster(view: View, host: str) -> Cluster:
    """The cluster as the machine at the host's address sees it, if that is the node of this name."""
    cluster = view.fact(host, "host.access", AccessFacts).cluster
    if cluster is None:
        raise NotKnown("not-proxmox", f"{host} has no /etc/pve")
    if cluster.node != host:
        raise NotKnown("other-host", f"the machine at {view.host(host).address} is the node {cluster.node}, not {host}")
    return cluster


def _one_cluster(one: Cluster, other: Cluster) -> bool:
    return bool(one.name) and one.name == other.name and one.member(other.node) is not None


def _others(view: View, host: str) -> Iterator[tuple[str, HostFacts, Cluster]]:
    """Every other Proxmox host that was seen."""
    for name, facts in view.facts.items():
        access = facts.section("host.access")
        if (
            name != host
            and isinstance(access, Known)
            and isinstance(access.value, AccessFacts)
            and access.value.cluster
        ):
            yield name, facts, access.value.cluster


def _nowhere(view: View, container: Container, cluster: Cluster) -> Block:
    """No guest of that id is in the cluster; perhaps one is in another."""
    for name, _, other in _others(view, container.host):
        node = other.node_of(container.id)
        if node is not None and (container.id, node, "lxc") in other.guests and not _one_cluster(cluster, other):
            return Block(
                Reason.OTHER_CLUSTER,
                f"CT {container.id} is in the cluster of {name}, which {container.host} is no member of",
                "it is not moved between clusters: back it up there (vzdump) and restore it here (pct restore)",
            )
    return Block(
        Reason.NO_CONTAINER,
        f"no container {container.id} is in the cluster of {container.host}",
        "create or restore it, or correct `id` or `host` in its spec",
    )


def _runs_elsewhere(view: View, container: Container, cluster: Cluster) -> str:
    """Another host of the cluster that was seen to run the container."""
    for name, facts, other in _others(view, container.host):
        power = facts.section("container.power")
        if not _one_cluster(cluster, other) or not isinstance(power, Known) or not isinstance(power.value, PowerFacts):
            continue
        if power.value.of(container.id) is not None or container.id in power.value.between:
            return name
    return ""


def _elsewhere(view: View, container: Container, cluster: Cluster, node: str) -> Drift:
    source = view.specs.hosts.get(node)
    if source is None:
        return _blocked(
            Block(
                Reason.SOURCE_NOT_IN_SPECS,
                f"{_lies(container, node)}, and no spec says anything of {node}",
                f"write a Host of the name {node}, with `lifecycle: decommissioned` if it is gone for good",
            )
        )
    if source.lifecycle is Lifecycle.MAINTENANCE:
        return _blocked(
            Block(
                Reason.SOURCE_IN_MAINTENANCE,
                f"{_lies(container, node)}, which is in maintenance: nothing on it is touched",
                f"write `lifecycle: active`, or `decommissioned`, for {node} until it has been moved",
            )
        )
    failure = view.facts[node].failure if node in view.facts else None
    if failure is None:
        return _move(view, container, cluster, source)
    if source.lifecycle is not Lifecycle.DECOMMISSIONED:
        raise NotKnown(
            Reason.SOURCE_UNREACHABLE,
            f"{_lies(container, node)}, which cannot be looked at ({failure.message}); it is moved when it answers "
            "again, and taken over only when its spec says `lifecycle: decommissioned`",
        )
    if failure.reason != "unreachable":
        raise NotKnown(
            Reason.SOURCE_UNREACHABLE,
            f"{_lies(container, node)}, which is decommissioned; something answers at its address: {failure.message}",
        )
    return _take_over(view, container, cluster, source)


def _lies(container: Container, node: str) -> str:
    return f"the config of CT {container.id} lies on {node}, its spec says {container.host}"


# A move from a node that answers


def _move(view: View, container: Container, cluster: Cluster, source: Host) -> Drift:
    here = _cluster(view, source.name)
    guest = view.fact(source.name, "container.devices", GuestFacts).container(container.id)
    if guest is None:
        raise NotKnown("not-seen", f"{source.name} did not show the config of CT {container.id}, it may be on its way")
    power = view.fact(source.name, "container.power", PowerFacts)
    if container.id in power.between:
        raise NotKnown("in-between", f"CT {container.id} is just being started or stopped")
    running = power.of(container.id)
    conf = parse_conf(guest.text)
    problems = [
        *([] if here.quorate else [_no_quorum(source.name)]),
        *_container_problems(container, conf, cluster),
        *_target_offline(here, container.host),
        *_disk_problems(view, container, conf),
        *_local_binds(conf),
        *_target_problems(view, container),
    ]
    if problems:
        return _blocked(*problems, about=_lies(container, source.name))
    since = "0" if running is None else str(running.started)
    does = "move" if running is None else "stop and move"
    step = Step(
        action="move-container",
        object=Ref("Container", container.name),
        layer=NAME,
        reason=Reason.NOT_ON_HOST,
        summary=f"{does} CT {container.id} from {source.name} to {container.host}",
        hosts=(source.name, container.host),
        script=MOVE,
        args=(str(container.id), container.host, guest.sha256, since),
        disrupts=_disrupts(view, container, Permission.MOVE_CONTAINER),
        timeout=MOVE_TIMEOUT,
        provisional=_cards_known_later(view, container),
        effect=_effect(container, guest, source.name),
    )
    return Drift(Reason.NOT_ON_HOST, _lies(container, source.name), step)


def _target_offline(here: Cluster, target: str) -> Iterator[Block]:
    member = here.member(target)
    if member is None or not member.online:
        yield Block(
            Reason.TARGET_OFFLINE,
            f"{here.node} does not see {target} in its cluster",
            "bring the network between them back; look at `pvecm status` on both",
        )


def _local_binds(conf: PctConf) -> Iterator[Block]:
    """The mount points that ``pct migrate`` refuses (PVE/LXC/Migrate.pm); raw mounts it does not look at."""
    for bind in binds(conf.main):
        if bind.key.startswith("mp") and not bind.shared:
            yield Block(
                Reason.LOCAL_BIND_MOUNT,
                f"{bind.key} mounts {bind.source} of its host, and Proxmox does not move that",
                f"if {bind.source} is the same on both hosts, add `shared=1` to {bind.key}; else take {bind.key} out",
            )


# Taking over from a node that is gone


def _take_over(view: View, container: Container, cluster: Cluster, source: Host) -> Drift:
    member = cluster.member(source.name)
    guests = view.fact(container.host, "container.devices", GuestFacts)
    if member is not None and member.online:
        return _blocked(
            Block(
                Reason.SOURCE_ONLINE,
                f"{source.name} does not answer, and its cluster says that it is online: it may run CT {container.id}",
                f"switch {source.name} off, or bring SSH back there so that the container can be moved",
            ),
            about=_lies(container, source.name),
        )
    guest = next((g for g in guests.guests if (g.kind, g.id, g.node) == ("lxc", container.id, source.name)), None)
    if guest is None:
        raise NotKnown("not-seen", f"{container.host} did not show the config of CT {container.id} on {source.name}")
    conf = parse_conf(guest.text)
    problems = [
        *_container_problems(container, conf, cluster),
        *_disk_problems(view, container, conf),
        *_target_problems(view, container),
    ]
    if not problems:
        problems += _holders(view, container, conf, source)
    if problems:
        return _blocked(*problems, about=_lies(container, source.name))
    storages = view.fact(container.host, NAME, PlacementFacts)
    images = [str(v) for v in volumes(conf.main) if _is_mounted(v) and _kind(storages, v) == "rbd"]
    step = Step(
        action="take-over-container",
        object=Ref("Container", container.name),
        layer=NAME,
        reason=Reason.NOT_ON_HOST,
        summary=f"take CT {container.id} over from {source.name}, which is gone, to {container.host}",
        hosts=(container.host,),
        script=dataclasses.replace(TAKE_OVER, text=_RBD + TAKE_OVER.text),
        args=(str(container.id), source.name, guest.sha256, *images),
        disrupts=_disrupts(view, container, Permission.TAKE_OVER_CONTAINER),
        provisional=_cards_known_later(view, container),
        effect=_effect(container, guest, source.name),
    )
    return Drift(Reason.NOT_ON_HOST, _lies(container, source.name), step)


def _holders(view: View, container: Container, conf: PctConf, source: Host) -> Iterator[Block]:
    """Who may still write to the container's disks. Raises NotKnown when Ceph does not say."""
    facts = view.fact(container.host, NAME, PlacementFacts)
    for volume in filter(_is_mounted, volumes(conf.main)):
        if _kind(facts, volume) == "rbd":
            watchers = facts.watchers(container.id, volume)
            if isinstance(watchers, Unknown):
                raise NotKnown(watchers.reason, f"it is not known whether anybody has {volume}: {watchers.message}")
            if watchers:
                yield Block(
                    Reason.WATCHED,
                    f"{volume} is mapped at {', '.join(watchers)}: {source.name} is not dead, or somebody else has it",
                    f"make sure that {source.name} is off; look at `rbd status` until nobody watches the image",
                )
        elif not source.fenced:
            yield Block(
                Reason.NOT_FENCED,
                f"nothing tells whether {source.name} still writes to {volume}",
                f"switch {source.name} off for good, and then write `fenced: true` in its spec",
            )


def _is_mounted(volume: Volume) -> bool:
    return not volume.key.startswith("unused")


def _kind(facts: PlacementFacts, volume: Volume) -> str:
    storage = facts.storage(volume.storage)
    return storage.kind if storage is not None else ""


# What both need


def _no_quorum(host: str) -> Block:
    return Block(
        Reason.NO_QUORUM,
        f"{host} is in no quorate part of its cluster",
        "bring the other nodes or the network between them back; look at `pvecm status`",
    )


def _container_problems(container: Container, conf: PctConf, cluster: Cluster) -> Iterator[Block]:
    if container.id in cluster.ha:
        yield Block(
            Reason.HA_MANAGED,
            f"HA decides where CT {container.id} runs",
            f"let HA move it (`ha-manager migrate ct:{container.id} {container.host}`), or take it out of HA "
            f"(`ha-manager remove ct:{container.id}`)",
        )
    lock = conf.main.text("lock")
    if lock in _BACKUPS:
        yield Block(
            Reason.BACKUP_RUNNING,
            f"CT {container.id} is locked by a {lock} of Proxmox",
            f"wait until that has ended; `pct unlock {container.id}` on its node if nothing is at work any more",
        )
    elif lock:
        yield Block(
            Reason.LOCKED,
            f"CT {container.id} is locked by Proxmox ({lock})",
            f"wait until that has ended; `pct unlock {container.id}` on its node if nothing is at work any more",
        )
    if conf.main.flag("template"):
        yield Block(
            Reason.TEMPLATE, f"CT {container.id} is a template", "name a container that can be started in the spec"
        )


def _disk_problems(view: View, container: Container, conf: PctConf) -> Iterator[Block]:
    """Disks that the target would not have."""
    facts = view.fact(container.host, NAME, PlacementFacts)
    for volume in volumes(conf.main):
        storage = facts.storage(volume.storage)
        if storage is None or not storage.is_on(container.host):
            why = "no storage of that name is defined" if storage is None else "it is not for that node"
            if storage is not None and storage.disabled:
                why = "it is disabled"
            yield Block(
                Reason.STORAGE_MISSING,
                f"{container.host} cannot use the storage {volume.storage} of {volume.key}: {why}",
                f"make {volume.storage} available on {container.host} (/etc/pve/storage.cfg, `pvesm status`)",
            )
        elif storage.content and "rootdir" not in storage.content:
            yield Block(
                Reason.STORAGE_MISSING,
                f"the storage {storage.name} of {volume.key} is not for containers",
                f"add `rootdir` to its content (`pvesm set {storage.name} --content …`)",
            )
        elif not storage.shared:
            yield Block(
                Reason.LOCAL_DISK,
                f"{volume.key} lies on {storage.name}, which every node has for itself",
                f"move it to shared storage (`pct move-volume {container.id} {volume.key} STORAGE`)",
            )


def _target_problems(view: View, container: Container) -> Iterator[Block]:
    """What the container needs of the target, and would not find there."""
    missing = [b for b in missing_at(view, container.host, container) if not is_dropped(container, b)]
    if missing:
        yield missing_block(container, container.host, missing)
    if container.gpus is None:
        return
    host = view.host(container.host)
    gpus = view.fact(host.name, "host.gpu-health", GpuFacts)
    guests = view.fact(host.name, "container.devices", GuestFacts)
    assignment = assign(view.specs, host, gpus, guests)[container.name]
    if isinstance(assignment, Unassigned):
        yield Block(Reason(assignment.reason.value), assignment.message, assignment.needs)
        return
    for server in view.specs.servers.values():
        waits = preparing.missing(view, server) if server.container == container.name else ""
        if waits:
            message = f"{container.name} stays until {server.name} is ready to go with it: {waits}"
            needs = f"wait for that, or write `policy: {{mode: report}}` for {server.name} to move it at once"
            yield Block(Reason.SERVER_NOT_READY, message, needs)
        refused = fitting.refusal(view, server) if server.container == container.name else None
        if refused is not None:
            why, todo = refused
            message = f"{server.name} would not start with the cards of {host.name}: {why}"
            yield Block(Reason.SERVER_DOES_NOT_FIT, message, f"{todo}; reconcile fit {server.name} shows the sum")


def _cards_known_later(view: View, container: Container) -> bool:
    """Whether a plan cannot tell for sure that the target has cards for it."""
    if container.gpus is None:
        return False
    gpus = view.fact(container.host, "host.gpu-health", GpuFacts)
    guests = view.fact(container.host, "container.devices", GuestFacts)
    return is_known_later(view.specs, view.host(container.host), gpus, guests)


def _disrupts(view: View, container: Container, permission: Permission) -> tuple[Disruption, ...]:
    servers = sorted(s.name for s in view.specs.servers.values() if s.container == container.name)
    return (
        Disruption(Ref("Container", container.name), permission),
        *(Disruption(Ref("ModelServer", name), Permission.RESTART_SERVER) for name in servers),
    )


def _blocked(*problems: Block, about: str = "") -> Drift:
    """The first problem stands for all; the others are told beside it."""
    first, *others = problems
    return Drift(first.reason, about or first.message, first, {block.reason: block.message for block in others})


# What a plan expects


def _effect(container: Container, guest: Guest, source: str) -> Effect:
    """The container lies on its wanted host, stopped, and every member of the cluster says so."""

    def effect(facts: FleetFacts) -> FleetFacts:
        return {name: _after(host, container, guest, source) for name, host in facts.items()}

    return effect


def _after(host: HostFacts, container: Container, guest: Guest, source: str) -> HostFacts:
    if host.failure is not None:
        return host
    here = (container.id, source, "lxc")
    there = (container.id, container.host, "lxc")
    for name in ("host.access", "container.devices", "container.power", NAME):
        section = host.section(name)
        match section.value if isinstance(section, Known) else None:
            case AccessFacts(cluster=Cluster() as cluster) as access if here in cluster.guests:
                guests = tuple(sorted(there if each == here else each for each in cluster.guests))
                moved = dataclasses.replace(access, cluster=dataclasses.replace(cluster, guests=guests))
                host = host.with_section(name, moved)
            case GuestFacts() as seen if host.host in (source, container.host):
                others = [g for g in seen.guests if (g.kind, g.id) != ("lxc", container.id)]
                mine = [dataclasses.replace(guest, node=container.host)] if host.host == container.host else []
                ordered = sorted((*others, *mine), key=lambda each: (each.id, each.node))
                host = host.with_section(name, dataclasses.replace(seen, guests=tuple(ordered)))
            case PowerFacts() as power if host.host == source:
                running = tuple(r for r in power.running if r.id != container.id)
                host = host.with_section(name, dataclasses.replace(power, running=running))
            case PlacementFacts() as seen:
                gone = frozenset({("lxc", container.id)}) if host.host == source else frozenset()
                images = tuple(image for image in seen.images if image.guest != container.id)
                host = host.with_section(name, dataclasses.replace(seen, running=seen.running - gone, images=images))
    return host


LAYER = Layer(
    name=NAME,
    kind="Container",
    reasons=Reason,
    check=check,
    probe=_RBD + text("controller.layers.placement", "probe.sh"),
    parse=parse,
    platforms=frozenset({"proxmox"}),
)
