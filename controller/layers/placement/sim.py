"""container.placement in the simulated fleet: what runs, storages, who has a disk; moving and taking over."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from controller.core.words import Step
from controller.facts.words import Section
from controller.layers.shared import kernel_physics, pve_physics
from controller.layers.shared.truth import Fleet, Host, Said, Work


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host."""
    cluster = fleet.cluster_of(host)
    if cluster is None:
        return Section(1, "", "/etc/pve does not say which node this is\n")
    out = "".join(f"runs|lxc|{vmid}\n" for vmid in host.containers)
    out += "".join(f"runs|qemu|{vmid}\n" for vmid in sorted(map(str, host.machines)))
    present = pve_physics.in_contact(fleet, cluster, host.name)
    for node in (name for name in cluster.nodes if name not in present):
        for vmid in guests:
            config = pve_physics.read(fleet, host, f"/etc/pve/nodes/{node}/lxc/{vmid}.conf")
            for storage, image in _images(fleet, host, config.text if config is not None else ""):
                said = pve_physics.rbd_status(fleet, host, storage, image)
                out += f"image|{vmid}|{storage}|{image}\nsaid|exit {said.rc}\n"
                out += "".join(f"said|{line}\n" for line in (said.out + said.err).splitlines())
    storages = pve_physics.read(fleet, host, "/etc/pve/storage.cfg")
    return Section(0, f"{out}==storage\n{storages.text if storages is not None else ''}")


def _images(fleet: Fleet, host: Host, config: str) -> Iterator[tuple[str, str]]:
    """The RBD images of a config's main section."""
    for line in config.split("\n"):
        if line.startswith("["):
            return
        disk = re.match(r"(?:rootfs|mp\d+): ?(?:.*,)?(?:volume=)?([^/,:=]+):([^,]+)", line)
        if disk is not None and pve_physics.storage_kind(fleet, host, disk[1]) == "rbd":
            yield disk[1], disk[2]


def takes(step: Step) -> float:
    """Seconds that a step takes."""
    if step.action == "take-over-container":
        return 1.0
    return 4.0 if step.args[-1] == "0" else 9.0


def act(fleet: Fleet, host: Host, work: Work) -> Said:
    """What ``move.sh`` and ``take-over.sh`` do to this host."""
    if work.action == "move-container":
        return _move(fleet, host, *work.args)
    number, source, seen, *images = work.args
    return _take_over(fleet, host, number, source, seen, images)


def _move(fleet: Fleet, host: Host, number: str, target: str, seen: str, since: str) -> Said:
    vmid, path = int(number), f"/etc/pve/lxc/{number}.conf"
    cluster, config = fleet.cluster_of(host), pve_physics.read(fleet, host, path)
    if cluster is None or config is None:
        return _stale(f"CT {vmid} is not on this node")
    if _digest(config.text) != seen:
        return _stale(f"{path} has changed since it was read")
    if pve_physics.ha_managed(fleet, host, vmid):
        return _stale(f"HA manages CT {vmid} now")
    if not pve_physics.is_quorate(fleet, host):
        return _stale("this node is in no quorate part of its cluster now")
    if target not in pve_physics.in_contact(fleet, cluster, host.name):
        return _stale(f"{target} is not in contact with this node now")
    container = host.containers.get(vmid)
    if str(kernel_physics.ticks(host, container.started) if container is not None else 0) != since:
        return _stale(f"CT {vmid} has been stopped or started since it was seen")
    if container is not None:
        said = pve_physics.pct_stop(fleet, host, vmid)
        if vmid in host.containers:
            return Said(1, err=f"{said.err}CT {vmid} still runs after pct shutdown (exit {said.rc})\n")
    said = pve_physics.pct_migrate(fleet, host, vmid, target)
    if pve_physics.read(fleet, host, path) is None:
        return Said(0, out=said.out)
    back = ""
    if container is not None:
        again = pve_physics.pct_start(fleet, host, vmid).rc == 0
        back = "; it has been started again" if again else "; it could not be started again"
    told = f"CT {vmid} has not been moved: pct migrate ended with {said.rc}{back}\n"
    return Said(1, out=said.out, err=said.err + told)


def _take_over(fleet: Fleet, host: Host, number: str, source: str, seen: str, images: list[str]) -> Said:
    vmid, cluster = int(number), fleet.cluster_of(host)
    old, new = f"/etc/pve/nodes/{source}/lxc/{vmid}.conf", f"/etc/pve/lxc/{vmid}.conf"
    config = pve_physics.read(fleet, host, old)
    if cluster is None or config is None:
        return _stale(f"the config of CT {vmid} does not lie on {source} now")
    if _digest(config.text) != seen:
        return _stale(f"{old} has changed since it was read")
    if pve_physics.ha_managed(fleet, host, vmid):
        return _stale(f"HA manages CT {vmid} now")
    if not pve_physics.is_quorate(fleet, host):
        return _stale("this node is in no quorate part of its cluster now")
    if source in pve_physics.in_contact(fleet, cluster, host.name):
        return _stale(f"{source} is back")
    for volume in images:
        said = pve_physics.rbd_status(fleet, host, *volume.split(":", 1))
        if '"watchers":[]' not in said.out:
            return _stale(f"somebody has {volume} now: {said.out}")
    failed = pve_physics.rename(fleet, host, old, new)
    return Said(1, err=f"{failed}\ncannot rename {old} to {new}\n") if failed else Said(0)


def _digest(of: str) -> str:
    return hashlib.sha256(of.encode("utf-8", "surrogateescape")).hexdigest()


def _stale(message: str) -> Said:
    return Said(75, err=f"{message}\n")
