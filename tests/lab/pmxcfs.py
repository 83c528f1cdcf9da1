"""The cluster file system of the lab's Proxmox hosts: what ``/etc/pve`` is on each of them.

One process serves one mount per node, as if each node ran a pmxcfs and corosync carried the writes between them.
The rules are those of pve-cluster 8.1 (src/pmxcfs: memdb.c, dcdb.c, status.c, pmxcfs.c, cfs-plug-*.c):

- a write needs quorum, else EACCES, and modes lose their w bits;
- a guest's configuration exists once in the cluster: a second one under the same id is EEXIST, except by a rename
  of that very id, which moves the guest; a rename replaces what is there, another guest's file too;
- a file has at most 1 MiB (EFBIG); no links (ENOSYS); chmod and chown accept only what is so already (EPERM);
- ``local``, ``lxc``, ``qemu-server``, ``openvz`` point into this node's own folder;
- nodes that meet again all take the copy with the highest version, which is the majority's.

Not played: the replicated locks under ``priv/lock`` never expire by themselves, and the kernel keeps no attributes
(the real one keeps them for a second).
"""

from __future__ import annotations

import argparse
import base64
import errno
import fnmatch
import json
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mfusepy

from tests.lab import control

MAX_FILE_SIZE = 1024 * 1024  # memdb.h: MEMDB_MAX_FILE_SIZE
BLOCK_SIZE = 4096
WWW_DATA = 33  # Debian's fixed number of the group www-data

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
    return mfusepy.FuseOSError(number)  # type: ignore[no-any-return]


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
        return {
            ".version": self._version,
            ".members": self._members,
            ".vmlist": self._vmlist,
            ".clusterlog": self._clusterlog,
            ".rrd": lambda _node: "",
            ".debug": lambda _node: "0\n",
        }[name](node)

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


class NodeMount(mfusepy.Operations):  # type: ignore[misc]
    """``/etc/pve`` of one node."""

    use_ns = True

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._node = cluster.nodes[name]
        self._links = {
            "local": f"nodes/{name}",
            "lxc": f"nodes/{name}/lxc",
            "qemu-server": f"nodes/{name}/qemu-server",
            "openvz": f"nodes/{name}/openvz",
        }

    def _begin(self, operation: str, path: str) -> str:
        name = path.lstrip("/")
        self._cluster.wait_if_hung(self._node.name, operation, name)
        return name

    def _change(self, operation: str, path: str) -> str:
        """Begin an operation that writes: it needs quorum, and a path that is no link or virtual file."""
        name = self._begin(operation, path)
        if name in self._links or name in VIRTUAL:
            raise refuse(errno.EACCES)
        if not self._cluster.is_quorate(self._node):
            raise refuse(errno.EACCES)
        return name

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        name = self._begin("getattr", path)
        with self._cluster.lock:
            quorate = self._cluster.is_quorate(self._node)
            size, mtime = 0, 0
            if name in self._links:
                mode = stat.S_IFLNK | (0o755 if quorate else 0o555)
            elif name in VIRTUAL:
                mode = stat.S_IFREG | (0o640 if name == ".debug" else 0o440)
                size = len(self._cluster.text_of(name, self._node))
            else:
                entry = self._node.tree.get(name)
                mtime = entry.mtime
                if entry.data is None:
                    mode = stat.S_IFDIR | (0o755 if quorate else 0o555)
                else:
                    mode = stat.S_IFREG | (0o640 if quorate else 0o440)
                    size = len(entry.data)
        if is_private(name):
            mode &= ~0o077
        return {
            "st_mode": mode,
            "st_nlink": 2 if stat.S_ISDIR(mode) else 1,
            "st_uid": 0,
            "st_gid": WWW_DATA,
            "st_size": size,
            "st_blocks": -(-size // BLOCK_SIZE),
            **dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), mtime * 10**9),
        }

    def readdir(self, path: str, fh: int) -> list[str]:
        name = self._begin("readdir", path)
        with self._cluster.lock:
            names = self._node.tree.names(name)
        return [".", "..", *([*self._links, *VIRTUAL] if not name else []), *names]

    def readlink(self, path: str) -> str:
        target = self._links.get(self._begin("readlink", path))
        if target is None:
            raise refuse(errno.EACCES)
        return target

    def open(self, path: str, flags: int) -> int:
        name = self._begin("open", path)
        if name not in VIRTUAL:
            with self._cluster.lock:
                self._node.tree.get(name)
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        name = self._begin("read", path)
        with self._cluster.lock:
            if name in VIRTUAL:
                data = self._cluster.text_of(name, self._node).encode()
            else:
                data = self._node.tree.get(name).data or b""
        return data[offset : offset + size]

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        name = self._change("create", path)
        with self._cluster.lock:
            self._node.tree.create(name)
        return 0

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        name = self._change("write", path)
        with self._cluster.lock:
            self._node.tree.write(name, data, offset)
        return len(data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        name = self._change("truncate", path)
        with self._cluster.lock:
            self._node.tree.truncate(name, length)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        name = self._change("mkdir", path)
        with self._cluster.lock:
            self._node.tree.mkdir(name)
        return 0

    def unlink(self, path: str) -> int:
        name = self._change("unlink", path)
        with self._cluster.lock:
            self._node.tree.remove(name)
        return 0

    def rmdir(self, path: str) -> int:
        return self.unlink(path)

    def rename(self, old: str, new: str) -> int:
        old_name, new_name = self._change("rename", old), self._change("rename", new)
        with self._cluster.lock:
            self._node.tree.rename(old_name, new_name)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        name = self._change("utimens", path)
        with self._cluster.lock:
            self._node.tree.touch(name, times[1] // 10**9 if times else int(time.time()))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        name = self._begin("chmod", path)
        if stat.S_IMODE(mode) != (0o600 if is_private(name) else 0o640):
            raise refuse(errno.EPERM)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        self._begin("chown", path)
        unchanged = (-1, 0xFFFFFFFF)
        if uid not in (0, *unchanged) or gid not in (WWW_DATA, *unchanged):
            raise refuse(errno.EPERM)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        with self._cluster.lock:
            entries = self._node.tree.entries
            used = sum(len(entry.data or b"") for entry in entries.values())
        blocks, inodes = 128 * 1024 * 1024 // BLOCK_SIZE, 256 * 1024
        free = blocks - -(-used // BLOCK_SIZE)
        return {
            "f_bsize": BLOCK_SIZE,
            "f_frsize": BLOCK_SIZE,
            "f_blocks": blocks,
            "f_bfree": free,
            "f_bavail": free,
            "f_files": inodes,
            "f_ffree": inodes - len(entries),
            "f_favail": inodes - len(entries),
            "f_namemax": 256,
        }


def answer(cluster: Cluster, request: control.Request) -> Any:
    """Do what a line on the control socket asks: see README.md, "Control of the cluster"."""
    match request["op"]:
        case "power":
            if request["host"] in cluster.nodes:
                cluster.set_power(request["host"], request["on"])
        case "partition":
            cluster.part(request["sides"])
        case "reset":
            cluster.reset(decoded(request["files"]))
        case "hang":
            cluster.hang(request["host"], request["path"], request["operations"])
        case "release":
            cluster.release(request.get("host"))
        case "state":
            return {
                name: {"online": node.online, "quorate": cluster.is_quorate(node), "version": node.tree.version}
                for name, node in cluster.nodes.items()
            }
        case other:
            raise ValueError(f"no such operation: {other}")
    return None


def encoded(files: dict[str, bytes]) -> dict[str, str]:
    """Write files for JSON."""
    return {path: base64.b64encode(data).decode() for path, data in files.items()}


def decoded(files: dict[str, str]) -> dict[str, bytes]:
    """Read files from JSON."""
    return {path: base64.b64decode(data) for path, data in files.items()}


def serve(cluster: Cluster, state: Path) -> None:
    """Mount ``state/pve/NODE`` for each node and serve until the process is ended."""
    mounts = []
    for name in cluster.nodes:
        mountpoint = state / "pve" / name
        mountpoint.mkdir(parents=True, exist_ok=True)
        options = {
            "foreground": True,
            "allow_other": True,
            "default_permissions": True,
            "direct_io": True,
            "hard_remove": True,
            "attr_timeout": 0,
            "entry_timeout": 0,
            "fsname": "/dev/fuse",
        }
        mount = threading.Thread(
            target=mfusepy.FUSE, args=(NodeMount(cluster, name), str(mountpoint)), kwargs=options, name=name
        )
        mount.start()
        mounts.append(mount)
    control.serve(state / "control/pmxcfs.sock", lambda request: answer(cluster, request))
    for mount in mounts:
        mount.join()


def main() -> None:
    """Serve the cluster that a JSON file on standard input describes: name, nodes (name to address), files."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--state", type=Path, required=True, help="the lab's state directory")
    arguments = parser.parse_args()
    wanted = json.load(sys.stdin)
    os.umask(0o027)
    serve(Cluster(wanted["name"], wanted["nodes"], decoded(wanted["files"])), arguments.state)


if __name__ == "__main__":
    main()
