"""One scenario, two worlds: what a scenario may do to a fleet and ask of it, whichever world it is played in.

``SimStage`` plays on the simulated fleet, ``LabStage`` on real hosts. Both run the installed command as a person would.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.layers.shared import pve_physics
from controller.layers.shared.truth import Node
from controller.world.sim import SimWorld
from controller.world.sim.faults import Fault, Name
from tests.lab.lab import Lab, LabError

THIRD = "/dev/third"  # where a scenario puts a node of a card that a container was not given


@dataclass(frozen=True)
class Ran:
    """A command that was run."""

    rc: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, read as JSON."""
        return json.loads(self.out)


class Stage(ABC):
    """A fleet in one of the worlds, specs and a state directory of its own."""

    fleet: str

    def __init__(self, place: Path) -> None:
        self.place = place
        self.specs = place / "specs"
        self.specs.mkdir()

    def spec(self, text: str, name: str = "spec.yaml") -> None:
        """Write a spec file."""
        (self.specs / name).write_text(text)

    def command(self, *args: str, state: str = "state") -> list[str]:
        """The command line of a run."""
        options = ["--specs", str(self.specs), "--state", str(self.place / state), "--fleet", self.fleet]
        return [sys.executable, "-m", "controller", *args, *options]

    def reconcile(self, *args: str, state: str = "state", timeout: float = 300) -> Ran:
        """Run the command, and wait for its end."""
        done = subprocess.run(
            self.command(*args, state=state),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=self.env(),
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    def env(self) -> dict[str, str]:
        """The environment of a run: no agent and no configuration of the person who runs the tests."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SSH_", "RECONCILE_"))}
        return {**kept, "HOME": str(self.place)}

    def nvidia(self, *gpus: str) -> str:
        """The ``nvidia`` part of a Host that lists cards as ``4f:00.0 RTX A6000 containers``."""
        listed = []
        for gpu in gpus:
            pci, rest = gpu.split(" ", 1)
            model, owner = rest.rsplit(" ", 1)
            listed.append({"pci": pci, "model": model, "owner": owner})
        return json.dumps({"gpus": listed})

    @abstractmethod
    def host(self, name: str) -> str:
        """The first lines of a Host document: name, address, platform and how to log in."""

    @abstractmethod
    def conf(self, vmid: int) -> bytes:
        """A container's config file, wherever it lies."""

    @abstractmethod
    def write_conf(self, vmid: int, content: bytes) -> None:
        """Change it, as a person with an editor does."""

    @abstractmethod
    def started(self, vmid: int) -> str:
        """Something that differs from one start of a running container to the next, "" when it does not run."""

    @abstractmethod
    def opens(self, vmid: int, path: str) -> str:
        """What a process in the container gets that opens a path: allowed, refused, no-device or absent."""

    @abstractmethod
    def node(self, vmid: int) -> str:
        """The node that a container's config lies on."""

    @abstractmethod
    def pve(self, path: str, text: str) -> None:
        """Write a file of the cluster, as a person does."""

    @abstractmethod
    def power_off(self, host: str) -> None:
        """Cut a host's power."""

    @abstractmethod
    def power_on(self, host: str) -> None:
        """Give it back, and wait until the host answers."""

    @abstractmethod
    def cut(self, host: str) -> None:
        """Cut a host off from the controller, and from nothing else."""

    @abstractmethod
    def part(self, *sides: list[str]) -> None:
        """Break the cluster's network into sides; who is in none is on one more side."""

    @abstractmethod
    def lend_third(self, vmid: int, host: str, minor: int) -> None:
        """Put a node of the host's card with that minor at THIRD in the running container."""


class SimStage(Stage):
    """On a simulated fleet."""

    def __init__(self, place: Path, fleet_file: str) -> None:
        super().__init__(place)
        self._file = place / "fleet.sim.yaml"
        self._file.write_text(fleet_file)
        self.fleet = f"sim:{self._file}"

    def world(self, state: str = "state") -> SimWorld:
        """The fleet as the last command left it."""

        class Nobody:
            id, name = "scenario", "scenario"

        return SimWorld.load(self._file, self.place / state, Nobody())

    def host(self, name: str) -> str:
        return f"kind: Host\nname: {name}\naddress: 192.0.2.{name[-1]}\nplatform: proxmox\n"

    def _config(self, vmid: int) -> tuple[str, str]:
        """Its path and its text, in the copy of the cluster's files that has the highest version."""
        for cluster in self.world().fleet.clusters.values():
            newest = max(cluster.trees, key=lambda tree: tree.version)
            for path, file in newest.files.items():
                if path.endswith(f"/lxc/{vmid}.conf"):
                    return path, file.text
        raise AssertionError(f"no config of {vmid}")

    def conf(self, vmid: int) -> bytes:
        return self._config(vmid)[1].encode("utf-8", "surrogateescape")

    def node(self, vmid: int) -> str:
        return self._config(vmid)[0].split("/")[1]

    def pve(self, path: str, text: str) -> None:
        self._happen(Fault(Name.EDIT, self._writer(), path=f"/etc/pve/{path}", text=text))

    def _writer(self) -> str:
        """A host that may write in its cluster."""
        fleet = self.world().fleet
        return next(name for name, host in fleet.hosts.items() if host.powered and pve_physics.is_quorate(fleet, host))

    def power_off(self, host: str) -> None:
        self._happen(Fault(Name.POWER_OFF, host))

    def power_on(self, host: str) -> None:
        self._happen(Fault(Name.POWER_ON, host))

    def cut(self, host: str) -> None:
        self._happen(Fault(Name.UNREACHABLE, host))

    def part(self, *sides: list[str]) -> None:
        self._happen(Fault(Name.PARTITION, sides[0][0], sides=tuple(map(tuple, sides))))

    def _happen(self, *faults: Fault) -> None:
        world = self.world()
        world.inject(*faults)
        world.close()

    def write_conf(self, vmid: int, content: bytes) -> None:
        world = self.world()
        for name, host in world.fleet.hosts.items():
            path = f"/etc/pve/nodes/{name}/lxc/{vmid}.conf"
            if pve_physics.read(world.fleet, host, path) is not None:
                problem = pve_physics.write(world.fleet, host, path, content.decode("utf-8", "surrogateescape"))
                assert not problem, problem
        world.close()

    def started(self, vmid: int) -> str:
        for host in self.world().fleet.hosts.values():
            if vmid in host.containers:
                return f"{host.name} {host.containers[vmid].started}"
        return ""

    def opens(self, vmid: int, path: str) -> str:
        for host in self.world().fleet.hosts.values():
            if vmid in host.containers:
                return _answer(pve_physics.opens(host, vmid, path))
        return "absent"

    def lend_third(self, vmid: int, host: str, minor: int) -> None:
        world = self.world()
        with world.change(host) as truth:
            truth.containers[vmid].dev[THIRD] = Node(195, minor)
        world.close()


class LabStage(Stage):
    """On real hosts."""

    fleet = "ssh"

    def __init__(self, place: Path, lab: Lab) -> None:
        super().__init__(place)
        self.lab = lab

    def host(self, name: str) -> str:
        spec = self.lab.host_spec(name)
        return "".join(f"{key}: {json.dumps(value)}\n" for key, value in spec.items())

    def _path(self, vmid: int) -> str:
        for node in self.lab.proxmox:
            path = f"nodes/{node}/lxc/{vmid}.conf"
            try:
                self._read(path)
            except FileNotFoundError:
                continue
            return path
        raise AssertionError(f"no config of {vmid}")

    def node(self, vmid: int) -> str:
        return self._path(vmid).split("/")[1]

    def pve(self, path: str, text: str) -> None:
        self.lab.pve_write(path, text)

    def power_off(self, host: str) -> None:
        self.lab.power_off(host)

    def power_on(self, host: str) -> None:
        self.lab.power_on(host)

    def cut(self, host: str) -> None:
        self.lab.cut(host)

    def part(self, *sides: list[str]) -> None:
        self.lab.partition(list(sides))

    def conf(self, vmid: int) -> bytes:
        return self._read(self._path(vmid))

    def _read(self, path: str) -> bytes:
        """A file of the cluster as a quorate host has it, or, when there is none, any that is on."""
        try:
            return self.lab.pve_read(path)
        except LabError:
            return self.lab.pve_read(path, next(host for host in self.lab.proxmox if self.lab.is_on(host)))

    def write_conf(self, vmid: int, content: bytes) -> None:
        self.lab.pve_write(self._path(vmid), content)

    def _init(self, vmid: int) -> str:
        said = self.lab.run(self.node(vmid), f"lxc-info -n {vmid} -p -H")
        return said.stdout.strip() if said.returncode == 0 else ""

    def started(self, vmid: int) -> str:
        pid = self._init(vmid)
        if not pid.isdigit():
            return ""
        ticks = self.lab.run(self.node(vmid), ["cut", "-d ", "-f22", f"/proc/{pid}/stat"], check=True)
        return f"{self.node(vmid)} {ticks.stdout.strip()}"

    def opens(self, vmid: int, path: str) -> str:
        look = (
            f"if [ ! -e {path} ]; then echo {path}: No such file; elif [ ! -c {path} ]; then echo not a device; "
            f"else exec 3<>{path}; fi 2>&1"
        )
        said = self.lab.run(self.node(vmid), ["lxc-attach", "-n", str(vmid), "--", "/bin/sh", "-c", look])
        text = (said.stdout + said.stderr).strip().splitlines()[-1:] or [""]
        return _answer(re.sub(r".*: ", "", text[0]))

    def lend_third(self, vmid: int, host: str, minor: int) -> None:
        pid = self._init(vmid)
        self.lab.run(host, f"rm -f /proc/{pid}/root{THIRD}; mknod /proc/{pid}/root{THIRD} c 195 {minor}", check=True)


def _answer(text: str) -> str:
    """An error text of the kernel in a scenario's words; a lab has no driver behind its nodes, which says "allowed"."""
    if "not a device" in text:
        return "no-device"
    if "Operation not permitted" in text or "ermission denied" in text:
        return "refused"
    if "No such file" in text or "cannot open" in text or "nonexistent" in text:
        return "absent"
    if text in ("", "No such device or address"):
        return "allowed"
    raise AssertionError(f"unexpected answer to an open: {text!r}")
