"""A lab: its hosts, its network, its file systems, and what a test may do to them.

    with Lab() as lab:
        lab.run("kpro5", "pct start 129")
        lab.power_off("kpro6")

Everything that a lab is lies under one state directory, ``ROOT/NAME``, and is named after the lab: the bridge, the
network cards, the control groups, the packet filter's table. So any number of labs live beside each other, and
``remove`` can take one away whose maker was killed.
"""

from __future__ import annotations

import base64
import ctypes.util
import fcntl
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from tests.lab import cluster, control, hosts, image, kmodules, packages

ROOT = Path(os.environ.get("RECONCILE_LAB_ROOT", "/var/tmp/reconcile-lab"))
CHECKOUT = Path(__file__).resolve().parents[2]
STANDINS = Path(__file__).resolve().parent / "standins"

NETWORK = "10.77"  # a lab has 10.77.N.0/24, the machine itself is .1 in it
CLAIMS = Path("/run/reconcile-lab.lock")  # held while a lab picks its network
PROGRAMS = ("lxc-start", "mmdebstrap", "fusermount", "nft", "ip", "ssh-keygen")

USR_BIN = ("kvm", "pvesh", "rbd")  # Proxmox' other programs are in /usr/sbin, as in its packages

# What differs from one look to the next although nobody did anything: see ``Lab.snapshot_tree``.
NOISE = re.compile(
    r"(etc/(mtab|resolv\.conf|machine-id|\.pwd\.lock)"
    r"|root/\.(bash_history|viminfo|lesshst)"
    r"|tmp/.*|var/(log|tmp|cache|spool)/.*"
    r"|var/lib/(systemd|dbus|apt|dpkg|lxcfs)/.*"
    r")"
)


class LabError(Exception):
    """The lab itself does not work: never the fault of what is tested in it."""


def missing() -> str | None:
    """Say what this machine lacks to run a lab, or None when it lacks nothing."""
    if os.geteuid() != 0:
        return "the lab needs root"
    if absent := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"the lab needs {', '.join(absent)}: run tests/lab/install-packages.sh"
    if ctypes.util.find_library("fuse") is None:
        return "the lab needs libfuse: run tests/lab/install-packages.sh"
    if not Path("/dev/fuse").exists():
        return "the lab needs /dev/fuse"
    return None


class Lab:
    """One lab. Made by ``start`` (or ``with``), gone after ``stop``, whatever happened in between.

    ``hosts`` describes the machines (``hosts.default()``), ``pve_files`` is the first content of ``/etc/pve`` by
    path (a cluster of no guests when left out). A volume ``ceph-rbd:NAME`` that a CT's configuration in it names
    is made, with a Debian in it. ``keep`` leaves the lab running when its maker ends.
    """

    def __init__(
        self,
        name: str | None = None,
        hosts: Mapping[str, hosts.Description] | None = None,
        pve_files: Mapping[str, bytes] | None = None,
        *,
        root: Path = ROOT,
        keep: bool = False,
    ) -> None:
        self.name = name or f"lab{secrets.token_hex(3)}"
        if not re.fullmatch(r"[a-z][a-z0-9]{0,9}", self.name):
            # the name of a network card has 15 characters at most
            raise LabError(f"cannot name a lab {self.name!r}: a lower case letter, then up to nine of a-z and 0-9")
        self.root = root
        self.state = root / self.name
        described = hosts or _default_hosts()
        self.hosts = {host: dict(described[host]) for host in sorted(described)}
        self.proxmox = [host for host, it in self.hosts.items() if it["platform"] == "proxmox"]
        self.pve_files = {**first_pve_files(self.proxmox), **(pve_files or {})}
        self.keep = keep
        self.subnet = 0
        self.client_key = self.state / "keys/client"  # the private key that root and ops of every host accept
        self.known_hosts = self.state / "known_hosts"
        self._trees = image.place(image.digest())
        self._init_pids: dict[str, int] = {}
        self._sides: list[list[str]] = []
        self._cut: set[str] = set()

    @classmethod
    def attach(cls, name: str, root: Path = ROOT) -> Self:
        """Take up a lab that runs already. It goes on running unless ``stop`` is called."""
        about = _about(root / name)
        if about is None:
            raise LabError(f"cannot find the lab {name} in {root}")
        lab = cls(name, about["hosts"], cluster.decoded(about["pve_files"]), root=root, keep=about["owner"] is None)
        lab.subnet = about["subnet"]
        lab._trees = image.place(about["image"])
        return lab

    # Life

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Bring the lab up: every host answers on its SSH port when this returns.

        Raises LabError (or the error of a program that failed), with nothing left behind.
        """
        if reason := missing():
            raise LabError(reason)
        sweep(self.root)
        self._trees = image.get()
        try:
            self._claim()
            self._make_keys()
            self._make_volumes()
            _in_parallel(self._make_host, self.hosts)
            self._start_file_systems()
            _in_parallel(self.power_on, self.hosts)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Take everything away that the lab made."""
        remove(self.state)

    def reset(self) -> None:
        """Put the lab back to its first state, by making it anew (two seconds). Addresses and keys change."""
        self.stop()
        self._init_pids.clear()
        self._sides = []
        self._cut.clear()
        self.start()

    # Where things are

    @property
    def bridge(self) -> str:
        """The network bridge that all hosts hang on."""
        return f"br-{self.name}"

    def address(self, host: str) -> str:
        """Return a host's address, reachable from this machine and from the other hosts."""
        return f"{NETWORK}.{self.subnet}.{self.hosts[host]['address']}"

    @property
    def controller_address(self) -> str:
        """The address of this machine as the hosts see it."""
        return f"{NETWORK}.{self.subnet}.1"

    def host_key(self, host: str) -> str:
        """Return a host's public key: ``ssh-ed25519 AAAA…``."""
        return " ".join((self.state / "keys" / host).with_suffix(".pub").read_text().split()[:2])

    def fingerprint(self, host: str) -> str:
        """Return the fingerprint of a host's key as OpenSSH writes it: ``SHA256:…``."""
        blob = base64.b64decode(self.host_key(host).split()[1])
        return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")

    def host_spec(self, host: str, **more: Any) -> dict[str, Any]:
        """Return a Host document that reaches this host; ``more`` adds to it or takes another value."""
        return {
            "kind": "Host",
            "name": host,
            "address": self.address(host),
            "platform": self.hosts[host]["platform"],
            "ssh": {
                "user": "root",
                "port": 22,
                "identity_file": str(self.client_key),
                "host_key": self.fingerprint(host),
            },
            **more,
        }

    def spec_text(self, *documents: dict[str, Any]) -> str:
        """Write a spec file: the given documents, or a Host for each host when none is given."""
        chosen = documents or [self.host_spec(host) for host in self.hosts]
        return "".join(f"---\n{json.dumps(document, indent=2)}\n" for document in chosen)

    def ssh_command(self, host: str, user: str = "root") -> list[str]:
        """Return the OpenSSH command that logs in to a host."""
        options = ["-F", "none", "-i", str(self.client_key), "-o", f"UserKnownHostsFile={self.known_hosts}"]
        return ["ssh", *options, "-o", "StrictHostKeyChecking=yes", f"{user}@{self.address(host)}"]

    # Looking and touching, past everything that is tested

    def run(
        self, host: str, command: str | list[str], *, stdin: str | None = None, timeout: float = 60, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a host (a string: by its shell), not through SSH."""
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else command
        attach = ["lxc-attach", "-P", str(self.state / "hosts"), "-n", host, "--clear-env"]
        environment = ["-v", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "-v", "HOME=/root"]
        return subprocess.run(
            [*attach, *environment, "--", *words],
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=check,
        )

    def path(self, host: str, path: str) -> Path:
        """Return where a file of a host is for this machine: everything of a running host, the disk of one that is off.

        Its links are this machine's when followed: mind absolute ones.
        """
        pid = self._init_pid(host)
        top = Path(f"/proc/{pid}/root") if pid else self.state / "hosts" / host / "rootfs"
        return top / path.lstrip("/")

    def read(self, host: str, path: str) -> bytes:
        """Return a file's content."""
        return self.path(host, path).read_bytes()

    def write(self, host: str, path: str, content: bytes | str, mode: int = 0o644) -> None:
        """Write a file, and the folders that lead to it."""
        target = self.path(host, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
        target.chmod(mode)

    def delete(self, host: str, path: str) -> None:
        """Remove a file, if it is there."""
        self.path(host, path).unlink(missing_ok=True)

    def pve_read(self, path: str, host: str | None = None) -> bytes:
        """Return a file of ``/etc/pve`` as a host sees it (one that has quorum, if none is named)."""
        return (self.state / "pve" / (host or self._quorate_host()) / path).read_bytes()

    def pve_write(self, path: str, content: bytes | str, host: str | None = None) -> None:
        """Write a file of ``/etc/pve`` on a host, under the cluster's rules."""
        target = self.state / "pve" / (host or self._quorate_host()) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)

    def pve_remove(self, path: str, host: str | None = None) -> None:
        """Remove a file of ``/etc/pve``."""
        (self.state / "pve" / (host or self._quorate_host()) / path).unlink()

    def pve_hang(self, host: str, path: str, *operations: str) -> None:
        """Let operations (``read`` when none is named) on a path of a host's ``/etc/pve`` block for ever.

        ``path`` is a shell pattern, its ``*`` matches a slash too. ``pve_release`` and ``power_off`` let it go.
        """
        self._pmxcfs("hang", host=host, path=path, operations=list(operations) or ["read"])

    def pve_release(self, host: str | None = None) -> None:
        """Let go everything that hangs in ``/etc/pve``, of one host or of all."""
        self._pmxcfs("release", host=host)

    def pve_reset(self, files: Mapping[str, bytes] | None = None) -> None:
        """Give ``/etc/pve`` the content that the lab began with, and ``files``."""
        self._pmxcfs("reset", files=cluster.encoded({**self.pve_files, **(files or {})}))

    def snapshot_tree(self, host: str) -> dict[str, str]:
        """Return a digest (content, mode, owner, target) of everything that can change on a host, by path.

        That is: every path in which the host's disk differs from the image, ``/etc/pve``, the device nodes in ``/dev``,
        and systemd's transient units. Left out as noise: logs, caches, temporary files, and what systemd, dpkg and apt
        keep for themselves (``NOISE``). Times are not compared.
        """
        upper, lower = self.state / "hosts" / host / "upper", self._trees.host
        tree = {}
        for path in _walk(upper):
            name = str(path.relative_to(upper))
            if NOISE.fullmatch(name):
                continue
            now, before = _digest(path), _digest(lower / name)
            # a folder comes up from the image with anything that is written below it
            if now != before:
                tree[f"/{name}"] = now
        if not self._init_pid(host):
            return tree
        for top in ("dev", "run/systemd/transient"):
            for path in _walk(self.path(host, top)):
                if stat.S_IFMT(path.lstat().st_mode) in (stat.S_IFCHR, stat.S_IFBLK, stat.S_IFREG):
                    tree[f"/{top}/{path.relative_to(self.path(host, top))}"] = _digest(path)
        if host in self.proxmox:
            shared = self.state / "pve" / host
            for path in _walk(shared):
                if path.name not in cluster.VIRTUAL:
                    tree[f"/etc/pve/{path.relative_to(shared)}"] = _digest(path)
        return tree

    # Power and network

    def power_off(self, host: str) -> None:
        """Cut a host's power. Its disk stays, nothing else does."""
        # What hangs in one of the file systems cannot be killed: it is let go first.
        self.pve_release(host)
        self.kernel("power", host, on=False)
        self._lxc("lxc-stop", host, "-k", allowed=(0, 2))  # 2: it was off
        self._init_pids.pop(host, None)

    def power_on(self, host: str) -> None:
        """Give a host power, and wait until its SSH port answers. Does nothing when it is on."""
        if not self._init_pid(host):
            self._write_config(host)
            self._lxc("lxc-start", host, "-d")
        self.wait_for_ssh(host)

    def is_on(self, host: str) -> bool:
        """Say whether a host has power."""
        return self._init_pid(host) != 0

    def wait_for_ssh(self, host: str, timeout: float = 60) -> None:
        """Wait until a host's SSH server says its first line. Raises LabError with the console's last lines."""
        wait_until(lambda: _greets(self.address(host)), timeout, f"{host} does not answer SSH: {self._console(host)}")

    def partition(self, groups: list[list[str]]) -> None:
        """Part the network: nothing gets from a group to another. Hosts in no group are one more group.

        This machine, as ``controller``, may be put into a group; in none it reaches every host.
        """
        named = {name for group in groups for name in group}
        rest = [host for host in self.hosts if host not in named]
        self._sides = [*groups, *([rest] if rest else [])]
        self._filter_packets()
        self._pmxcfs("partition", sides=self._sides)

    def cut(self, host: str) -> None:
        """Cut a host off from this machine, and from nothing else: packets are lost, as with a pulled cable."""
        self._cut.add(host)
        self._filter_packets()

    def heal(self) -> None:
        """Make the network whole again, after ``partition`` and ``cut``."""
        self._sides = []
        self._cut.clear()
        self._filter_packets()
        self._pmxcfs("partition", sides=[])

    def _filter_packets(self) -> None:
        """Drop on the bridge what may not pass: between sides, and between this machine and whom it is cut off from."""
        table = f"bridge {self._table}"
        lines = [f"add table {table}", f"delete table {table}", f"add table {table}"]
        lines += [
            f"add chain {table} {hook} {{ type filter hook {hook} priority 0; }}"
            for hook in ("forward", "input", "output")
        ]
        for side in self._sides:
            inside = [host for host in side if host in self.hosts]
            outside = [host for host in self.hosts if host not in side]
            lines += [
                f"add rule {table} forward iifname {self._veth(one)} oifname {self._veth(other)} drop"
                for one in inside
                for other in outside
            ]
        with_controller = next((side for side in self._sides if "controller" in side), self.hosts)
        for host in {*self._cut, *(host for host in self.hosts if host not in with_controller)}:
            lines.append(f"add rule {table} input iifname {self._veth(host)} drop")
            lines.append(f"add rule {table} output oifname {self._veth(host)} drop")
        _run(["nft", "-f", "-"], stdin="\n".join(lines) + "\n")

    # The parts below

    def kernel(self, operation: str, host: str, **arguments: Any) -> Any:
        """Ask or change a host's kernel: kernel.py says what there is."""
        return control.ask(self.state / "control/kernel.sock", {"op": operation, "host": host, **arguments})

    def _pmxcfs(self, operation: str, **arguments: Any) -> Any:
        return control.ask(self.state / "control/pmxcfs.sock", {"op": operation, **arguments})

    def _quorate_host(self) -> str:
        for host, state in self._pmxcfs("state").items():
            if state["quorate"]:
                return str(host)
        raise LabError("no host of the cluster has quorum")

    @property
    def _table(self) -> str:
        return f"lab_{self.name}"

    def _veth(self, host: str) -> str:
        return f"{self.name}v{self.hosts[host]['address']}"

    def _lxc(self, program: str, host: str, *arguments: str, allowed: tuple[int, ...] = (0,)) -> str:
        done = subprocess.run(
            [program, "-P", str(self.state / "hosts"), "-n", host, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode not in allowed:
            log = self.state / f"log/{host}.lxc"
            last = "\n".join(log.read_text(errors="replace").splitlines()[-20:]) if log.exists() else ""
            raise LabError(f"{program} {host}: exit {done.returncode}: {done.stderr}{last}")
        return done.stdout

    def _init_pid(self, host: str) -> int:
        """Return the process id of a host's init as this machine counts, 0 when the host is off."""
        pid = self._init_pids.get(host, 0)
        if pid and self._is_init(pid, host):
            return pid
        text = self._lxc("lxc-info", host, "-p", "-H").strip()
        self._init_pids[host] = int(text) if text.isdigit() and int(text) > 0 else 0
        return self._init_pids[host]

    def _is_init(self, pid: int, host: str) -> bool:
        with suppress(OSError):
            return f"/{self.name}/{host}" in Path(f"/proc/{pid}/cgroup").read_text()
        return False

    def _console(self, host: str) -> str:
        log = self.state / f"log/{host}.console"
        return log.read_text(errors="replace")[-2000:] if log.exists() else "(nothing on the console)"

    def _claim(self) -> None:
        """Take a name, a network and a bridge that nobody has."""
        self.root.mkdir(parents=True, exist_ok=True)
        with _claims():
            if self.state.exists():
                raise LabError(f"there is a lab {self.name} already: python -m tests.lab down {self.name}")
            taken = _run(["ip", "-4", "-oneline", "address"])
            self.subnet = next(n for n in range(1, 255) if f" {NETWORK}.{n}." not in taken)
            for folder in ("control", "hosts", "keys", "log", "pve", "rbd", "volumes"):
                (self.state / folder).mkdir(parents=True)
            self._record([])
            _run(["ip", "link", "add", self.bridge, "type", "bridge"])
            _run(["ip", "address", "add", f"{self.controller_address}/24", "dev", self.bridge])
            _run(["ip", "link", "set", self.bridge, "up"])

    def _record(self, processes: list[int]) -> None:
        about = {
            "name": self.name,
            "subnet": self.subnet,
            "bridge": self.bridge,
            "table": self._table,
            "owner": None if self.keep else _identity(os.getpid()),
            "processes": [_identity(pid) for pid in processes],
            "hosts": self.hosts,
            "image": image.digest(),
            "pve_files": cluster.encoded(self.pve_files),
        }
        fresh = self.state / "lab.json.new"
        fresh.write_text(json.dumps(about, indent=1))
        fresh.rename(self.state / "lab.json")

    def _make_keys(self) -> None:
        names = ["client", *self.hosts, *(f"{host}-root" for host in self.proxmox)]
        for name in names:
            comment = f"{name}@{self.name}"
            _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(self.state / "keys" / name)])
        lines = [f"{self.address(host)} {self.host_key(host)}\n" for host in self.hosts]
        self.known_hosts.write_text("".join(lines))

    def _make_volumes(self) -> None:
        """Make the "Ceph" of the lab: one mount that every Proxmox host sees, with a folder for each image."""
        rbd = str(self.state / "rbd")
        _run(["mount", "--bind", rbd, rbd])
        _run(["mount", "--make-shared", rbd])  # a volume that is made later shows on running hosts
        for path, content in self.pve_files.items():
            if re.fullmatch(r"nodes/[^/]+/lxc/\d+\.conf", path):
                for volume in re.findall(rb"^rootfs: *ceph-rbd:([\w-]+)", content, re.MULTILINE):
                    if not (self.state / "rbd" / volume.decode()).exists():
                        self.make_volume(volume.decode())

    def make_volume(self, name: str) -> Path:
        """Make an image in the shared storage, with a Debian in it, and return where it is on this machine."""
        place, target = self.state / "volumes" / name, self.state / "rbd" / name
        # An unprivileged container's owners are changed without a copy of each file.
        _overlay(self._trees.ct_layers, place, target, "metacopy=on")
        (target / "etc/hostname").write_text(f"{name}\n")
        kmodules.install_container(target)
        return target

    def _make_host(self, host: str) -> None:
        place = self.state / "hosts" / host
        rootfs = place / "rootfs"
        _overlay(self._trees.host_layers, place, rootfs)
        _put(rootfs / "etc/hostname", f"{host}\n")
        _put(rootfs / "etc/machine-id", f"{secrets.token_hex(16)}\n", 0o444)
        names = "".join(f"{self.address(name)} {name}.lab {name}\n" for name in self.hosts)
        _put(rootfs / "etc/hosts", f"127.0.0.1 localhost\n{names}")
        self._lay_keys(host, rootfs)
        self._lay_network(host, rootfs)
        self._lay_standins(host, rootfs)
        for folder in ("etc/pve", "mnt/lab-rbd") if host in self.proxmox else ():
            (rootfs / folder).mkdir()
        self._write_config(host)

    def _lay_keys(self, host: str, rootfs: Path) -> None:
        keys = self.state / "keys"
        _put(rootfs / "etc/ssh/ssh_host_ed25519_key", (keys / host).read_bytes(), 0o600)
        _put(rootfs / "etc/ssh/ssh_host_ed25519_key.pub", (keys / f"{host}.pub").read_bytes())
        _put(rootfs / "etc/ssh/sshd_config.d/key.conf", "HostKey /etc/ssh/ssh_host_ed25519_key\n")
        client = (keys / "client.pub").read_text()
        cluster = "".join((keys / f"{other}-root.pub").read_text() for other in self.proxmox)
        if host in self.proxmox:  # the nodes of a cluster are root on each other
            _put(rootfs / "root/.ssh/id_ed25519", (keys / f"{host}-root").read_bytes(), 0o600)
            others = "".join(f"{name},{self.address(name)} {self.host_key(name)}\n" for name in self.proxmox)
            _put(rootfs / "etc/ssh/ssh_known_hosts", others)
            client += cluster
        _put(rootfs / "root/.ssh/authorized_keys", client, 0o600)
        home = rootfs / "home/ops"
        _put(home / ".ssh/authorized_keys", (keys / "client.pub").read_text(), 0o600)
        owner = home.stat()
        for path in (home / ".ssh", home / ".ssh/authorized_keys"):
            os.chown(path, owner.st_uid, owner.st_gid)

    def _lay_network(self, host: str, rootfs: Path) -> None:
        """Give a host its address: on ``vmbr0``, which its CTs share, when it is a Proxmox host."""
        if host in self.proxmox:
            card = "vmbr0"
            make = (
                "ip link add vmbr0 type bridge\n"
                'ip link set vmbr0 address "$(cat /sys/class/net/eth0/address)"\n'
                "ip link set eth0 master vmbr0 up\n"
            )
        else:
            card, make = "eth0", ""
        script = (
            f"#!/bin/sh\nset -eu\n{make}"
            f"ip address add {self.address(host)}/24 dev {card}\n"
            f"ip link set {card} up\n"
            f"ip route add default via {self.controller_address}\n"
        )
        _put(rootfs / "usr/local/sbin/lab-network", script, 0o755)
        unit = (
            "[Unit]\nDescription=Network of the lab\nDefaultDependencies=no\nBefore=network.target ssh.service\n"
            "Wants=network.target\n[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/usr/local/sbin/lab-network\n"
        )
        _put(rootfs / "etc/systemd/system/lab-network.service", unit)
        wants = rootfs / "etc/systemd/system/sysinit.target.wants"
        wants.mkdir(exist_ok=True)
        (wants / "lab-network.service").symlink_to("/etc/systemd/system/lab-network.service")

    def _lay_standins(self, host: str, rootfs: Path) -> None:
        if host in self.proxmox:
            modules = rootfs / "usr/lib/python3/dist-packages"
            shutil.copytree(STANDINS / "pvelab", modules / "pvelab", ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copytree(STANDINS / "pve-root", rootfs, symlinks=True, dirs_exist_ok=True)
            for standin in (path for path in STANDINS.iterdir() if path.is_file()):
                folder = "usr/bin" if standin.name in USR_BIN else "usr/sbin"
                _put(rootfs / folder / standin.name, standin.read_bytes(), 0o755)
        kmodules.install(rootfs, self.hosts[host])
        packages.install(rootfs, self.hosts[host])

    def _start_file_systems(self) -> None:
        wanted = {
            "name": self.name,
            "nodes": {host: self.address(host) for host in self.proxmox},
            "files": cluster.encoded(self.pve_files),
        }
        processes = {
            "kernel": self._serve("kernel", json.dumps(self.hosts)),
            "pmxcfs": self._serve("pmxcfs", json.dumps(wanted)),
        }
        self._record([process.pid for process in processes.values()])
        mounts = [self.state / "kernel", *(self.state / "pve" / host for host in self.proxmox)]
        sockets = [self.state / "control" / f"{name}.sock" for name in processes]

        def ended() -> list[str]:
            return [name for name, process in processes.items() if process.poll() is not None]

        def served() -> bool:
            return all(map(_is_mount, mounts)) and all(path.exists() for path in sockets)

        wait_until(lambda: served() or bool(ended()), 30, "the file systems of the lab are not there")
        for name in ended():
            raise LabError(f"{name} ended: {(self.state / 'log' / name).read_text()}")

    def _serve(self, module: str, text: str) -> subprocess.Popen[str]:
        """Start a file system's process in a session of its own, so that ctrl-C at a terminal is not its end."""
        with (self.state / "log" / module).open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"tests.lab.{module}", "--state", str(self.state)],
                cwd=CHECKOUT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert process.stdin
        process.stdin.write(text)
        process.stdin.close()
        return process

    def _write_config(self, host: str) -> None:
        place = self.state / "hosts" / host
        hook = shlex.join([sys.executable, str(Path(__file__).with_name("power.py")), str(self.state), host])
        (place / "boot_id").touch()
        kernel = self.state / "kernel" / host
        mounts = [
            (place / "boot_id", "proc/sys/kernel/random/boot_id", "bind"),
            (kernel / "proc-osrelease", "proc/sys/kernel/osrelease", "bind"),
            (kernel / "proc-version", "proc/version", "bind"),
            (kernel / "proc-devices", "proc/devices", "bind"),
            (kernel / "proc-driver", "proc/driver", "bind"),
            (kernel / "bus-pci", "sys/bus/pci", "bind"),
            (kernel / "iommu_groups", "sys/kernel/iommu_groups", "bind"),
            (kernel / "module", "sys/module", "bind"),
            (kernel / "control", "run/lab-kernel", "bind,create=dir"),
        ]
        if Path("/sys/firmware").is_dir():
            mounts.append((kernel / "firmware", "sys/firmware", "bind"))
        if Path("/proc/modules").exists():  # a kernel without modules has none to be covered
            mounts.append((kernel / "proc-modules", "proc/modules", "bind"))
        if host in self.proxmox:
            mounts += [
                (self.state / "pve" / host, "etc/pve", "bind"),
                (self.state / "rbd", "mnt/lab-rbd", "rbind,rslave"),
            ]
        uptime = int(time.clock_gettime(time.CLOCK_BOOTTIME))
        lines = [
            "lxc.include = /usr/share/lxc/config/common.conf",
            "lxc.include = /usr/share/lxc/config/nesting.conf",
            f"lxc.uts.name = {host}",
            f"lxc.rootfs.path = dir:{place}/rootfs",
            f"lxc.cgroup.dir.monitor = reconcile-lab/{self.name}/{host}-monitor",
            f"lxc.cgroup.dir.container = reconcile-lab/{self.name}/{host}",
            f"lxc.log.file = {self.state}/log/{host}.lxc",
            "lxc.log.level = WARN",
            f"lxc.console.logfile = {self.state}/log/{host}.console",
            f"lxc.hook.pre-start = {hook} on",
            f"lxc.hook.post-stop = {hook} off",
            "lxc.net.0.type = veth",
            f"lxc.net.0.link = {self.bridge}",
            f"lxc.net.0.veth.pair = {self._veth(host)}",
            f"lxc.net.0.hwaddr = 02:77:{self.subnet:02x}:00:00:{self.hosts[host]['address']:02x}",
            "lxc.net.0.name = eth0",
            # A machine that has just been switched on has clocks that begin.
            f"lxc.time.offset.boot = -{uptime}s",
            f"lxc.time.offset.monotonic = -{int(time.clock_gettime(time.CLOCK_MONOTONIC))}s",
            "lxc.apparmor.profile = unconfined",
            "lxc.cap.drop =",
            "lxc.cgroup.devices.allow = a",
            "lxc.cgroup2.devices.allow = a",
            "lxc.mount.auto = proc:rw sys:rw",
            # An own, pure cgroup2, as a Proxmox host has.
            "lxc.mount.entry = cgroup2 sys/fs/cgroup cgroup2 rw 0 0",
            # Before systemd would mount it, so that what is bound below it stays.
            "lxc.mount.entry = tmpfs run tmpfs rw,nosuid,nodev,mode=755 0 0",
            *(f"lxc.mount.entry = {source} {target} none {options} 0 0" for source, target, options in mounts),
        ]
        (place / "config").write_text("\n".join(lines) + "\n")


# A container as the story tells of it: made on a host with four cards, two of its majors stale.
EXAMPLE_PVE_FILES = {
    "nodes/kpro5/lxc/129.conf": (
        b"# LLM server\n"
        b"arch: amd64\ncores: 2\nfeatures: nesting=1\nhostname: llm-gpu\nmemory: 4096\n"
        b"net0: name=eth0,bridge=vmbr0,firewall=1,hwaddr=BC:24:11:00:01:29,type=veth\n"
        b"ostype: debian\nrootfs: ceph-rbd:vm-129-disk-0,size=200G\nswap: 0\n"
        b"lxc.cgroup2.devices.allow: c 195:* rwm\nlxc.cgroup2.devices.allow: c 507:* rwm\n"
        + b"".join(
            b"lxc.mount.entry: /dev/%b dev/%b none bind,optional,create=file\n" % (node, node)
            for node in (b"nvidia0", b"nvidia1", b"nvidia2", b"nvidia3", b"nvidiactl", b"nvidia-uvm")
        )
    )
}


def first_pve_files(nodes: list[str]) -> dict[str, bytes]:
    """Return what a cluster without guests has in ``/etc/pve``: its storages above all."""
    everywhere = ",".join(nodes)
    return {
        "corosync.conf": _corosync(nodes).encode(),
        "datacenter.cfg": b"keyboard: en-us\n",
        "user.cfg": b"user:root@pam:1:0::::::\n",
        "storage.cfg": (
            "dir: local\n\tpath /var/lib/vz\n\tcontent iso,vztmpl,backup,rootdir\n\n"
            f"rbd: ceph-rbd\n\tcontent images,rootdir\n\tkrbd 1\n\tnodes {everywhere}\n\tpool rbd\n"
        ).encode(),
    }


def _corosync(nodes: list[str]) -> str:
    listed = "".join(
        f"  node {{\n    name: {node}\n    nodeid: {number}\n    quorum_votes: 1\n    ring0_addr: {node}\n  }}\n"
        for number, node in enumerate(nodes, start=1)
    )
    return (
        f"logging {{\n  debug: off\n  to_syslog: yes\n}}\n\nnodelist {{\n{listed}}}\n\n"
        "quorum {\n  provider: corosync_votequorum\n}\n\n"
        f"totem {{\n  cluster_name: lab\n  config_version: {len(nodes)}\n  interface {{\n    linknumber: 0\n  }}\n"
        "  ip_version: ipv4-6\n  link_mode: passive\n  secauth: on\n  version: 2\n}\n"
    )


def wait_until(condition: Callable[[], bool], timeout: float, complaint: str) -> None:
    """Wait for a condition, looked at every 20 ms. Raises LabError with the complaint when it does not come."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise LabError(f"{complaint} (after {timeout:g} s)")
        time.sleep(0.02)


def running(root: Path = ROOT) -> list[dict[str, Any]]:
    """Return what is recorded of every lab under a root."""
    found = (_about(path) for path in sorted(root.glob("*")) if path.is_dir())
    return [about for about in found if about is not None]


def sweep(root: Path = ROOT) -> list[str]:
    """Remove the labs whose makers are dead, and return their names."""

    def dead() -> list[str]:
        return [about["name"] for about in running(root) if about["owner"] and not _lives(about["owner"])]

    if not dead():
        return []
    with _claims():  # two that sweep at once would be in each other's way
        swept = dead()
        for name in swept:
            remove(root / name)
    return swept


def remove(state: Path) -> None:
    """Take away a lab, whatever is left of it: processes, hosts, mounts, network, files."""
    about = _about(state)
    if about is None:
        return
    # The file systems first: what hangs in one of them cannot be killed before it is gone.
    for process in about["processes"]:
        if _lives(process):
            os.kill(process["pid"], signal.SIGKILL)
    for host in about["hosts"]:
        subprocess.run(
            ["lxc-stop", "-P", str(state / "hosts"), "-n", host, "-k"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
        )
    for mount in reversed(_mounts_below(state)):
        _run(["umount", "--lazy", mount])
    subprocess.run(["ip", "link", "delete", about["bridge"]], capture_output=True, check=False)
    subprocess.run(["nft", "delete", "table", "bridge", about["table"]], capture_output=True, check=False)
    if left := _mounts_below(state):
        raise LabError(f"cannot remove {state}: still mounted: {left}")
    _remove_cgroups(about["name"])
    for path in state.iterdir():  # the record last: until then this can be done again
        if path.is_dir():
            shutil.rmtree(path)
    shutil.rmtree(state)


def _remove_cgroups(name: str) -> None:
    for hierarchy in Path("/sys/fs/cgroup").iterdir():
        top = hierarchy / "reconcile-lab" / name
        for folder, _, _ in os.walk(top, topdown=False) if top.is_dir() else ():
            with suppress(OSError):  # a process that just ended may hold it a moment longer: it is empty all the same
                Path(folder).rmdir()


def _default_hosts() -> dict[str, hosts.Description]:
    return hosts.default()


def _about(state: Path) -> dict[str, Any] | None:
    with suppress(FileNotFoundError):
        about: dict[str, Any] = json.loads((state / "lab.json").read_text())
        return about
    return None


def _identity(pid: int) -> dict[str, int]:
    """Name a process so that another one under the same number is not taken for it."""
    return {"pid": pid, "started": _started(pid)}


def _started(pid: int) -> int:
    """Return when a process started, in clock ticks after boot (field 22 of its stat)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _lives(process: dict[str, int]) -> bool:
    with suppress(OSError):
        return _started(process["pid"]) == process["started"]
    return False


def _mounts_below(state: Path) -> list[str]:
    """Return the mount points below a directory, in the order in which they were mounted."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if point.startswith(f"{state}/")]


def _is_mount(path: Path) -> bool:
    return str(path) in _mounts_below(path.parent)


def _overlay(layers: Iterable[Path], place: Path, target: Path, *more: str) -> None:
    for folder in (place / "upper", place / "work", target):
        folder.mkdir(parents=True)
    lower = ":".join(str(layer) for layer in layers)
    options = ",".join((f"lowerdir={lower},upperdir={place}/upper,workdir={place}/work", *more))
    _run(["mount", "-t", "overlay", "-o", options, "overlay", str(target)])


def _put(path: Path, content: bytes | str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)


def _greets(address: str) -> bool:
    with suppress(OSError), socket.create_connection((address, 22), timeout=2) as connection:
        return connection.recv(4) == b"SSH-"
    return False


def _in_parallel(do: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(do, name) for name in names]:
            done.result()


def _walk(top: Path) -> Iterator[Path]:
    """Yield everything below a directory on its own file system."""
    device = top.lstat().st_dev if top.exists() else 0
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if (Path(folder) / name).lstat().st_dev == device]
        for name in [*folders, *files]:
            yield Path(folder) / name


def _digest(path: Path) -> str:
    try:
        about = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return "absent"
    text = f"{about.st_mode:o} {about.st_uid}:{about.st_gid}"
    if stat.S_ISREG(about.st_mode):
        return f"{text} {hashlib.sha256(path.read_bytes()).hexdigest()}"
    if stat.S_ISLNK(about.st_mode):
        return f"{text} -> {path.readlink()}"
    if stat.S_ISCHR(about.st_mode) or stat.S_ISBLK(about.st_mode):
        return f"{text} {os.major(about.st_rdev)}:{os.minor(about.st_rdev)}"
    return text


def _run(command: list[str], stdin: str = "") -> str:
    """Run a program of this machine. Raises LabError with what it said when it fails."""
    done = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise LabError(f"{shlex.join(command)}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def _claims() -> Iterator[None]:
    with CLAIMS.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
