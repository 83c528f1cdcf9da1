"""host.gpu-binding in the simulated fleet: who has cards open, and a card's way from one driver to another."""

from __future__ import annotations

import hashlib

from controller.facts.words import Section
from controller.layers.shared import kernel_physics, pve_physics
from controller.layers.shared.truth import Fleet, Host, Said, Work


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host."""
    lines: list[str] = []
    for function in host.functions.values():
        if function.gpu is not None and function.gpu.minor is not None:
            lines += (_user(host, who, f"/dev/nvidia{function.gpu.minor}") for who in function.gpu.used_by)
    for vmid, machine in host.machines.items():
        groups = {host.functions[a].iommu_group for a in machine.functions if a in host.functions}
        node = (f"/dev/vfio/{group}" for group in sorted(g for g in groups if g is not None))
        lines += (f"{machine.pid}|{each}|/qemu.slice/{vmid}.scope|kvm" for each in node)
    lines.sort(key=lambda line: "/proc/{}/fd {}".format(*line.split("|")))  # as the fragment sorts them
    return Section(0, "exit 0\n" + "".join(f"{line}\n" for line in lines) if lines else "idle\n")


def _user(host: Host, who: str, node: str) -> str:
    """A user of a card as the truth names it: ct:129, unit:nvidia-persistenced, host:python3."""
    kind, _, name = who.partition(":")
    if kind == "ct" and name.isdigit():
        running = host.containers.get(int(name))
        return f"{running.pid if running else 1}|{node}|/lxc/{name}/ns|python3"
    group = f"/system.slice/{name}.service" if kind == "unit" else "/system.slice"
    return f"{_pid(who)}|{node}|{group}|{name or who}"


def _pid(name: str) -> int:
    return 2000 + int(hashlib.sha256(name.encode()).hexdigest()[:4], 16)


def act(fleet: Fleet, host: Host, work: Work) -> Said:
    """What ``bind-gpu.sh`` does to this host."""
    what, address, driver, seen, claims = work.args
    function = host.functions.get(address)
    if function is None:
        return Said(75, err=f"there is no device at {address} any more\n")
    if (function.driver or "") != seen:
        return Said(75, err=f"the card at {address} is on {function.driver or 'no driver'} now\n")
    if _claimed(fleet, host) != claims:
        return Said(75, err="what VMs claim has changed since it was read\n")
    card = address.rpartition(".")[0]
    if any(held.startswith(f"{card}.") for machine in host.machines.values() for held in machine.functions):
        return Said(75, err=f"a VM has taken the card at {address}\n")
    if what == "guard":
        function.override = driver
        fleet.touch(host)
        return Said(0)
    if function.gpu is not None and function.gpu.used_by:
        return Said(1, err=f"the card at {address} is in use by {' '.join(function.gpu.used_by)}\n")
    if driver == "vfio-pci":
        kernel_physics.load_module(fleet, host, "vfio-pci")
    others = [a for a in host.functions if a.startswith(f"{card}.") and a != address] if driver == "vfio-pci" else []
    for each in (address, *others):
        if (failed := _give(fleet, host, each, driver)) is not None:
            return failed
    if function.driver == "nvidia" and host.userspace:
        kernel_physics.make_gpu_nodes(fleet, host, uvm=False)
    return Said(0)


def _give(fleet: Fleet, host: Host, address: str, driver: str) -> Said | None:
    function = host.functions[address]
    function.override = driver
    fleet.touch(host)
    if function.driver == driver:
        return None
    if function.driver is not None:
        kernel_physics.unbind(fleet, host, address)
    if driver not in host.loaded:
        return None
    kernel_physics.probe(fleet, host, address)
    return None if function.driver == driver else Said(1, err=f"{driver} does not take {address}:\n")


def _claimed(fleet: Fleet, host: Host) -> str:
    cluster = fleet.cluster_of(host)
    if cluster is None:
        return "none"
    files = pve_physics.tree(cluster, host.name).files
    folder = f"nodes/{host.name}/qemu-server/"
    texts = [files[path].text for path in sorted(files) if path.startswith(folder) and path.endswith(".conf")]
    mappings = files["mapping/pci.cfg"].text if "mapping/pci.cfg" in files else ""
    return hashlib.sha256("".join((*texts, mappings)).encode("utf-8", "surrogateescape")).hexdigest()
