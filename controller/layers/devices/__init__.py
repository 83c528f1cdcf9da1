"""container.devices: the config passes exactly the assigned GPUs, by the right nodes and majors; all else as it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from controller.core.package import text
from controller.core.view import View
from controller.core.words import Block, Disruption, Drift, InSync, Layer, Skipped, Step, Verdict
from controller.facts.words import FleetFacts, Later
from controller.layers.access.facts import AccessFacts, Cluster
from controller.layers.devices.facts import Guest, GuestFacts, parse
from controller.layers.devices.reasons import Reason
from controller.layers.devices.repair import CONTROL, UVM, Finding, Want, repair
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.shared.assignment import Unassigned, assign
from controller.layers.shared.config_edit import EDIT, edit_config, edited
from controller.layers.shared.lxc_devices import (
    DEV_KEY,
    DIRECTORIES,
    Number,
    card_minor,
    device_of,
    nvidia_node,
    passed,
    read_dev,
)
from controller.layers.shared.pve_conf import PctConf
from controller.layers.shared.pve_conf import parse as parse_conf
from controller.spec.model import Container, Lifecycle
from controller.spec.policy import Permission
from controller.spec.ref import Ref

NAME = "container.devices"


def check(view: View, container: Container) -> Verdict:
    """Whether the container's config passes what its assignment says."""
    if container.gpus is None:
        return Skipped("the spec says nothing of its GPUs")
    host = view.host(container.host)
    if host.lifecycle is not Lifecycle.ACTIVE:
        return Skipped(f"{host.name}: {host.lifecycle}")
    guests = view.fact(host.name, NAME, GuestFacts)
    cluster = view.fact(host.name, "host.access", AccessFacts).cluster
    guest = guests.container(container.id)
    if guest is None:
        return Skipped(f"CT {container.id} is not on {host.name}")  # container.placement says why
    if isinstance(guest.edited, Later):
        return InSync(f"known after {guest.edited.step}")
    gpus = view.fact(host.name, "host.gpu-health", GpuFacts)
    assignment = assign(view.specs, host, gpus, guests)[container.name]
    if isinstance(assignment, Unassigned):
        return _blocked(Reason(assignment.reason.value), assignment.message, assignment.needs)
    minors: list[Number] = []
    for pci in assignment.pcis:
        card, function = gpus.gpu(pci), gpus.function(pci)
        if card is None:
            on = f"on {function.driver}" if function and function.driver else "on no driver"
            return _blocked(
                Reason.GPU_NOT_AVAILABLE,
                f"the card at {pci} of {host.name} is {on}, not on nvidia",
                "load the nvidia driver and bind the card to it",
            )
        minors.append(card.minor)
    evidence = {"assigned": ", ".join(assignment.pcis) or "none"}
    if cluster is not None and container.id in cluster.ha:
        evidence["ha-managed"] = "HA starts and stops it: an edit takes effect when HA starts it the next time"
    known = tuple(minor for minor in minors if not isinstance(minor, Later))
    if len(known) < len(minors) or isinstance(gpus.major(UVM), Later):
        return _provisional(container, guest, [*minors, gpus.major(UVM)], evidence)
    conf = parse_conf(guest.text)
    blocked = _host_problem(host.name, gpus, guests, conf, known)
    if blocked is not None:
        return _blocked(*blocked, evidence)
    alone = all(function.pci in assignment.pcis for function in gpus.functions if function.is_gpu)
    named = host.nvidia is not None and host.nvidia.driver is not None  # host.boot makes the nodes then
    want = Want(known, container.passthrough, alone, gpus, guests.drivers, named)
    return _judged(container, guest, conf, cluster, want, evidence)


def _judged(
    container: Container,
    guest: Guest,
    conf: PctConf,
    cluster: Cluster | None,
    want: Want,
    evidence: Mapping[str, str],
) -> Verdict:
    done = repair(guest.text, want)
    left = {"left alone": "; ".join(done.left)} if done.left else {}
    findings = [*done.findings, *done.remaining]
    if not findings:
        return InSync("; ".join(done.left))
    evidence = {**evidence, **{str(f.reason): f.message for f in findings[1:]}, **left}
    stop = _editing_problem(container, conf, cluster) or _remaining_problem(done.remaining)
    if stop is not None:
        return Drift(findings[0].reason, _about(container, findings[0]), Block(*stop), evidence)
    return Drift(
        findings[0].reason,
        _about(container, findings[0]),
        edit_config(container, guest, done.text, NAME, findings[0].reason),
        evidence,
    )


def _about(container: Container, finding: Finding) -> str:
    return f"the config of {container.name}: {finding.message}"


def _host_problem(
    host: str, gpus: GpuFacts, guests: GuestFacts, conf: PctConf, minors: Sequence[int]
) -> tuple[Reason, str, str] | None:
    """What on the host keeps any config from passing these cards, None when nothing does."""
    if not guests.cgroup2:
        return (
            Reason.CGROUP_V1,
            f"{host} has a cgroup v1 tree, where device rules for cgroup v2 do nothing",
            "boot it without systemd.unified_cgroup_hierarchy=0",
        )
    if minors and gpus.major(UVM) is None:
        return Reason.NO_UVM, f"nvidia-uvm is not loaded on {host}", "run `modprobe nvidia-uvm` there"
    needed = [*(f"nvidia{minor}" for minor in minors), *((CONTROL, UVM) if minors else ())]
    for node in dict.fromkeys((*needed, *_companions(conf))):
        problem = _node_problem(host, gpus, node)
        if problem is not None:
            return problem
    return None


def _companions(conf: PctConf) -> list[str]:
    """The other NVIDIA nodes without which the container would not start, as far as the host was asked for them."""
    here = passed(conf.main)
    nodes = {dev.node for _, dev in here.devs} | {mount.node for mount in here.mounts if not mount.is_optional}
    nodes |= {nvidia_node(rule.path) for rule in here.rules if rule.path}
    asked_for = (node for node in nodes if node and ("/" not in node or node.startswith("nvidia-caps/")))
    return sorted(node for node in asked_for if card_minor(node) is None)


def _node_problem(host: str, gpus: GpuFacts, node: str) -> tuple[Reason, str, str] | None:
    path, here = f"/dev/{node}", gpus.node(f"/dev/{node}")
    if here is None:
        return (
            Reason.MISSING_NODE,
            f"{path} is not there on {host}",
            f"run `{_maker(node)}` there",
        )
    if node in DIRECTORIES:
        return None
    if not here.is_device:
        return (
            Reason.NODE_NOT_A_DEVICE,
            f"{path} on {host} is a {here.kind}, not a device",
            f"remove it there, and run `{_maker(node)}`",
        )
    wanted = device_of(node, gpus)
    if wanted is not None and (here.major, here.minor) != wanted:
        return (
            Reason.NODE_OF_ANOTHER_DEVICE,
            f"{path} on {host} is device {here.major}:{here.minor}, the driver's is {wanted[0]}:{wanted[1]} now",
            f"remove it there, and run `{_maker(node)}`",
        )
    return None


def _maker(node: str) -> str:
    """The command that makes a node; with -u, -c is a minor of nvidia-uvm and not a card's (nvidia-modprobe.c)."""
    minor = card_minor(node)
    if minor is not None:
        return f"nvidia-modprobe -c{minor}"
    if node.startswith("nvidia-uvm"):
        return "nvidia-modprobe -u -c0"
    return {CONTROL: "nvidia-modprobe -c255", "nvidia-modeset": "nvidia-modprobe -m"}.get(node, "nvidia-smi")


def _editing_problem(container: Container, conf: PctConf, cluster: Cluster | None) -> tuple[Reason, str, str] | None:
    """Why the config cannot be edited now."""
    if cluster is not None and not cluster.quorate:
        return (
            Reason.NO_QUORUM,
            f"{container.host} is in no quorate part of its cluster, and nothing can be written there",
            "bring the other nodes or the network between them back; look at `pvecm status`",
        )
    if lock := conf.main.text("lock"):
        return (
            Reason.LOCKED,
            f"CT {container.id} is locked by Proxmox ({lock})",
            f"wait until that has ended; `pct unlock {container.id}` if nothing is at work any more",
        )
    if conf.main.flag("template"):
        return Reason.TEMPLATE, f"CT {container.id} is a template", "name a container that can be started in the spec"
    waiting = _pending_devices(conf)
    if waiting:
        return (
            Reason.PENDING,
            f"changes of {', '.join(waiting)} wait for the next start of CT {container.id}",
            f"restart it, or take them back with `pct set {container.id} --revert {waiting[0]}`",
        )
    return None


def _pending_devices(conf: PctConf) -> list[str]:
    """The pending changes that concern NVIDIA's devices: Proxmox makes them at the next start, over what we write."""
    named = conf.pending.text("delete").replace(";", ",").replace(",", " ").split()
    keys = [key for key in (*conf.pending.keys, *named) if DEV_KEY.fullmatch(key)]
    return sorted(
        key
        for key in set(keys)
        if any(read_dev(section.text(key)).node for section in (conf.main, conf.pending) if key in section.keys)
    )


def _remaining_problem(remaining: Sequence[Finding]) -> tuple[Reason, str, str] | None:
    if not remaining:
        return None
    return (
        remaining[0].reason,
        remaining[0].message,
        "write rules for the devices that it needs in its place; it stays as it may be meant for something else",
    )


def _provisional(
    container: Container, guest: Guest, numbers: Sequence[Number | None], evidence: Mapping[str, str]
) -> Drift:
    """The edit of a plan whose numbers are known only after an earlier step of it."""
    later = next(number for number in numbers if isinstance(number, Later))

    def effect(facts: FleetFacts) -> FleetFacts:
        return edited(facts, container, dataclasses.replace(guest, edited=later), later)

    step = Step(
        action="edit-config",
        object=Ref("Container", container.name),
        layer=NAME,
        reason=Reason.WRONG_CARDS,
        summary=f"edit the config of CT {container.id} on {container.host}; how, is known after {later.step}",
        hosts=(container.host,),
        script=EDIT,
        args=(str(container.id), guest.sha256),
        disrupts=(Disruption(Ref("Container", container.name), Permission.EDIT_CONTAINER_CONFIG),),
        provisional=True,
        effect=effect,
    )
    return Drift(
        Reason.WRONG_CARDS, f"the config of {container.name} has to pass cards of other numbers", step, evidence
    )


def _blocked(reason: Reason, message: str, needs: str, evidence: Mapping[str, str] | None = None) -> Drift:
    return Drift(reason, message, Block(reason, message, needs), evidence or {})


LAYER = Layer(
    name=NAME,
    kind="Container",
    reasons=Reason,
    check=check,
    probe=text("controller.layers.devices", "probe.sh"),
    parse=parse,
    platforms=frozenset({"proxmox"}),
)
