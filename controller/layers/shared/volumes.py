r"""What a container's config mounts: volumes of storages, and directories, files or devices of the host.

The forms are those of pve-container 5 (PVE/LXC/Config.pm): ``rootfs`` and ``mp[n]`` are property strings whose default
key is ``volume``; its value says what it is: ``/dev/…`` a device, ``/…`` a bind mount, all else a volume. Raw
``lxc.mount.entry`` lines are LXC's own: source, target, file system, options; a blank in a path is ``\040``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from controller.layers.shared.lxc_devices import ENTRY
from controller.layers.shared.pve_conf import Settings

MOUNT_POINT = re.compile(r"mp(?:0|[1-9]\d*)", re.ASCII)
_DISK = re.compile(r"rootfs|(?:mp|unused)(?:0|[1-9]\d*)", re.ASCII)
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume of a storage: the key that names it, the storage, the volume's name there (``vm-129-disk-0``)."""

    key: str
    storage: str
    name: str

    def __str__(self) -> str:
        return f"{self.storage}:{self.name}"


@dataclass(frozen=True, slots=True)
class Bind:
    """A mount of something of the host's: the key that says so, where it is, where it is put inside.

    ``shared`` is Proxmox's mark "it is on every node", ``optional`` LXC's "it may be missing".
    """

    key: str
    value: str
    source: str
    target: str
    shared: bool = False
    optional: bool = False


def volumes(settings: Settings) -> tuple[Volume, ...]:
    """The volumes of a section, unused ones too, in order of their keys."""
    found = []
    for key in sorted(settings.keys):
        if _DISK.fullmatch(key):
            storage, colon, name = _properties(settings.text(key)).get("volume", "").partition(":")
            if colon and not storage.startswith("/"):
                found.append(Volume(key, storage, name))
    return tuple(found)


def binds(settings: Settings) -> tuple[Bind, ...]:
    """The mount points of a section that are no volumes, then its raw mounts of what the host has."""
    points = (point(key, settings.text(key)) for key in sorted(settings.keys) if MOUNT_POINT.fullmatch(key))
    entries = (entry(value) for key, value in settings.lxc if key == ENTRY)
    return tuple(found for found in (*points, *entries) if found is not None)


def point(key: str, value: str) -> Bind | None:
    """A mount point that is no volume."""
    options = _properties(value)
    source = options.get("volume", "")
    if not source.startswith("/"):
        return None
    return Bind(key, value, source, _inside(options.get("mp", "")), shared=options.get("shared") == "1")


def entry(value: str) -> Bind | None:
    """A raw mount of something of the host's; None for file systems without a path (tmpfs, server:/path)."""
    fields = value.split()
    if len(fields) < 2 or not fields[0].startswith("/"):
        return None
    options = fields[3].split(",") if len(fields) > 3 else []
    return Bind(ENTRY, value, _unescaped(fields[0]), _inside(_unescaped(fields[1])), optional="optional" in options)


def _properties(value: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in _parts(value):
        key, equals, rest = part.partition("=")
        if equals:
            found[key] = rest
        else:
            found["volume"] = part
    return found


def _parts(value: str) -> Iterator[str]:
    return (part.strip() for part in value.split(","))


def _inside(path: str) -> str:
    """A target as people and specs write it: absolute (LXC's are relative to the root), without a last slash."""
    return "/" + path.strip("/")


def _unescaped(path: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), path)
