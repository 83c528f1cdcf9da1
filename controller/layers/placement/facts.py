"""What runs on a Proxmox node, which storages its cluster has, and who has the disks of a node that is not online."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from controller.facts.words import ParseError, Section, Unknown
from controller.layers.shared.volumes import Volume

_SHARED = frozenset({"iscsi", "nfs", "cifs", "rbd", "cephfs", "iscsidirect", "glusterfs", "zfs", "drbd", "pbs"})
"""The kinds of storage that are the same on every node (pve-storage 8, PVE/Storage/Plugin.pm: SHARED_STORAGE)."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A section of storage.cfg. ``nodes`` are those that have it, empty for all; ``content`` is empty when not said."""

    name: str
    kind: str
    shared: bool
    nodes: tuple[str, ...] = ()
    disabled: bool = False
    content: tuple[str, ...] = ()

    def is_on(self, node: str) -> bool:
        """Whether the node can use it."""
        return not self.disabled and (not self.nodes or node in self.nodes)


@dataclass(frozen=True, slots=True)
class Image:
    """An RBD image of a container, and the addresses of those who watch it: who has it mapped watches it."""

    guest: int
    storage: str
    name: str
    watchers: tuple[str, ...] | Unknown


@dataclass(frozen=True, slots=True)
class PlacementFacts:
    """``running`` are (kind, id) of every guest that runs on the node, in specs or not.

    ``images`` are asked for only of containers of interest whose config lies on a node that is not online.
    """

    running: frozenset[tuple[str, int]]
    storages: tuple[Storage, ...]
    images: tuple[Image, ...] = ()

    def storage(self, name: str) -> Storage | None:
        """The storage of that name."""
        return next((s for s in self.storages if s.name == name), None)

    def watchers(self, guest: int, volume: Volume) -> tuple[str, ...] | Unknown:
        """Who watches an RBD image; Unknown when that was not asked or not answered, which is not "nobody"."""
        for image in self.images:
            if (image.guest, image.storage, image.name) == (guest, volume.storage, volume.name):
                return image.watchers
        return Unknown("not-asked", f"Ceph was not asked who has {volume}")


_HEADER = re.compile(r"([a-z][a-z0-9]*):\s*(\S+)\s*")
_OPTION = re.compile(r"\s+(\S+)(?:\s+(.*?))?\s*")
_EXIT = re.compile(r"exit (\d+)")


def parse(section: Section) -> PlacementFacts:
    """Read the section's text. Raises ParseError."""
    plain, mark, config = section.out.partition("==storage\n")
    if not mark:
        raise ParseError("cut-off", "the list of what runs has no end")
    running: set[tuple[str, int]] = set()
    asked: dict[tuple[int, str, str], list[str]] = {}
    said: list[str] = []
    for line in plain.splitlines():
        kind, _, rest = line.partition("|")
        match kind:
            case "runs":
                what, _, vmid = rest.partition("|")
                running.add((what, int(vmid)))
            case "image":
                vmid, storage, name = rest.split("|", 2)
                said = asked.setdefault((int(vmid), storage, name), [])
            case "said":
                said.append(rest)
            case _:
                raise ParseError("garbage", f"cannot read {line[:100]!r}")
    images = tuple(Image(*image, watchers=_watchers(image[2], lines)) for image, lines in asked.items())
    return PlacementFacts(frozenset(running), _storages(config), images)


def _watchers(image: str, lines: list[str]) -> tuple[str, ...] | Unknown:
    first, body = (lines or [""])[0], "\n".join(lines[1:])
    if first.startswith("hung"):
        return Unknown("ceph-hangs", f"`rbd status {image}` does not come back")
    ended = _EXIT.fullmatch(first)
    if ended is None or ended[1] != "0":
        return Unknown("ceph-failed", f"`rbd status {image}` failed ({first}): {' '.join(body.split())[:200]}")
    try:
        found = json.loads(body)["watchers"]
        # a list since Ceph 13; a mapping with the watchers under names before
        each = found.values() if isinstance(found, dict) else found
        return tuple(sorted(str(watcher["address"]) for watcher in each))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Unknown("ceph-failed", f"`rbd status {image}` answered {' '.join(body.split())[:200]!r}")


def _storages(config: str) -> tuple[Storage, ...]:
    """The sections of storage.cfg. ``local`` is there in any case (PVE/Storage/Plugin.pm: parse_config)."""
    found: dict[str, Storage] = {"local": Storage("local", "dir", shared=False)}
    name, kind, options = "", "", dict[str, str]()
    for line in (*config.split("\n"), "end: of-file"):
        if header := _HEADER.fullmatch(line):
            if name:
                found[name] = _storage(name, kind, options)
            kind, name, options = header[1], header[2], {}
        elif option := _OPTION.fullmatch(line):
            options[option[1]] = option[2] or ""
    return tuple(found.values())


def _storage(name: str, kind: str, options: Mapping[str, str]) -> Storage:
    return Storage(
        name,
        kind,
        shared=kind in _SHARED or options.get("shared") == "1",
        nodes=_list(options.get("nodes", "")),
        disabled=options.get("disable", "0") != "0",
        content=_list(options.get("content", "")),
    )


def _list(text: str) -> tuple[str, ...]:
    return tuple(sorted(part for part in re.split(r"[,;\s]+", text) if part))
