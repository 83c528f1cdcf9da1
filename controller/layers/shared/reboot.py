"""The reboot of a host, as a step that any layer of the host may ask for.

    return Drift(Reason.…, message, reboot(view, host, NAME, Reason.…, "the new kernel is to run", effect))

It needs ``reboot-host`` of the Host and of every guest that runs on it, those in no spec too. While it is under way
the answer is a ``Wait``; afterwards everything is looked at afresh.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

from controller.core.package import script
from controller.core.view import View
from controller.core.words import Block, Disruption, Effect, Script, Step, Wait
from controller.facts.units import UnitFacts
from controller.layers.access.facts import AccessFacts, Cluster
from controller.layers.placement.facts import PlacementFacts
from controller.spec.model import Connection, Host, Platform
from controller.spec.policy import Permission
from controller.spec.ref import Ref

REBOOT = script("controller.layers.shared", "reboot.sh")


class NoReboot(StrEnum):
    """Why a host is not rebooted. A layer that asks for reboots has these among its reasons."""

    QUORUM = "reboot-loses-quorum"
    """Without the host its cluster would have no quorum."""
    CONTROLLER = "controller-runs-here"
    """The controller runs on that very host."""
    DID_NOT_HELP = "reboot-did-not-help"
    """It was rebooted for this already, and it is so again."""


def reboot(view: View, host: Host, layer: str, reason: str, why: str, effect: Effect) -> Step | Block | Wait:
    """Reboot a host because of ``why``, which stays the same text for the same cause. Raises NotKnown."""
    units = view.fact(host.name, "world", UnitFacts)
    if units.rebooting:
        return Wait("reboot", f"{host.name} reboots", (host.name,))
    cluster = view.fact(host.name, "host.access", AccessFacts).cluster
    guests: frozenset[tuple[str, int]] = frozenset()
    if host.platform is Platform.PROXMOX:
        guests = view.fact(host.name, "container.placement", PlacementFacts).running
    step = Step(
        action="reboot-host",
        object=Ref("Host", host.name),
        layer=layer,
        reason=reason,
        summary=f"reboot {host.name}: {why}",
        hosts=(host.name,),
        script=_naming(guests),
        args=(hashlib.sha256(why.encode()).hexdigest()[:16],),
        disrupts=(
            Disruption(Ref("Host", host.name), Permission.REBOOT_HOST),
            *(
                Disruption(_guest(view, host, cluster, kind, vmid), Permission.REBOOT_HOST)
                for kind, vmid in sorted(guests, key=lambda guest: guest[1])
            ),
        ),
        effect=effect,
    )
    return _refusal(host, units, cluster, step, why) or step


def _naming(guests: frozenset[tuple[str, int]]) -> Script:
    """The script, told who may be running. That is no argument: it is the same reboot, whoever runs."""
    named = " ".join(sorted(f"{kind}/{vmid}" for kind, vmid in guests))
    return Script(REBOOT.name, f"named=' {named} '\n{REBOOT.text}")


def _guest(view: View, host: Host, cluster: Cluster | None, kind: str, vmid: int) -> Ref:
    """A guest by its spec; one in no spec by its id and its host."""
    for container in view.specs.containers.values():
        near = container.host == host.name or (cluster is not None and cluster.member(container.host) is not None)
        if kind == "lxc" and container.id == vmid and near:
            return Ref("Container", container.name)
    return Ref("Guest", f"{vmid}@{host.name}")


def _refusal(host: Host, units: UnitFacts, cluster: Cluster | None, step: Step, why: str) -> Block | None:
    if host.ssh.connection is Connection.LOCAL:
        return Block(
            NoReboot.CONTROLLER,
            f"the controller runs on {host.name}, which has to be rebooted: {why}",
            "reboot it yourself, or run the controller elsewhere",
        )
    if cluster is not None and cluster.members:
        left = sum(1 for member in cluster.members if member.online and member.name != host.name)
        if 2 * left <= len(cluster.members):
            return Block(
                NoReboot.QUORUM,
                f"without {host.name} {left} of {len(cluster.members)} nodes of its cluster are left: no quorum",
                "bring other nodes back first, or reboot it yourself when nothing else is done in the cluster",
            )
    last = units.step
    if last is not None and last.id == step.id and last.began is None and last.rc == 0:
        return Block(
            NoReboot.DID_NOT_HELP,
            f"{host.name} was rebooted for this already, and it is so again: {why}",
            f"look at `journalctl -b` on {host.name}",
        )
    return None
