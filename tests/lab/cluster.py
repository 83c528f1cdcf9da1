"""The rules of the lab's cluster: what pmxcfs makes of a write, a rename, a lost node.

They are those of pve-cluster 8.1 (src/pmxcfs: memdb.c, dcdb.c, status.c, pmxcfs.c, cfs-utils.c):

- a guest's configuration exists once in the cluster: a second one under the same id is EEXIST, except by a rename
  of that very id, which moves the guest; a rename replaces what is there, another guest's file too;
- a file has at most 1 MiB (EFBIG);
- nodes that meet again all take the copy with the highest version, which is the majority's.

``pmxcfs.py`` shows this as a file system. Not played: locks under ``priv/lock`` never expire by themselves.
"""

from __future__ import annotations

import base64
import errno
import fnmatch
import os
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

MAX_FILE_SIZE = 1024 * 1024  # memdb.h: MEMDB_MAX_FILE_SIZE

VIRTUAL = (".version", ".members", ".vmlist", ".rrd", ".clusterlog", ".debug")
# status.c: the files whose changes ``.version`` counts
WATCHED = (
    "corosync.conf",
    "corosync.conf.new",
    "storage.cfg",
    "user.cfg",
    "domains.cfg",
    "priv/shadow.cfg",
    "datacenter.cfg",
    "vzdump.cron",
    "ha/crm_commands",
    "ha/manager_status",
    "ha/resources.cfg",
    "ha/groups.cfg",
    "ha/fence.cfg",
    "status.cfg",
    "replication.cfg",
)
GUEST_CONFIG = re.compile(r"nodes/([A-Za-z0-9][A-Za-z0-9-]*)/(qemu-server|openvz|lxc)/([1-9][0-9]*)\.conf")
GUEST_TYPE = {"qemu-server": "qemu", "openvz": "openvz", "lxc": "lxc"}


def refuse(number: int) -> OSError:
    """Return the error that makes an operation fail with this errno."""
    return OSError(number, os.strerror(number))


@dataclass
class Entry:
    """A file, or a folder when it has no data."""

    data: bytes | None
    mtime: int


@dataclass(frozen=True)
class Guest:
    """An entry of ``.vmlist``."""

    id: int
    node: str
    type: str


def guest_of(path: str) -> Guest | None:
    """Say whose configuration a path is, if it is one (memdb.c: path_contain_vm_config)."""
    match = GUEST_CONFIG.fullmatch(path)
    return Guest(int(match[3]), match[1], GUEST_TYPE[match[2]]) if match else None


def is_private(path: str) -> bool:
    """Tell what only root may read (cfs-utils.c: path_is_private)."""
    return re.match(r"(nodes/[^/]*/)?priv(/|$)", path) is not None


class Tree:
    """One copy of the configuration: nodes that are in contact share one. Paths have no leading slash."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        self.entries = {"": Entry(None, int(time.time())), **entries}
        self.version = 1
        self.changes = dict.fromkeys(WATCHED, 0)
        self.guests: dict[int, tuple[Guest, int]] = {}
        self.guests_version = 0
        for path in self.entries:
            if guest := guest_of(path):
                self._register(guest)

    @classmethod
    def of_files(cls, files: dict[str, bytes], nodes: Iterable[str]) -> Tree:
        """Make a tree of files, with the folders that a new cluster has."""
        folders = {"priv", "priv/lock", "ha", "mapping", "firewall", "sdn", "nodes", "virtual-guest"}
        for node in nodes:
            folders |= {f"nodes/{node}/{name}" for name in ("", "lxc", "qemu-server", "openvz", "priv")}
        folders |= {str(parent) for path in files for parent in Path(path).parents} - {"."}
        now = int(time.time())
        entries = {folder.rstrip("/"): Entry(None, now) for folder in folders}
        entries |= {path: Entry(data, now) for path, data in files.items()}
        return cls(entries)

    def copy(self) -> Tree:
        """Return a copy that changes for itself from now on."""
        twin = Tree({path: Entry(entry.data, entry.mtime) for path, entry in self.entries.items()})
        twin.version = self.version
        twin.changes = dict(self.changes)
        twin.guests = dict(self.guests)
        twin.guests_version = self.guests_version
        return twin

    def get(self, path: str) -> Entry:
        """Return an entry, or fail with ENOENT."""
        entry = self.entries.get(path)
        if entry is None:
            raise refuse(errno.ENOENT)
        return entry

    def names(self, path: str) -> list[str]:
        """List a folder."""
        if self.get(path).data is not None:
            raise refuse(errno.ENOTDIR)
        prefix = f"{path}/" if path else ""
        return [
            name[len(prefix) :]
            for name in self.entries
            if name and name.startswith(prefix) and "/" not in name[len(prefix) :]
        ]

    def create(self, path: str) -> None:
        """Make an empty file (memdb.c: memdb_pwrite with create)."""
        self._need_folder(path)
        guest = guest_of(path)
        if guest and self._is_elsewhere(guest):
            raise refuse(errno.EEXIST)
        if path in self.entries:
            raise refuse(errno.EEXIST)
        self._put(path, b"")

    def write(self, path: str, data: bytes, offset: int) -> None:
        """Write into a file that is there."""
        if offset + len(data) > MAX_FILE_SIZE:
            raise refuse(errno.EFBIG)
        old = self._file(path)
        self._put(path, old[:offset].ljust(offset, b"\0") + data + old[offset + len(data) :])

    def truncate(self, path: str, size: int) -> None:
        """Cut a file, or lengthen it with zeros."""
        if size > MAX_FILE_SIZE:
            raise refuse(errno.EFBIG)
        self._put(path, self._file(path)[:size].ljust(size, b"\0"))

    def mkdir(self, path: str) -> None:
        """Make a folder."""
        self._need_folder(path)
        if path in self.entries:
            raise refuse(errno.EEXIST)
        self._changed(path)
        self.entries[path] = Entry(None, int(time.time()))

    def remove(self, path: str) -> None:
        """Remove a file or an empty folder."""
        if self.get(path).data is None and self.names(path):
            raise refuse(errno.ENOTEMPTY)
        self._changed(path)
        del self.entries[path]
        if guest := guest_of(path):
            self._forget(guest.id)

    def rename(self, old: str, new: str) -> None:
        """Move a file or an empty folder over whatever is at its new place (memdb.c: memdb_rename)."""
        entry = self.get(old)
        moved, placed = guest_of(old), guest_of(new)
        is_file = entry.data is not None
        same_id = moved is not None and placed is not None and moved.id == placed.id
        if is_file and placed and self._is_elsewhere(placed) and not same_id:
            raise refuse(errno.EEXIST)
        if not is_file and (old.startswith("priv/lock/") or self.names(old)):
            raise refuse(errno.EACCES if old.startswith("priv/lock/") else errno.ENOTEMPTY)
        if new in self.entries:
            if self.entries[new].data is None and self.names(new):
                raise refuse(errno.ENOTEMPTY)
            del self.entries[new]
        else:
            self._need_folder(new)
        del self.entries[old]
        self._changed(old)
        self._changed(new)
        self.entries[new] = Entry(entry.data, int(time.time()))
        if is_file and moved:
            self._forget(moved.id)
        if is_file and placed:
            self._register(placed)

    def touch(self, path: str, mtime: int) -> None:
        """Set a time. A lock's time only grows (utime(0, 0) asks for its release)."""
        entry = self.get(path)
        if path.startswith("priv/lock/") and entry.data is None and mtime < entry.mtime:
            raise refuse(errno.EACCES)
        self._changed(path)
        entry.mtime = mtime

    def _file(self, path: str) -> bytes:
        guest = guest_of(path)
        if guest and self._is_elsewhere(guest):
            raise refuse(errno.EEXIST)
        data = self.get(path).data
        if data is None:
            raise refuse(errno.ENOTDIR)
        return data

    def _put(self, path: str, data: bytes) -> None:
        self._changed(path)
        self.entries[path] = Entry(data, int(time.time()))
        if guest := guest_of(path):
            self._register(guest)

    def _need_folder(self, path: str) -> None:
        if self.get(path.rpartition("/")[0]).data is not None:
            raise refuse(errno.ENOTDIR)

    def _changed(self, path: str) -> None:
        self.version += 1
        if path in self.changes:
            self.changes[path] += 1

    def _is_elsewhere(self, guest: Guest) -> bool:
        known = self.guests.get(guest.id)
        return known is not None and known[0] != guest

    def _register(self, guest: Guest) -> None:
        self.guests_version += 1
        self.guests[guest.id] = (guest, self.guests_version)

    def _forget(self, guest_id: int) -> None:
        self.guests_version += 1
        self.guests.pop(guest_id, None)


@dataclass
class Node:
    """A member of the cluster."""

    name: str
    id: int
    ip: str
    tree: Tree
    online: bool = False
    side: int = 0  # of a parted network; 0 when it is whole


@dataclass
class Hang:
    """Operations that do not come back until they are let go."""

    node: str
    path: str  # a shell pattern
    operations: tuple[str, ...]
    over: threading.Event = field(default_factory=threading.Event)


class Cluster:
    """All nodes, who is in contact with whom, and each one's copy of the tree."""

    def __init__(self, name: str, nodes: dict[str, str], files: dict[str, bytes]) -> None:
        self.name = name
        self.lock = threading.RLock()
        self.start_time = int(time.time())
        self.membership_version = 1
        self.hangs: list[Hang] = []
        tree = Tree.of_files(files, nodes)
        self.nodes = {
            name: Node(name, number, ip, tree.copy()) for number, (name, ip) in enumerate(nodes.items(), start=1)
        }

    def members(self, node: Node) -> list[Node]:
        """Return the nodes that a node is in contact with, itself included."""
        return [other for other in self.nodes.values() if other.online and node.online and other.side == node.side]

    def is_quorate(self, node: Node) -> bool:
        """Say whether more than half of all nodes are in contact with this one."""
        return 2 * len(self.members(node)) > len(self.nodes)

    def set_power(self, name: str, on: bool) -> None:
        """Let a node join or leave. What hung on a node that leaves is let go."""
        with self.lock:
            self.nodes[name].online = on
            self._meet()
        if not on:
            self.release(name)

    def part(self, sides: list[list[str]]) -> None:
        """Part the network between groups of nodes; a node in no group is alone with the others in none."""
        with self.lock:
            for node in self.nodes.values():
                node.side = next((number for number, names in enumerate(sides, start=1) if node.name in names), 0)
            self._meet()

    def reset(self, files: dict[str, bytes]) -> None:
        """Give every node the same new content, the hung operations let go."""
        with self.lock:
            version = max(node.tree.version for node in self.nodes.values())
            for node in self.nodes.values():
                node.tree = Tree.of_files(files, self.nodes)
                node.tree.version = version + 1
            self._meet()
        self.release()

    def hang(self, node: str, path: str, operations: list[str]) -> None:
        """Let operations on matching paths of a node's mount block from now on."""
        self.hangs.append(Hang(node, path, tuple(operations)))

    def release(self, node: str | None = None) -> None:
        """Let go what hangs, on one node or on all."""
        for hang in [hang for hang in self.hangs if node in (None, hang.node)]:
            self.hangs.remove(hang)
            hang.over.set()

    def wait_if_hung(self, node: str, operation: str, path: str) -> None:
        """Block for as long as a fault says so."""
        for hang in list(self.hangs):
            if hang.node == node and operation in hang.operations and fnmatch.fnmatch(path, hang.path):
                hang.over.wait()

    def _meet(self) -> None:
        """Give nodes in contact one tree, the newest of theirs, and every other node one of its own."""
        self.membership_version += 1
        trees = {
            node.name: max((member.tree for member in self.members(node) or [node]), key=lambda tree: tree.version)
            for node in self.nodes.values()
        }
        shared: dict[tuple[str, ...], Tree] = {}
        for node in self.nodes.values():
            group = tuple(member.name for member in self.members(node)) or (node.name,)
            node.tree = shared.setdefault(group, trees[node.name].copy())

    # What the virtual files say. The real ones are written by printf, with these line breaks (status.c).

    def text_of(self, name: str, node: Node) -> str:
        """Return the content of a virtual file as a node sees it."""
        match name:
            case ".version":
                return self._version(node)
            case ".members":
                return self._members(node)
            case ".vmlist":
                return self._vmlist(node)
            case ".clusterlog":
                return self._clusterlog(node)
            case ".debug":
                return "0\n"
        return ""  # .rrd: nobody measures here

    def _members(self, node: Node) -> str:
        present = self.members(node)
        nodelist = ",\n".join(
            f'  "{other.name}": {{ "id": {other.id}, "online": {int(other in present)}, "ip": "{other.ip}"}}'
            for other in self.nodes.values()
        )
        return (
            f'{{\n"nodename": "{node.name}",\n"version": {self.membership_version},\n'
            f'"cluster": {{ "name": "{self.name}", "version": {len(self.nodes)}, '
            f'"nodes": {len(self.nodes)}, "quorate": {int(self.is_quorate(node))} }},\n'
            f'"nodelist": {{\n{nodelist}\n  }}\n}}\n'
        )

    def _vmlist(self, node: Node) -> str:
        tree = node.tree
        if not tree.guests:
            return f'{{\n"version": {tree.guests_version}\n}}\n'
        ids = ",\n".join(
            f'"{guest.id}": {{ "node": "{guest.node}", "type": "{guest.type}", "version": {version} }}'
            for guest, version in tree.guests.values()
        )
        return f'{{\n"version": {tree.guests_version},\n"ids": {{\n{ids}}}\n\n}}\n'

    def _version(self, node: Node) -> str:
        tree = node.tree
        changes = "".join(f'"{path}": {version},\n' for path, version in tree.changes.items())
        return (
            f'{{\n"starttime": {self.start_time},\n"clinfo": {self.membership_version},\n'
            f'"vmlist": {tree.guests_version},\n{changes}"kvstore": {{\n"{node.name}": {{\n}}\n}}\n}}\n'
        )

    def _clusterlog(self, node: Node) -> str:
        return (
            f'{{\n"data": [\n{{"uid": 1, "time": {self.start_time}, "pri": 6, "tag": "cluster", "pid": 1, '
            f'"node": "{node.name}", "user": "root", "msg": "starting cluster log"}}\n]\n}}\n'
        )


def encoded(files: dict[str, bytes]) -> dict[str, str]:
    """Write files for JSON."""
    return {path: base64.b64encode(data).decode() for path, data in files.items()}


def decoded(files: dict[str, str]) -> dict[str, bytes]:
    """Read files from JSON."""
    return {path: base64.b64decode(data) for path, data in files.items()}
