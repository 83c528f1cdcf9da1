"""kpro5 as the story begins: two A6000 for containers on vfio-pci, three 3090 that virtual machines have; or later."""

from __future__ import annotations

import json
from typing import Any

from tests.lab import hosts
from tests.scenarios.stage import Stage

A6000 = ("0000:4f:00.0", "0000:ce:00.0")
RTX3090 = ("0000:17:00.0", "0000:31:00.0", "0000:b1:00.0")
GROUPS = {"17:00": 21, "31:00": 27, "4f:00": 31, "b1:00": 44, "ce:00": 52}
VMS = {201: "hostpci0: 0000:17:00,pcie=1\n", 202: "hostpci0: 0000:31:00.0\n[PENDING]\nmemory: 4096\n"}
VM = "cores: 1\nmemory: 64\nname: guest\nostype: l26\n"
VFIO_CONF = (
    "options vfio-pci ids=10de:2204,10de:1aef,10de:2230\nsoftdep nvidia pre: vfio-pci\nsoftdep nouveau pre: vfio-pci\n"
)


def specification(
    stage: Stage, *, driver: bool = False, allow: str = "[rebind-gpu, change-driver]", **owners: str
) -> None:
    """The spec of kpro5: A6000 for containers, 3090 for virtual machines, or another owner by address ("b1")."""
    gpus = [{"pci": pci, "model": "RTX A6000", "owner": "containers"} for pci in A6000]
    gpus += [{"pci": pci, "model": "RTX 3090", "owner": "vms"} for pci in RTX3090]
    for gpu in gpus:
        gpu["owner"] = owners.get(gpu["pci"][5:7], gpu["owner"])
    nvidia: dict[str, Any] = {"gpus": [gpu for gpu in gpus if gpu["owner"] != "nobody"]}
    if driver:
        nvidia["driver"] = {"version": "580.126.09", "kernel_modules": "proprietary", "source": "preinstalled"}
    stage.spec(f"{stage.host('kpro5')}nvidia: {json.dumps(nvidia)}\npolicy: {{mode: enforce, allow: {allow}}}\n")


def lab_hosts(*, driver: bool) -> dict[str, hosts.Description]:
    """For the lab: without the driver, everything is on vfio-pci; with it, the A6000 are on nvidia."""
    return hosts.default() if driver else hosts.story()


def pve_files() -> dict[str, bytes]:
    """The configs of the virtual machines: neither runs."""
    return {f"nodes/kpro5/qemu-server/{vmid}.conf": (VM + text).encode() for vmid, text in VMS.items()}


def sim_file(*, driver: bool) -> str:
    """The same for the simulated fleet."""
    a6000 = "nvidia" if driver else "vfio-pci"
    cards = "".join(
        f'      - {{pci: "{slot}.0", model: "{model}", driver: {on}, iommu_group: {group}}}\n'
        for slot, group in GROUPS.items()
        for model, on in [("RTX A6000", a6000) if f"0000:{slot}.0" in A6000 else ("RTX 3090", "vfio-pci")]
    )
    vms = "".join(f"      {vmid}: {{config: {json.dumps(VM + text)}}}\n" for vmid, text in VMS.items())
    nvidia = "    nvidia: {version: 580.126.09, flavour: proprietary}\n" if driver else ""
    keep = json.dumps("blacklist nouveau\noptions nouveau modeset=0\n")
    files = f"    files:\n      /etc/modprobe.d/nvidia-installer-disable-nouveau.conf: {keep}\n"
    return f"simulated_fleet: 1\nhosts:\n  kpro5:\n    cluster: lab\n{nvidia}    cards:\n{cards}{files}    qemu:\n{vms}"
