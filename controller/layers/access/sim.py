"""host.access in the simulated fleet: who answers, and what the cluster file system says there."""

from __future__ import annotations

from controller.facts.words import Section
from controller.layers.shared import pve_physics
from controller.layers.shared.truth import Fleet, Host


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host."""
    lines = [f"uid {host.uid}", f"Linux {host.kernel} {host.arch}", f"hostname {host.name}"]
    lines += (f"missing {tool}" for tool in host.missing_tools)
    out = "".join(f"{line}\n" for line in lines)
    if host.cluster is None:
        return Section(0, out)
    resources = pve_physics.read(fleet, host, "/etc/pve/ha/resources.cfg")
    ha = resources.text if resources is not None else ""
    members, vmlist = pve_physics.members(fleet, host), pve_physics.vmlist(fleet, host)
    return Section(0, f"{out}==members\n{members}\n==vmlist\n{vmlist}\n==ha\n{ha}")
