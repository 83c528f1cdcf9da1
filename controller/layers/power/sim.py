"""container.power in the simulated fleet: which containers run, what they were started with, and their power."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from controller.core.words import Step
from controller.facts.words import Section
from controller.layers.power.facts import TICKS
from controller.layers.shared import kernel_physics, probe_text, pve_physics
from controller.layers.shared.truth import Fleet, Host, Node, RunningContainer, Said, Work


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host."""
    here = [(vmid, host.containers[vmid]) for vmid in guests if vmid in host.containers]
    lines: list[str] = []
    configs = {}
    for vmid, container in here:
        ticks = kernel_physics.ticks(host, container.started)
        lines.append(f"running|{vmid}|{container.pid}|{ticks}")
        for note in ("edited", "restarted"):
            record = host.files.get(f"/run/reconcile/{note}/{vmid}")
            if record is not None:
                lines += (f"{note}|{vmid}|{line}" for line in record.text.split("\n")[:-1])
        config = host.files.get(f"/var/lib/lxc/{vmid}/config")
        if config is not None and config.mtime <= int(host.booted) + ticks // TICKS + 1:
            configs[f"/var/lib/lxc/{vmid}/config"] = config
    for _, container in here:
        lines += _nodes(container)
    return Section(0, "".join(f"{line}\n" for line in lines) + "==files\n" + probe_text.files(configs))


def _nodes(container: RunningContainer) -> Iterator[str]:
    """In the order of the shell's two patterns; the folder of the second is among the first."""
    nodes = {path: node for path, node in container.dev.items() if path.startswith("/dev/nvidia")}
    flat = {path: node for path, node in nodes.items() if path.count("/") == 2}
    caps = {path: node for path, node in nodes.items() if path.startswith("/dev/nvidia-caps/")}
    kinds = {path: _kind(node) for path, node in flat.items()} | ({"/dev/nvidia-caps": "directory|0|0"} if caps else {})
    for path in sorted(kinds):
        yield f"node|/proc/{container.pid}/root{path}|{kinds[path]}"
    for path in sorted(caps):
        yield f"node|/proc/{container.pid}/root{path}|{_kind(caps[path])}"


def _kind(node: Node) -> str:
    if node.plain:
        return "regular empty file|0|0"
    return f"character special file|{node.major:x}|{node.minor:x}"


def takes(step: Step) -> float:
    """Seconds that a step takes."""
    return {"start": 3.0, "stop": 5.0, "restart": 8.0}[step.args[0]]


def act(fleet: Fleet, host: Host, work: Work) -> Said:
    """What ``power.sh`` does to this host."""
    action, number, seen, since, why = work.args
    vmid, path = int(number), f"/etc/pve/lxc/{number}.conf"
    config = pve_physics.read(fleet, host, path)
    if config is None:
        return _stale(f"CT {vmid} is not on this node")
    if hashlib.sha256(config.text.encode("utf-8", "surrogateescape")).hexdigest() != seen:
        return _stale(f"{path} has changed since it was read")
    if pve_physics.ha_managed(fleet, host, vmid):
        return _stale(f"HA manages CT {vmid} now")
    container = host.containers.get(vmid)
    if action == "start" and container is not None:
        return _stale(f"CT {vmid} runs already")
    started = kernel_physics.ticks(host, container.started) if container is not None else 0
    if action != "start" and str(started) != since:
        return _stale(f"CT {vmid} has been stopped or started since it was seen")
    said = Said(0)
    if action in ("stop", "restart"):
        said = pve_physics.pct_stop(fleet, host, vmid)
        if vmid in host.containers:
            return Said(1, err=f"{said.err}CT {vmid} still runs after pct shutdown (exit {said.rc})\n")
    return _start(fleet, host, vmid, why) if action in ("start", "restart") else Said(0)


def _start(fleet: Fleet, host: Host, vmid: int, why: str) -> Said:
    for note in ("edited", "restarted"):
        host.files.pop(f"/run/reconcile/{note}/{vmid}", None)
    said = pve_physics.pct_start(fleet, host, vmid)
    container = host.containers.get(vmid)
    if container is None:
        tells = f"CT {vmid} does not run after pct start (exit {said.rc}); pct start {vmid} --debug says more\n"
        return Said(1, err=said.err + tells)
    record = f"{kernel_physics.ticks(host, container.started)} {why}\n"
    kernel_physics.write(fleet, host, f"/run/reconcile/restarted/{vmid}", record, 0o600)
    return Said(0)


def _stale(message: str) -> Said:
    return Said(75, err=f"{message}\n")
