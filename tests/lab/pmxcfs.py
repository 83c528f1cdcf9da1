"""``/etc/pve`` of the lab's Proxmox hosts, as a file system.

One process serves one mount per node, as if each node ran a pmxcfs and corosync carried the writes between them.
``cluster.py`` has the rules of the content. Of the file system itself (pve-cluster 8.1, src/pmxcfs: pmxcfs.c,
cfs-plug-*.c):

- a write needs quorum, else EACCES, and modes lose their w bits;
- no links (ENOSYS); chmod and chown accept only what is so already (EPERM);
- ``local``, ``lxc``, ``qemu-server``, ``openvz`` point into this node's own folder.

One difference: the kernel keeps no attributes; of the real one it keeps them for a second.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mfusepy  # type: ignore[import-untyped,unused-ignore]

from tests.lab import control
from tests.lab.cluster import VIRTUAL, Cluster, decoded, is_private, refuse

BLOCK_SIZE = 4096
WWW_DATA = 33  # Debian's fixed number of the group www-data


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
