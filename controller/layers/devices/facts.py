"""The guests of a Proxmox node as their config files tell, and those of nodes that are not online."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from controller.facts.files import read_files
from controller.facts.words import Later, ParseError, Section


@dataclass(frozen=True, slots=True)
class Guest:
    """A guest's config file. ``kind`` is ``lxc`` or ``qemu``; ``text`` its bytes, those outside UTF-8 as surrogates.

    ``edited`` is set in a prediction only: an edit whose text is known after that step.
    """

    kind: str
    id: int
    node: str
    text: str
    edited: Later | None = None

    @property
    def sha256(self) -> str:
        """The digest that a script compares before it replaces the file."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class GuestFacts:
    """What the config files on one node say.

    ``cgroup2`` is whether the host has the pure cgroup v2 tree that LXC's device rules by ``lxc.cgroup2`` need.
    ``guests`` are this node's, and those of nodes that are not online. ``mappings`` is the text of
    ``mapping/pci.cfg``, ``reservations`` the (address, VM id) that running VMs hold, ``drivers`` the host's character
    majors and the first name that each is registered under.
    """

    node: str
    cgroup2: bool
    guests: tuple[Guest, ...]
    mappings: str = ""
    reservations: tuple[tuple[str, int], ...] = ()
    drivers: tuple[tuple[int, str], ...] = ()

    def container(self, vmid: int) -> Guest | None:
        """The container of that id on this very node."""
        return next((g for g in self.guests if g.kind == "lxc" and g.id == vmid and g.node == self.node), None)

    def here(self, kind: str) -> tuple[Guest, ...]:
        """The guests of a kind whose config lies on this very node."""
        return tuple(g for g in self.guests if g.kind == kind and g.node == self.node)


_CONF = re.compile(r"/etc/pve/nodes/([^/]+)/(lxc|qemu-server)/([1-9]\d*)\.conf")


def parse(section: Section) -> GuestFacts:
    """Read the section's text. Raises ParseError."""
    plain, mark, rest = section.out.partition("==files\n")
    fields: dict[str, str] = {}
    reservations: list[tuple[str, int]] = []
    drivers: dict[int, str] = {}
    for line in plain.splitlines():
        key, _, value = line.partition(" ")
        if key == "reserved":
            address, _, vmid = value.partition(" ")
            reservations.append((address, int(vmid)))
        elif key == "character":
            major, _, name = value.partition(" ")
            drivers.setdefault(int(major), name)
        else:
            fields[key] = value
    if not mark or "node" not in fields or fields.get("cgroup") not in ("1", "2"):
        raise ParseError("garbage", f"no node, cgroup and files in {section.out[:80]!r}")
    guests: list[Guest] = []
    mappings = ""
    for path, file in read_files(rest).items():
        if match := _CONF.search(path):
            kind = "lxc" if match[2] == "lxc" else "qemu"
            guests.append(Guest(kind, int(match[3]), match[1], file.text))
        elif path.endswith("/mapping/pci.cfg"):
            mappings = file.text
    guests.sort(key=lambda guest: (guest.id, guest.node))
    return GuestFacts(
        fields["node"], fields["cgroup"] == "2", tuple(guests), mappings, tuple(reservations), tuple(drivers.items())
    )
