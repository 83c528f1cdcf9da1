"""What ``edit-config.sh`` does to a simulated host, for every layer that edits a container's config."""

from __future__ import annotations

import hashlib

from controller.layers.shared import kernel_physics, pve_physics
from controller.layers.shared.truth import Fleet, Host, Said, Work


def edit_config(fleet: Fleet, host: Host, work: Work) -> Said:
    """Put a new config in the place of a container's."""
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
