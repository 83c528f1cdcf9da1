"""The story of specs/story: kpro6 is gone, its container comes to kpro5, which has no driver. Or kpro6 is there yet."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from controller.layers.gpu_health.facts import normal_pci
from controller.layers.shared.truth import Fleet
from controller.layers.userland import sim as userland
from controller.layers.userland.facts import parse as parse_userland
from tests.lab import hosts, kmodules, packages
from tests.lab.lab import Lab, wait_until
from tests.scenarios.stage import LabStage, SimStage, Stage

STORY = Path(__file__).parents[2] / "specs/story"
VERSION, OLD = "580.126.09", "575.57.08"
A6000 = ("0000:4f:00.0", "0000:ce:00.0")
RTX3090 = ("0000:17:00.0", "0000:31:00.0", "0000:b1:00.0")
LINE = "lxc.mount.entry: /tank/shared shared none bind,create=dir\n"
RUNFILE = f"/root/NVIDIA-Linux-x86_64-{VERSION}.run"

_HOST_STEPS = [
    ("host.kernel", "install-headers"),
    ("host.kernel", "keep-nouveau-off"),
    ("host.gpu-binding", "bind-gpu"),
    ("host.gpu-binding", "bind-gpu"),
    ("host.driver", "fetch-driver"),
    ("host.driver", "install-driver"),
    ("host.driver", "load-driver"),
    ("host.boot", "set-up-boot"),
]
_CT_STEPS = [
    ("container.mounts", "edit-config"),
    ("container.devices", "edit-config"),
    ("container.power", "start"),
    ("container.userland", "install-userland"),
]
TAKEN_OVER = [*_HOST_STEPS, ("container.placement", "take-over-container"), *_CT_STEPS]
MOVED = [*_HOST_STEPS, ("container.placement", "move-container"), *_CT_STEPS]


def world(*, alive: bool = False) -> dict[str, Any]:
    """The first world as its file has it; with kpro6 switched on and the container at work there."""
    made: dict[str, Any] = YAML(typ="safe").load(STORY / "fleet.sim.yaml")
    if alive:
        kpro6 = made["hosts"]["kpro6"]
        del kpro6["powered"]
        kpro6["lxc"][129]["running"] = True
        kpro6["repository"] = made["hosts"]["kpro5"]["repository"]
        kpro6["files"][RUNFILE] = made["hosts"]["kpro5"]["files"][RUNFILE]
    return made


CONF: str = world()["hosts"]["kpro6"]["lxc"][129]["config"]


def snapshot(conf: str) -> str:
    """The part of the container's config that tells of its snapshot."""
    return conf[conf.index("[before-upgrade]") :]


def sim_file(*, alive: bool = False) -> str:
    """The first world for the simulated fleet."""
    return json.dumps(world(alive=alive)) if alive else (STORY / "fleet.sim.yaml").read_text()


SERVED = [
    ("server.environment", "build-environment"),
    ("server.weights", "fetch-weights"),
    ("server.unit", "install-unit"),
    ("server.process", "start-server"),
    ("server.health", "install-watch"),
    ("server.output", "check-output"),
]
"""What follows for the server in the container, which only the simulated fleet has an engine and a Hub for."""


def documents(*, served: bool = False) -> list[dict[str, Any]]:
    """What lies in specs/story, with the server in the container or without."""
    files = [path for path in sorted(STORY.glob("*.yaml")) if not path.name.endswith(".sim.yaml")]
    found = [document for path in files for document in YAML(typ="safe").load_all(path)]
    return [document for document in found if served or document["kind"] != "ModelServer"]


def specification(stage: Stage, host: str = "kpro5", kpro6: str = "decommissioned", *, served: bool = False) -> None:
    """The story's specs for the hosts of this world, the container wanted on ``host``; ``kpro6`` is its lifecycle."""
    made = documents(served=served)
    for document in made:
        if document["kind"] == "Container":
            document["host"] = host
        if document["kind"] != "Host":
            continue
        if isinstance(stage, LabStage):
            document |= stage.lab.host_spec(document["name"])
        if document["name"] == "kpro6":
            document["lifecycle"] = kpro6
    of = {document["name"]: document for document in made if "name" in document}
    driver = of["kpro5"]["nvidia"]["driver"]
    if isinstance(stage, LabStage):
        driver["sha256"] = hashlib.sha256(packages.runfile(VERSION)).hexdigest()
    if kpro6 == "active":
        cards = world()["hosts"]["kpro6"]["cards"]
        of["kpro6"]["nvidia"] = {
            "driver": {**driver, "kernel_modules": "open"},
            "holders": ["nvidia-persistenced"],
            "gpus": [{"pci": card["pci"], "model": card["model"], "owner": "containers"} for card in cards],
        }
        of["kpro6"]["policy"] = of["kpro5"]["policy"]
    stage.spec("\n---\n".join(json.dumps(document) for document in made))


# The lab


def lab_hosts() -> dict[str, hosts.Description]:
    """Its Proxmox hosts: kpro5 without a driver, kpro6 with an older one."""
    found = {name: about for name, about in hosts.story().items() if about["platform"] == "proxmox"}
    found["kpro6"]["driver"]["version"] = OLD
    return found


def pve_files() -> dict[str, bytes]:
    """The guests' configs, no larger than this machine."""
    made = world()["hosts"]
    small = CONF.replace("cores: 32", "cores: 2").replace("131072", "2048").replace("ip=dhcp,", "")
    files = {"nodes/kpro6/lxc/129.conf": small.replace("ostype: ubuntu", "ostype: debian")}
    for vmid, guest in made["kpro5"]["qemu"].items():
        files[f"nodes/kpro5/qemu-server/{vmid}.conf"] = re.sub("(?m)^(cores|memory): .*$", r"\1: 64", guest["config"])
    return {path: text.replace("cores: 64", "cores: 1").encode() for path, text in files.items()}


def set_up_lab(lab: Lab, *, alive: bool = False) -> None:
    """The first world in a lab that was just made: kpro5's machines run, and kpro6 is off, or runs the container."""
    kmodules.install_userland(lab.state / "rbd/vm-129-disk-0", OLD)
    for host in ("kpro5", "kpro6"):
        lab.write(host, RUNFILE, packages.runfile(VERSION))
    wait_until(lambda: machines(lab) == {201, 202}, 60, "the virtual machines were not started at boot")
    # What was started at boot has been started, and the container was not: its directory was not there
    done = "systemctl is-active --quiet pve-guests.service"
    wait_until(lambda: lab.run("kpro6", done).returncode == 0, 60, "kpro6 is not done with its guests")
    lab.run("kpro6", "mkdir -p /tank/shared && nvidia-smi -L && nvidia-modprobe -u -c=0", check=True)
    if alive:
        lab.run("kpro6", "pct start 129", check=True)
    else:
        lab.power_off("kpro6")


def machines(lab: Lab) -> set[int]:
    """The virtual machines that run on kpro5."""
    said = lab.run("kpro5", "qm list").stdout
    return {int(vmid) for vmid in re.findall(r"^ *(\d+) .* running ", said, re.MULTILINE)}


# What is true, past the controller


def sim_smi(fleet: Fleet, host: str) -> tuple[set[str], tuple[str, ...]]:
    """What nvidia-smi says in the container of a simulated host: the cards, and the libraries' versions."""
    facts = parse_userland(userland.answer(fleet, fleet.hosts[host], (129,)))
    inside = facts.of(129)
    assert inside is not None
    return {pci for _, pci in inside.cards or ()}, inside.libraries


def smi(stage: Stage, host: str = "kpro5") -> tuple[set[str], tuple[str, ...]]:
    """The same in either world."""
    if isinstance(stage, SimStage):
        return sim_smi(stage.world().fleet, host)
    assert isinstance(stage, LabStage)
    query = "pct exec 129 -- nvidia-smi --query-gpu=pci.bus_id,driver_version --format=csv,noheader"
    rows = [row.split(", ") for row in stage.lab.run(host, query, check=True).stdout.splitlines()]
    return {normal_pci(pci) for pci, _ in rows}, tuple({version for _, version in rows})


def module(stage: Stage, host: str = "kpro5") -> str:
    """The version of the module in the host's kernel."""
    if isinstance(stage, LabStage):
        return stage.lab.run(host, "cat /sys/module/nvidia/version").stdout.strip()
    assert isinstance(stage, SimStage)
    loaded = stage.world().fleet.hosts[host].loaded.get("nvidia")
    return loaded.version if loaded is not None else ""


class Watch:
    """The cards of virtual machines: that no step ever changed which driver one is on."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.began = self._links()

    def _links(self) -> int:
        return len(self.stage.lab.kernel("links", "kpro5")) if isinstance(self.stage, LabStage) else 0

    def untouched(self) -> None:
        """Nobody's link changed since the last time this was asked, and virtual machines run as they did."""
        if isinstance(self.stage, LabStage):
            changes = self.stage.lab.kernel("links", "kpro5")[self.began :]
            assert not {change["address"] for change in changes} & set(RTX3090), changes
            functions = self.stage.lab.kernel("state", "kpro5")["functions"]
            assert [functions[pci]["driver"] for pci in RTX3090] == ["vfio-pci"] * 3
            assert machines(self.stage.lab) == {201, 202}
            self.again()
            return
        assert isinstance(self.stage, SimStage)
        kpro5 = self.stage.world().fleet.hosts["kpro5"]
        assert [kpro5.functions[pci].driver for pci in RTX3090] == ["vfio-pci"] * 3
        assert kpro5.machines.keys() == {201, 202}

    def again(self) -> None:
        """What happened until now is not counted: the power was off."""
        self.began = self._links()
