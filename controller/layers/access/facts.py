"""Who answers on a host, and what its cluster looks like from there."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from controller.facts.words import ParseError, Section


@dataclass(frozen=True, slots=True)
class Member:
    """A node of the cluster as ``/etc/pve/.members`` lists it."""

    name: str
    online: bool
    ip: str


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster as one member sees it.

    ``guests`` maps each guest's id to (node, ``lxc`` or ``qemu``); ids are unique over the cluster. ``ha`` holds the
    ids of guests that HA manages. A node that is in no cluster is quorate alone, with no name.
    """

    node: str
    name: str
    quorate: bool
    members: tuple[Member, ...]
    guests: tuple[tuple[int, str, str], ...]
    ha: frozenset[int]

    def member(self, name: str) -> Member | None:
        """The member of that name."""
        return next((m for m in self.members if m.name == name), None)

    def node_of(self, guest: int) -> str | None:
        """The node that holds the guest's config file."""
        return next((node for vmid, node, _ in self.guests if vmid == guest), None)


@dataclass(frozen=True, slots=True)
class AccessFacts:
    """Who answers: the user's id, the host's name, its running kernel and architecture (``uname -m``)."""

    uid: int
    hostname: str
    kernel: str
    arch: str
    missing_tools: tuple[str, ...]
    cluster: Cluster | None


_HA_SECTION = re.compile(r"^(?:ct|vm):\s*(\d+)\s*$", re.MULTILINE)


def parse(section: Section) -> AccessFacts:
    """Read the section's text. Raises ParseError."""
    plain, _, pve = section.out.partition("==members\n")
    fields: dict[str, str] = {}
    missing: list[str] = []
    for line in plain.splitlines():
        key, _, value = line.partition(" ")
        if key == "missing":
            missing.append(value)
        else:
            fields[key] = value
    try:
        kernel, arch = fields["Linux"].split(" ")
        uid = int(fields["uid"])
    except (KeyError, ValueError):
        raise ParseError("garbage", f"no user id and kernel in {plain[:80]!r}") from None
    cluster = _cluster(pve, fields.get("hostname", "")) if pve else None
    return AccessFacts(uid, fields.get("hostname", ""), kernel, arch, tuple(missing), cluster)


def _cluster(text: str, hostname: str) -> Cluster:
    members_text, mark, rest = text.partition("\n==vmlist\n")
    guests_text, mark_ha, ha_text = rest.partition("\n==ha\n")
    if not mark or not mark_ha:
        raise ParseError(
            "pve-unreadable", "the cluster file system (/etc/pve) could not be read: is pve-cluster running?"
        )
    try:
        members, guests = json.loads(members_text), json.loads(guests_text)
        nodes = members.get("nodelist", {})
        about = members.get("cluster")
        return Cluster(
            node=str(members.get("nodename", hostname)),
            name=str(about["name"]) if about else "",
            quorate=about is None or about["quorate"] == 1,
            members=tuple(
                Member(str(name), node["online"] == 1, str(node.get("ip", ""))) for name, node in sorted(nodes.items())
            ),
            guests=tuple(
                sorted((int(vmid), str(at["node"]), str(at["type"])) for vmid, at in guests.get("ids", {}).items())
            ),
            ha=frozenset(int(vmid) for vmid in _HA_SECTION.findall(ha_text)),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ParseError("pve-unreadable", f"cannot read /etc/pve/.members and .vmlist: {error!r}") from None
