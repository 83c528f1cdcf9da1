"""container.devices in the simulated fleet: the guests' config files as this node can read them, and their editing."""

from __future__ import annotations

from controller.facts.words import Section
from controller.layers.shared import edit_physics, kernel_physics, probe_text, pve_physics
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
    return edit_physics.edit_config(fleet, host, work)
