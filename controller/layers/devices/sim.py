"""container.devices in the simulated fleet: the guests' config files as this node can read them, and their editing."""

from __future__ import annotations

import hashlib

from controller.facts.words import Section
from controller.layers.shared import kernel_physics, probe_text, pve_physics
from controller.layers.shared.truth import Fleet, Host, Said, Work


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host."""
    cluster = fleet.cluster_of(host)
    if cluster is None:
        return Section(1, "cgroup 2\n", "/etc/pve does not say which node this is\n")
    out = f"cgroup {2 if host.cgroup2 else 1}\nnode {host.name}\n"
    for vmid, machine in host.machines.items():
        out += "".join(f"reserved {address} {vmid}\n" for address in machine.functions)
    out += "".join(f"character {major} {name}\n" for major, name in kernel_physics.proc_devices(host))
    tree = pve_physics.tree(cluster, host.name)
    wanted = {"/etc/pve/mapping/pci.cfg": tree.files["mapping/pci.cfg"]} if "mapping/pci.cfg" in tree.files else {}
    others = set(pve_physics.in_contact(fleet, cluster, host.name)) - {host.name}
    for node in sorted(set(cluster.nodes) - others):
        for kind in ("lxc", "qemu-server"):
            folder = f"nodes/{node}/{kind}/"
            inside = (path for path in tree.files if path.startswith(folder) and path.endswith(".conf"))
            wanted.update({f"/etc/pve/{path}": tree.files[path] for path in sorted(inside)})
    return Section(0, f"{out}==files\n{probe_text.files(wanted)}")


def act(fleet: Fleet, host: Host, work: Work) -> Said:
    """What ``edit-config.sh`` does to this host."""
    if work.action != "edit-config":
        raise ValueError(f"container.devices has no action {work.action}")
    vmid, seen, device_lines = work.args
    path = f"/etc/pve/lxc/{vmid}.conf"
    before = pve_physics.read(fleet, host, path)
    if before is None:
        return Said(75, err=f"CT {vmid} is not on this node\n")
    if hashlib.sha256(before.text.encode("utf-8", "surrogateescape")).hexdigest() != seen:
        return Said(75, err=f"{path} has changed since it was read\n")
    _remember(fleet, host, int(vmid), device_lines)
    if work.stdin == before.text:
        return Said(0)
    if not pve_physics.is_quorate(fleet, host):
        return Said(1, err=f"cannot write beside {path}\n")
    kept = f"/var/lib/reconcile/kept/etc/pve/nodes/{host.name}/lxc/{vmid}.conf@{host.generation:010d}-0"
    failed = kernel_physics.write(fleet, host, kept, before.text, 0o600)
    if failed:
        return Said(1, err=f"{failed}\ncannot keep a copy of {path}\n")
    failed = pve_physics.write(fleet, host, path, work.stdin)
    return Said(1, err=f"cannot write beside {path}: {failed}\n") if failed else Said(0)


def _remember(fleet: Fleet, host: Host, vmid: int, device_lines: str) -> None:
    """The record of what a running container was started with: that of the first edit since its start stays."""
    record = f"/run/reconcile/edited/{vmid}"
    container = host.containers.get(vmid)
    if container is None:
        host.files.pop(record, None)
        return
    written = host.files.get(record)
    if written is not None and int(written.text.split("\n", 1)[0]) >= kernel_physics.ticks(host, container.started):
        return
    kernel_physics.write(fleet, host, record, f"{kernel_physics.ticks(host, fleet.now)}\n{device_lines}\n", 0o600)
