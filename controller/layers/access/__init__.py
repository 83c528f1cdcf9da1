"""host.access: SSH answers with the pinned key, rights suffice, the cluster is quorate. Reported, never made."""

from __future__ import annotations

from enum import StrEnum

from controller.core.package import text
from controller.core.view import View
from controller.core.words import Block, Drift, Gate, InSync, Layer, Skipped, Verdict
from controller.layers.access.facts import AccessFacts, parse
from controller.spec.model import Host


class Reason(StrEnum):
    """Why a host cannot be worked on."""

    NOT_ROOT = "not-root"
    TOOLS_MISSING = "tools-missing"
    NO_QUORUM = "no-quorum"
    NOT_PROXMOX = "not-proxmox"
    OTHER_HOST = "other-host"


def check(view: View, host: Host) -> Verdict:
    """Whether steps could be performed on the host at all."""
    if host.lifecycle == "decommissioned":
        return Skipped("decommissioned")
    facts = view.fact(host.name, "host.access", AccessFacts)
    if facts.uid != 0:
        return _stop(
            Reason.NOT_ROOT,
            f"commands run as uid {facts.uid} on {host.name}",
            "log in as root, or set `ssh: {sudo: true}` and allow that user sudo without a password",
        )
    if facts.missing_tools:
        tools = ", ".join(facts.missing_tools)
        return _stop(Reason.TOOLS_MISSING, f"{host.name} lacks {tools}", f"install what provides {tools}")
    if host.platform != "proxmox":
        return InSync()
    if facts.cluster is None:
        return _stop(
            Reason.NOT_PROXMOX,
            f"{host.name} has no /etc/pve",
            "start pve-cluster there, or write `platform: linux` if it is no Proxmox host",
        )
    if facts.cluster.node != host.name:
        return _stop(
            Reason.OTHER_HOST,
            f"the machine at {host.address} is the node {facts.cluster.node}, not {host.name}",
            "correct `address`, or give the Host the node's own name",
        )
    if not facts.cluster.quorate:
        return _stop(
            Reason.NO_QUORUM,
            f"{host.name} is in no quorate part of cluster {facts.cluster.name}",
            "bring the other nodes or the network between them back; look at `pvecm status`",
        )
    return InSync()


def _stop(reason: Reason, message: str, needs: str) -> Drift:
    return Drift(reason, message, Block(reason, message, needs))


LAYER = Layer(
    name="host.access",
    kind="Host",
    reasons=Reason,
    check=check,
    probe=text("controller.layers.access", "probe.sh"),
    parse=parse,
    gates=Gate.ALL,
)
