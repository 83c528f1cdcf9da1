"""Which PCI addresses the virtual machines of a node claim, whether they run or not.

The forms are those of qemu-server 8 (PVE/QemuServer/PCI.pm): ``hostpci[n]`` by address or by mapping, devices in
``args``, and the reservations of running VMs. Templates and pending changes count; a snapshot claims nothing until
somebody rolls back to it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from controller.layers.devices.facts import GuestFacts


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim: by whom, and an address with its function, or without it for all functions of the device."""

    by: str
    address: str

    def covers(self, pci: str) -> bool:
        """Whether a function at an address like 0000:4f:00.0 is claimed."""
        return pci == self.address or pci.startswith(self.address + ".")


_SECTION = re.compile(r"\[.*\]\s*")
_SETTING = re.compile(r"(hostpci\d+|args):\s*(.+?)\s*")
_ADDRESS = re.compile(r"(?:([0-9a-f]{4,}):)?([0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-9a-f])?)", re.IGNORECASE)
_ARGS = re.compile(r"vfio-pci\S*?,(?:host=|sysfsdev=/sys/bus/pci/devices/)([0-9a-fA-F:.]+)")


def claims(facts: GuestFacts) -> tuple[Claim, ...]:
    """Every claim of this node's VMs, in order of their ids."""
    mappings = dict(_mappings(facts.mappings, facts.node))
    found: list[Claim] = []
    for guest in facts.here("qemu"):
        for key, value in _settings(guest.text):
            by = f"VM {guest.id} ({key})"
            addresses = _ARGS.findall(value) if key == "args" else _host_addresses(value, mappings)
            found += [Claim(by, address) for text in addresses if (address := _normal(text))]
    found += [Claim(f"VM {vmid} (running)", a) for text, vmid in facts.reservations if (a := _normal(text))]
    return tuple(found)


def claimant(pcis: Iterable[str], of: Sequence[Claim]) -> str:
    """Who claims one of these functions, "" when nobody does."""
    wanted = tuple(pcis)
    return next((claim.by for claim in of if any(claim.covers(pci) for pci in wanted)), "")


def _settings(text: str) -> Iterator[tuple[str, str]]:
    """The settings of the main and the pending section that can claim a device."""
    counts = True
    for line in text.split("\n"):
        if _SECTION.fullmatch(line):
            counts = line.strip().upper() == "[PENDING]"
        elif counts and (match := _SETTING.fullmatch(line)):
            yield match[1], match[2]


def _host_addresses(value: str, mappings: dict[str, tuple[str, ...]]) -> list[str]:
    found: list[str] = []
    for part in value.split(","):
        name, equals, rest = part.partition("=")
        if not equals or name == "host":
            found += (rest if equals else part).split(";")
        elif name == "mapping":
            found += mappings.get(rest, ())
    return found


def _mappings(text: str, node: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each mapping's id and its paths on this node: a VM may take any of them."""
    name, paths = "", list[str]()
    for line in text.split("\n"):
        if line[:1].strip():
            if name:
                yield name, tuple(paths)
            name, paths = line.split(":")[-1].strip(), []
        elif line.strip().startswith("map "):
            entry = dict(part.split("=", 1) for part in line.strip()[4:].split(",") if "=" in part)
            if entry.get("node") == node:
                paths += entry.get("path", "").split(";")
    if name:
        yield name, tuple(paths)


def _normal(text: str) -> str:
    """An address as sysfs writes it. PVE drops one in upper case, but whoever wrote it means the card."""
    match = _ADDRESS.fullmatch(text)
    return f"{(match[1] or '0000')[-4:]}:{match[2]}".lower() if match else ""


def digest(facts: GuestFacts | None) -> str:
    """A digest of all that the claims of a node's VMs rest on, as a script on the host reckons it; "none" without VMs.

    It is of the configs' bytes in the order of their file names, and the mappings after them.
    """
    if facts is None:
        return "none"
    texts = [guest.text for guest in sorted(facts.here("qemu"), key=lambda guest: f"{guest.id}.conf")]
    return hashlib.sha256("".join((*texts, facts.mappings)).encode("utf-8", "surrogateescape")).hexdigest()
