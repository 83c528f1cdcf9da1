"""container.power: running or stopped as wanted, with the config that is on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence

from controller.core.package import text
from controller.core.view import View
from controller.core.words import Block, Disruption, Drift, InSync, Layer, NotKnown, Skipped, Step, Verdict
from controller.facts.words import FleetFacts, Known, Later
from controller.layers.access.facts import AccessFacts, Cluster
from controller.layers.devices.facts import Guest, GuestFacts
from controller.layers.gpu_health.facts import Gpu, GpuFacts
from controller.layers.power.facts import InnerNode, PowerFacts, Running, parse
from controller.layers.power.reasons import Reason
from controller.layers.shared import guest_script
from controller.layers.shared.assignment import Assigned, assign
from controller.layers.shared.lxc_devices import (
    ALLOW,
    DENY,
    NVIDIA_MAJOR,
    SPARE_MINOR,
    Passed,
    Rule,
    allowed,
    dev_rules,
    device_of,
    nvidia_node,
    passed,
    read_rule,
    resolver,
)
from controller.layers.shared.pve_conf import PctConf
from controller.layers.shared.pve_conf import parse as parse_conf
from controller.spec.model import Container, Lifecycle, State
from controller.spec.policy import Permission
from controller.spec.ref import Ref

NAME = "container.power"
POWER = guest_script("controller.layers.power", "power.sh")
TIMEOUT = 300.0  # seconds: a minute to shut down, a forced stop, a start that maps and mounts storage


def check(view: View, container: Container) -> Verdict:
    """Whether the container runs, or does not, as its spec wants; and with what its config says."""
    host = view.host(container.host)
    if host.lifecycle is not Lifecycle.ACTIVE:
        return Skipped(f"{host.name}: {host.lifecycle}")
    guests = view.fact(host.name, "container.devices", GuestFacts)
    cluster = view.fact(host.name, "host.access", AccessFacts).cluster
    guest = guests.container(container.id)
    if guest is None:
        return Skipped(f"CT {container.id} is not on {host.name}")  # container.placement says why
    power = view.fact(host.name, NAME, PowerFacts)
    if container.id in power.between:
        raise NotKnown("in-between", f"CT {container.id} is just being started or stopped")
    running, conf = power.of(container.id), parse_conf(guest.text)
    if container.state is State.STOPPED:
        if running is None:
            return InSync("onboot is set: Proxmox starts it when the host boots" if conf.main.flag("onboot") else "")
        message = f"{container.name} runs and is to be stopped"
        return _drift(view, container, guest, conf, cluster, Reason.STILL_RUNNING, message, running)
    if running is None:
        message = f"{container.name} does not run"
        return _drift(view, container, guest, conf, cluster, Reason.NOT_RUNNING, message, None)
    return _running(view, container, guest, conf, cluster, running)


def _running(
    view: View, container: Container, guest: Guest, conf: PctConf, cluster: Cluster | None, running: Running
) -> Verdict:
    """Whether a container that is to run has to be started anew."""
    note = "" if conf.main.flag("onboot") else "onboot is not set: nothing but this starts it after the host has booted"
    if container.gpus is None:
        return InSync(note)
    if isinstance(running.edited, Later) or isinstance(guest.edited, Later):
        if not isinstance(running.edited, Later):
            return InSync(note)
        message = f"{container.name} runs with the devices that its config passed before"
        return _drift(view, container, guest, conf, cluster, Reason.DEVICES_CHANGED, message, running)
    gpus = view.fact(container.host, "host.gpu-health", GpuFacts)
    rules = _started_with(running, gpus)
    differences = [*(_rule_differences(conf, rules, gpus) if rules is not None else ()), *_inside(conf, running, gpus)]
    if differences:
        reason = differences[0][0]
        message = f"{container.name} has to be restarted: {differences[0][1]}"
        evidence = {str(r): m for r, m in differences[1:]}
        why = _digest(differences)
        return _drift(view, container, guest, conf, cluster, reason, message, running, evidence, why)
    if rules is None:
        note = "it cannot be told which device rules it was started with: its LXC config was written since" + (
            f"; {note}" if note else ""
        )
    return InSync(note)


# What it was started with


_GENERATED = re.compile(r"(\S+)\s*=\s*(.*?)\s*", re.ASCII)


def _started_with(running: Running, gpus: GpuFacts) -> list[Rule] | None:
    """The device rules that the container runs under, None when nothing tells.

    The generated LXC config tells exactly, as long as it is the one of the start. Else our own first edit since
    recorded what the config had been before.
    """
    if running.generated is not None:
        lines = (_GENERATED.fullmatch(line) for line in running.generated.split("\n"))
        return [read_rule(line[1], line[2]) for line in lines if line and line[1] in (ALLOW, DENY)]
    if isinstance(running.edited, tuple):
        return _rules(passed(parse_conf("\n".join(running.edited)).main), gpus)
    return None


def _rules(here: Passed, gpus: GpuFacts) -> list[Rule]:
    """The rules of a config, in the order that Proxmox writes them."""
    return [*dev_rules([dev for _, dev in here.devs], gpus), *here.rules]


def _rule_differences(conf: PctConf, rules: Sequence[Rule], gpus: GpuFacts) -> list[tuple[Reason, str]]:
    """The NVIDIA devices that may be opened in it and are not to be, or the other way round."""
    here = passed(conf.main)
    now, resolve = _rules(here, gpus), resolver(gpus)
    found: list[tuple[Reason, str]] = []
    nodes = sorted(here.nodes | {f"nvidia{gpu.minor}" for gpu in gpus.gpus if not isinstance(gpu.minor, Later)})
    for node in nodes:
        device = device_of(node, gpus)
        if device is None or isinstance(device[0], Later) or isinstance(device[1], Later):
            continue
        numbers = (device[0], device[1])
        may, shall = allowed(rules, numbers, resolve), allowed(now, numbers, resolve)
        if shall and not may:
            found.append((Reason.DEVICES_CHANGED, f"it was started without the right to open /dev/{node}"))
        elif may and not shall:
            found.append((Reason.DEVICES_CHANGED, f"it was started with the right to open /dev/{node}"))
    if any(isinstance(gpu.minor, Later) for gpu in gpus.gpus):  # in a plan: it may get any that is free
        free = set(range(len(gpus.functions))) - {gpu.minor for gpu in gpus.gpus}
        lost = [(NVIDIA_MAJOR, minor) for minor in sorted(free)]
        if any(allowed(rules, card, resolve) and not allowed(now, card, resolve) for card in lost):
            found.append((Reason.DEVICES_CHANGED, "it was started with the right to open a card that is bound anew"))
    others = any(function.is_gpu and gpus.gpu(function.pci) is None for function in gpus.functions)
    any_card = (NVIDIA_MAJOR, SPARE_MINOR)
    if others and allowed(rules, any_card, resolve) and not allowed(now, any_card, resolve):
        found.append(
            (Reason.DEVICES_CHANGED, "it was started with the right to open any card that the driver is given")
        )
    return found


def _inside(conf: PctConf, running: Running, gpus: GpuFacts) -> list[tuple[Reason, str]]:
    """The nodes that the config passes and that are not so inside, where the host's own are right.

    A card's node that is inside and not passed says nothing: in a privileged container NVIDIA's userland makes them.
    """
    found: list[tuple[Reason, str]] = []
    for node in sorted(_nodes_at_their_place(passed(conf.main))):
        wanted, here, inner = device_of(node, gpus), gpus.node(f"/dev/{node}"), running.node(node)
        if here is None or not here.is_device or wanted is None or (here.major, here.minor) != wanted:
            continue
        if inner is None:
            found.append((Reason.INNER_NODE_MISSING, f"/dev/{node} is not there inside"))
        elif not inner.is_device:
            found.append((Reason.INNER_NODE_NOT_A_DEVICE, f"/dev/{node} is a {inner.kind} inside, not a device"))
        elif (inner.major, inner.minor) != wanted:
            numbers = f"{inner.major}:{inner.minor} inside, the driver's is {wanted[0]}:{wanted[1]} now"
            found.append((Reason.INNER_NODE_OF_ANOTHER_DEVICE, f"/dev/{node} is device {numbers}"))
    return found


def _nodes_at_their_place(here: Passed) -> set[str]:
    nodes = {dev.node for _, dev in here.devs} | {m.node for m in here.mounts if nvidia_node(m.target) == m.node}
    return nodes - {""}


def _digest(differences: Sequence[tuple[Reason, str]]) -> str:
    return hashlib.sha256("\n".join(sorted(message for _, message in differences)).encode()).hexdigest()[:16]


# What is done about it


def _drift(
    view: View,
    container: Container,
    guest: Guest,
    conf: PctConf,
    cluster: Cluster | None,
    reason: Reason,
    message: str,
    running: Running | None,
    evidence: Mapping[str, str] | None = None,
    why: str = "",
) -> Drift:
    block = _problem(container, conf, cluster, running, why) or _taken(view, container)
    remedy = block if block is not None else _step(view, container, guest, conf, reason, running, why)
    return Drift(reason, message, remedy, evidence or {})


def _problem(
    container: Container, conf: PctConf, cluster: Cluster | None, running: Running | None, why: str
) -> Block | None:
    """Why the container is not to be started or stopped by us now."""
    if cluster is not None and container.id in cluster.ha:
        return Block(
            Reason.HA_MANAGED,
            f"HA starts and stops CT {container.id}",
            f"leave it to HA (`ha-manager set ct:{container.id} --state …`), or take the container out of HA",
        )
    if lock := conf.main.text("lock"):
        return Block(
            Reason.LOCKED,
            f"CT {container.id} is locked by Proxmox ({lock})",
            f"wait until that has ended; `pct unlock {container.id}` if nothing is at work any more",
        )
    if conf.main.flag("template"):
        return Block(
            Reason.TEMPLATE, f"CT {container.id} is a template", "name a container that can be started in the spec"
        )
    if running is not None and why and running.restarted_for == why:
        return Block(
            Reason.RESTART_DID_NOT_HELP,
            f"CT {container.id} was restarted for this already, and it is so again",
            f"look at `pct config {container.id}` and at /var/lib/lxc/{container.id}/config: what else brings devices?",
        )
    return None


def _taken(view: View, container: Container) -> Block | None:
    """Why the container cannot have its cards yet: another still runs with one of them, and is to let go of it."""
    if container.gpus is None or container.state is State.STOPPED:
        return None
    host = view.host(container.host)
    gpus = view.fact(host.name, "host.gpu-health", GpuFacts)
    power = view.fact(host.name, NAME, PowerFacts)
    assigned = assign(view.specs, host, gpus, view.fact(host.name, "container.devices", GuestFacts))

    def waits_for(name: str) -> dict[str, str]:
        """The containers that still run with cards of this one, and which."""
        mine, found = assigned.get(name), dict[str, str]()
        if isinstance(mine, Assigned):
            for other in view.containers_on(host.name):
                theirs, runs = assigned.get(other.name), power.of(other.id)
                if other.name == name or theirs is None or runs is None:
                    continue
                for pci in mine.pcis:
                    entitled = isinstance(theirs, Assigned) and pci in theirs.pcis
                    if not entitled and _may_open(runs, gpus.gpu(pci), gpus):
                        found[other.name] = pci
        return found

    others = waits_for(container.name)
    if not others or _goes_first(container, waits_for, view.containers_on(host.name)):
        return None
    holder, pci = next(iter(others.items()))
    return Block(
        Reason.GPU_STILL_IN_USE,
        f"{holder} still runs with the card at {pci}, which is {container.name}'s now",
        f"wait until {holder} has been restarted without it, or permit that",
    )


def _may_open(running: Running, card: Gpu | None, gpus: GpuFacts) -> bool:
    """Whether a running container may open a card, as far as anything tells."""
    if card is None or isinstance(card.minor, Later):
        return False
    rules = _started_with(running, gpus)
    if rules is None:
        return running.node(f"nvidia{card.minor}") is not None
    return allowed(rules, (NVIDIA_MAJOR, card.minor), resolver(gpus))


def _goes_first(
    container: Container, waits_for: Callable[[str], Mapping[str, str]], there: Sequence[Container]
) -> bool:
    """Whether containers wait for each other in a ring, and this one has the lowest id of it."""

    def reached(name: str) -> set[str]:
        found: set[str] = set()
        ahead = list(waits_for(name))
        while ahead:
            if (next_one := ahead.pop()) not in found:
                found.add(next_one)
                ahead += waits_for(next_one)
        return found

    ring = {name for name in reached(container.name) if container.name in reached(name)}
    return container.name in ring and container.id == min(other.id for other in there if other.name in ring)


def _step(
    view: View,
    container: Container,
    guest: Guest,
    conf: PctConf,
    reason: Reason,
    running: Running | None,
    why: str,
) -> Step:
    action = "start" if running is None else "stop" if container.state is State.STOPPED else "restart"
    ref, host = Ref("Container", container.name), container.host
    servers = sorted(s.name for s in view.specs.servers.values() if s.container == container.name)
    since = "0" if running is None else str(running.started) if not isinstance(running.started, Later) else ""
    waiting = conf.pending.keys
    also = (
        f"; Proxmox then applies pending changes of {', '.join(sorted(waiting))}"
        if waiting and action != "stop"
        else ""
    )
    step = Step(
        action=action,
        object=ref,
        layer=NAME,
        reason=reason,
        summary=f"{action} CT {container.id} on {host}{also}",
        hosts=(host,),
        script=POWER,
        args=(action, str(container.id), guest.sha256, since, why),
        disrupts=(
            Disruption(ref, Permission.RESTART_CONTAINER),
            *(Disruption(Ref("ModelServer", name), Permission.RESTART_SERVER) for name in servers),
        ),
        timeout=TIMEOUT,
        provisional=isinstance(guest.edited, Later) or _is_known_later(view, host),
        independent=action == "stop",
    )

    def effect(facts: FleetFacts) -> FleetFacts:
        section, later = facts[host].section, Later(step.id)
        started = None if action == "stop" else _predicted(container.id, guest, conf, section, later)
        return _with(facts, host, container.id, started)

    return dataclasses.replace(step, effect=effect)


def _is_known_later(view: View, host: str) -> bool:
    """Whether a card of the host gets its minor in the course of a plan."""
    found = view.facts[host].section("host.gpu-health")
    gpus = found.value.gpus if isinstance(found, Known) and isinstance(found.value, GpuFacts) else ()
    return any(isinstance(gpu.minor, Later) for gpu in gpus)


def _predicted(vmid: int, guest: Guest, conf: PctConf, section: Callable[[str], object], later: Later) -> Running:
    """The container as it runs after a start: with the rules of its config, and the host's nodes inside."""
    found = section("host.gpu-health")
    gpus = found.value if isinstance(found, Known) and isinstance(found.value, GpuFacts) else None
    if gpus is None or isinstance(guest.edited, Later):
        return Running(vmid, 0, later, generated=None, edited=None, nodes=())
    here = passed(conf.main)
    rules = [*(f"{ALLOW} = {_numbers(rule)}" for rule in dev_rules([dev for _, dev in here.devs], gpus))]
    rules += [f"{key} = {value}" for key, value in conf.main.lxc if key in (ALLOW, DENY)]
    nodes = tuple(
        InnerNode(node, there.kind, there.major, there.minor)
        for node in sorted(_nodes_at_their_place(here))
        if (there := gpus.node(f"/dev/{node}")) is not None
    )
    return Running(vmid, 0, later, "\n".join(rules), None, nodes)


def _numbers(rule: Rule) -> str:
    return f"c {rule.major}:{rule.minor} {rule.access}"


def _with(facts: FleetFacts, host: str, vmid: int, started: Running | None) -> FleetFacts:
    found = facts[host].section(NAME)
    if not isinstance(found, Known) or not isinstance(found.value, PowerFacts):
        return facts
    others = [running for running in found.value.running if running.id != vmid]
    running = sorted((*others, *((started,) if started else ())), key=lambda each: each.id)
    return {**facts, host: facts[host].with_section(NAME, dataclasses.replace(found.value, running=tuple(running)))}


LAYER = Layer(
    name=NAME,
    kind="Container",
    reasons=Reason,
    check=check,
    probe=text("controller.layers.power", "probe.sh"),
    parse=parse,
    platforms=frozenset({"proxmox"}),
)
