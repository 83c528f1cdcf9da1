"""The storages of /etc/pve/storage.cfg, and the lab's "Ceph": a folder for each image, with who has it mapped.

An RBD image is a folder in /mnt/lab-rbd, which all Proxmox hosts of a lab share. Who maps one holds an flock on
/mnt/lab-rbd/.watchers/IMAGE/NODE for as long as it lives: a host that loses its power loses its watches, as Ceph's
clients do (there after half a minute). A folder of another storage lies in the host itself.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pvelab import ctconf
from pvelab.base import Die, members, node, path, read_cfs, split_list

RBD = "/mnt/lab-rbd"


@dataclass(frozen=True)
class Storage:
    """One section of storage.cfg."""

    name: str
    kind: str  # dir, rbd, zfspool, …
    options: Mapping[str, str]

    @property
    def shared(self) -> bool:
        """Whether every node sees the same: always so for RBD and other network storages, else by option."""
        return self.kind in ("rbd", "cephfs", "nfs", "cifs") or self.options.get("shared") == "1"

    @property
    def nodes(self) -> list[str]:
        """The nodes that it is for; empty for all."""
        return split_list(self.options.get("nodes", ""))

    @property
    def content(self) -> list[str]:
        """What may lie there."""
        return split_list(self.options.get("content", "images,rootdir"))

    @property
    def disabled(self) -> bool:
        """Whether it is switched off."""
        return "disable" in self.options

    def usable_on(self, host: str) -> bool:
        """Whether it is there for a node."""
        return not self.disabled and (not self.nodes or host in self.nodes)


def storages() -> dict[str, Storage]:
    """All storages by name; ``local`` is there even when the file does not name it."""
    found = {"local": Storage("local", "dir", {"path": "/var/lib/vz", "content": "iso,vztmpl,backup,rootdir"})}
    section: dict[str, str] = {}
    for line in (read_cfs("storage.cfg") or "").split("\n"):
        if header := re.match(r"([a-z][a-z0-9]*):\s*(\S+)\s*$", line):
            section = {}
            found[header[2]] = Storage(header[2], header[1], section)
        elif option := re.match(r"\s+(\S+)(?:\s+(.*?))?\s*$", line):
            section[option[1]] = option[2] or ""
    return found


def on_node(name: str, host: str) -> Storage:
    """A storage that a node can use, or what ``storage_check_node`` dies with."""
    storage = storages().get(name)
    if storage is None:
        raise Die(f"storage '{name}' does not exist")
    if storage.disabled:
        raise Die(f"storage '{name}' is disabled")
    if not storage.usable_on(host):
        raise Die(f"storage '{name}' is not available on node '{host}'")
    return storage


def split_volume(volume: str) -> tuple[str, str]:
    """Storage and name of "ceph-rbd:vm-129-disk-0"."""
    name, colon, rest = volume.partition(":")
    if not colon or not rest:
        raise Die(f"unable to parse volume ID '{volume}'")
    return name, rest


def folder(storage: Storage, name: str) -> Path:
    """Where a volume lies."""
    if storage.kind == "rbd":
        return path(f"{RBD}/{name}")
    if storage.kind == "dir":
        return path(f"{storage.options.get('path', '/var/lib/vz')}/images/{name}")
    return path(f"/var/lib/lab-storage/{storage.name}/{name}")


def activate(conf: Mapping[str, Any]) -> None:
    """Check that this node has every volume of a container: what ``activate_volumes`` fails with."""
    for _, volume in ctconf.volumes(conf):
        if volume["type"] != "volume":
            continue
        name, image = split_volume(str(volume["volume"]))
        storage = on_node(name, node())
        if folder(storage, image).is_dir():
            continue
        if storage.kind == "rbd":
            raise Die(
                f"can't map rbd volume {image}: rbd: sysfs write failed\n"
                f"rbd: error opening image {image}: (2) No such file or directory"
            )
        raise Die(f"volume '{volume['volume']}' does not exist")


def images(conf: Mapping[str, Any]) -> list[str]:
    """The RBD images of a container."""
    found = []
    for _, volume in ctconf.volumes(conf):
        if volume["type"] == "volume":
            name, image = split_volume(str(volume["volume"]))
            if storages().get(name, Storage("", "", {})).kind == "rbd":
                found.append(image)
    return found


def pool() -> str:
    """The pool of the first RBD storage."""
    return next((it.options.get("pool", "rbd") for it in storages().values() if it.kind == "rbd"), "rbd")


# Who has an image


@dataclass(frozen=True)
class Watcher:
    """One mapping of an image by a node, as ``rbd status`` shows it."""

    node: str
    address: str
    client: int
    cookie: int
    pid: int


def _watch_file(image: str, host: str) -> Path:
    return path(f"{RBD}/.watchers/{image}/{host}")


def map_image(image: str) -> None:
    """Map an image on this node: from now on it is watched, until ``unmap_image`` or the end of the holder.

    The holder is a process of its own, in the control group of whoever maps: the container's unit.
    """
    file = _watch_file(image, node())
    file.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return  # mapped already
    holder = subprocess.Popen(
        ["sleep", "infinity"],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    address = members().get(node(), {}).get("ip", "127.0.0.1")
    client, cookie = zlib.crc32(f"{node()}{image}".encode()) % 90000 + 4100, 18446462598732840960 + holder.pid % 600
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{node()} {address} {client} {cookie} {holder.pid}\n".encode(), 0)
    os.close(fd)


def unmap_image(image: str) -> None:
    """End this node's watch of an image."""
    for watcher in watchers(image):
        if watcher.node == node() and watcher.pid:
            with suppress(ProcessLookupError):
                os.kill(watcher.pid, signal.SIGKILL)
            while any(it.node == node() for it in watchers(image)):
                time.sleep(0.01)
    with suppress(FileNotFoundError):
        _watch_file(image, node()).unlink()


def watchers(image: str) -> list[Watcher]:
    """Who watches an image now, on whatever node. A file that nobody locks is left over from a lost power."""
    found = []
    files = path(f"{RBD}/.watchers/{image}")
    for file in sorted(files.iterdir()) if files.is_dir() else []:
        with suppress(FileNotFoundError):
            if _is_held(file):
                name, address, client, cookie, pid = (file.read_text().split() + ["0"] * 5)[:5]
                found.append(Watcher(name, address, int(client), int(cookie), int(pid)))
    return found


def mapped() -> list[str]:
    """The images that this node has mapped."""
    top = path(f"{RBD}/.watchers")
    return [
        images_.name
        for images_ in (sorted(top.iterdir()) if top.is_dir() else [])
        if any(watcher.node == node() for watcher in watchers(images_.name))
    ]


def _is_held(file: Path) -> bool:
    with _open(file) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def _open(file: Path) -> Iterator[int]:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
