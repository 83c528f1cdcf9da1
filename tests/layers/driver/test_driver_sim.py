"""Kernel, driver and userland in the simulated fleet: effect, physics and the lab agree on the chain and its ends."""

from __future__ import annotations

import contextlib
import hashlib

import pytest

from controller.layers.shared import kernel_physics, pve_physics
from controller.layers.shared.truth import Fleet, Host, Initramfs, Module
from controller.run.once import Report
from controller.spec.load import load
from controller.world.sim.faults import Fault, Killed, Name
from tests.sim.controllers import Controller
from tests.sim.fleets import fleet

VERSION, OLD = "580.126.09", "570.86.15"
PVE, NEXT = "6.8.12-9-pve", "6.8.12-11-pve"
URL = f"https://us.download.nvidia.com/XFree86/Linux-x86_64/{VERSION}/NVIDIA-Linux-x86_64-{VERSION}.run"
PACKAGES = ["dkms", *(f"proxmox-headers-{kernel}" for kernel in (PVE, NEXT)), "proxmox-default-headers"]
A, B, VM = "0000:4f:00.0", "0000:ce:00.0", "0000:17:00.0"

STORY = f"""\
hosts:
  kpro5:
    cluster: one
    kernel: {PVE}
    repository: [{", ".join(PACKAGES)}]
    cards:
      - {{pci: "17:00.0", model: RTX 3090, driver: vfio-pci, iommu_group: 28}}
      - {{pci: "4f:00.0", model: RTX A6000, driver: vfio-pci, iommu_group: 41}}
      - {{pci: "ce:00.0", model: RTX A6000, driver: vfio-pci, iommu_group: 67}}
    lxc: {{129: {{running: false, config: "hostname: llm\\nostype: debian\\nrootfs: ceph:vm-129-disk-0\\n"}}}}
clusters:
  one:
    trees: [{{files: {{storage.cfg: "rbd: ceph\\n\\tcontent rootdir\\n"}}}}]
downloads: {{"{URL}": "the installer of {VERSION}"}}
"""


def spec(version: str = VERSION, more: str = "", holders: str = "", container: bool = True) -> bytes:
    text = f"""\
kind: Host
name: kpro5
address: 192.0.2.5
platform: proxmox
nvidia:
  driver: {{version: {version}, source: runfile, kernel_modules: proprietary{more}}}
  holders: [{holders}]
  gpus:
    - {{pci: "17:00.0", model: RTX 3090, owner: vms}}
    - {{pci: "4f:00.0", model: RTX A6000, owner: containers}}
    - {{pci: "ce:00.0", model: RTX A6000, owner: containers}}
policy: {{mode: enforce, allow: [change-driver, rebind-gpu]}}
"""
    if container:
        text += """\
---
kind: Container
name: ct129
id: 129
host: kpro5
gpus: {count: 2}
policy: {mode: enforce, allow: [change-driver, restart-container, edit-container-config]}
"""
    return text.encode()


def world(**changes: object) -> tuple[Fleet, Host]:
    made = fleet(STORY)
    host = made.hosts["kpro5"]
    for name, value in changes.items():
        setattr(host, name, value)
    return made, host


def once(made: Fleet, text: bytes | None = None) -> Report:
    return Controller(made, wanted=load({"s.yaml": text or spec()})).once()


def blocks(report: Report) -> set[str]:
    return {block.reason for _, block in report.upcoming.blocked}


def test_from_nothing_to_a_container_whose_libraries_are_the_modules() -> None:
    made, host = world(initramfs={PVE: Initramfs(["nouveau"])})
    report = once(made)
    assert report.upcoming.in_sync, [j for j in report.upcoming.judged if j.verdict]
    done = [ended.step.action for ended in report.ended]
    order = ["install-headers", "keep-nouveau-off", "update-initramfs", "bind-gpu", "fetch-driver", "install-driver"]
    assert [done.index(action) for action in order] == sorted(done.index(action) for action in order)
    assert done.index("load-driver") < done.index("edit-config") < done.index("start") < done.index("install-userland")
    assert host.loaded["nvidia"] == Module(VERSION, "proprietary")
    assert [host.functions[pci].driver for pci in (VM, A, B)] == ["vfio-pci", "nvidia", "nvidia"]
    assert made.userlands == {"ceph:vm-129-disk-0": VERSION}
    assert once(made).ended == []


def test_after_a_power_cut_it_is_all_there_again_with_the_next_kernel() -> None:
    """Failures 3 and 6."""
    made, host = world(kernels=[NEXT])
    once(made)
    pve_physics.power_off(made, host)
    made.now += 60
    pve_physics.power_on(made, host)
    assert host.kernel == NEXT
    assert host.loaded["nvidia"].version == VERSION
    assert host.functions[VM].driver == "vfio-pci"


@pytest.mark.parametrize(
    ("changes", "text", "reason"),
    [
        ({"repository": ["dkms"], "lists_fresh": True}, spec(), "no-headers-package"),
        ({"secure_boot": True}, spec(), "secure-boot"),
        ({"kernels": ["6.17.9-1-pve"]}, spec("580.119.02"), "kernel-too-new"),
        ({}, spec().replace(b'    - {pci: "17:00.0", model: RTX 3090, owner: vms}\n', b""), "unlisted-gpu"),
    ],
)
def test_each_obstacle_is_a_block_and_nothing_is_done(changes: dict[str, object], text: bytes, reason: str) -> None:
    made, host = world(**changes)
    if reason == "unlisted-gpu":
        kernel_physics.unbind(made, host, VM)
    report = once(made, text)
    assert report.ended == []
    assert reason in blocks(report)
    assert host.generation == 0


def test_a_download_that_does_not_come_is_told_of_and_tried_once_in_a_pass() -> None:
    made, _ = world()
    made.downloads.clear()
    report = once(made)
    assert [message for message in report.failed.values() if "cannot fetch" in message]
    assert [ended.step.action for ended in report.ended].count("fetch-driver") <= 2  # begun, and its failure
    made.downloads[URL] = f"the installer of {VERSION}"
    assert once(made).upcoming.in_sync


def test_another_digest_than_the_specs() -> None:
    made, host = world()
    report = once(made, spec(more=f", sha256: {'0' * 64}"))
    assert [message for message in report.failed.values() if "thrown away" in message]
    assert not [path for path in host.files if "drivers/" in path]


def driven(with_old_installer: bool = True) -> tuple[Fleet, Host]:
    """An older driver loaded, CT 129 on it with libraries of it."""
    made, host = world()
    once(made)
    old = Module(OLD, "proprietary")
    host.modules[PVE].update({"nvidia": old, "nvidia-uvm": old})
    host.loaded["nvidia"] = host.loaded["nvidia-uvm"] = old
    host.userspace, host.dkms = OLD, {OLD: "proprietary"}
    made.userlands["ceph:vm-129-disk-0"] = OLD
    if with_old_installer:
        path = f"/var/lib/reconcile/drivers/NVIDIA-Linux-x86_64-{OLD}.run"
        kernel_physics.write(made, host, path, "the old one")
        kernel_physics.write(made, host, f"{path}.sha256", hashlib.sha256(b"the old one").hexdigest() + "\n")
    host.functions[A].gpu.used_by.append("ct:129")  # type: ignore[union-attr]
    made.touch(host)
    return made, host


def test_an_upgrade_takes_host_and_container_together() -> None:
    """Failures 4 and 5."""
    made, host = driven()
    host.services.append("dcgm")
    host.functions[B].gpu.used_by.append("unit:dcgm")  # type: ignore[union-attr]
    assert "module-in-use" in blocks(once(made))  # a service that the spec does not name
    assert host.loaded["nvidia"].version == OLD
    report = once(made, spec(holders="dcgm"))
    assert report.upcoming.in_sync, report.upcoming.blocked
    assert host.loaded["nvidia"].version == host.userspace == VERSION
    assert made.userlands == {"ceph:vm-129-disk-0": VERSION}
    assert 129 in host.containers
    assert host.services == ["dcgm"]


@pytest.mark.parametrize("user", ["ct:131", "host:python3"])
def test_nobody_else_is_ripped_from_under(user: str) -> None:
    made, host = driven()
    host.functions[A].gpu.used_by.append(user)  # type: ignore[union-attr]
    report = once(made)
    assert "module-in-use" in blocks(report)
    assert report.ended == []


@pytest.mark.parametrize("with_old_installer", [True, False])
def test_one_that_does_not_load_is_not_tried_twice(with_old_installer: bool) -> None:
    """Failure 26, and back to the old one where its installer is there."""
    made, host = driven(with_old_installer)
    host.module_failures[f"{VERSION} proprietary"] = "Input/output error"
    report = once(made)
    assert [message for message in report.failed.values() if "did not load" in message]
    assert "did-not-load" in blocks(report)
    assert [ended.step.action for ended in report.ended].count("load-driver") == 1
    assert ("nvidia" in host.loaded) is with_old_installer
    if with_old_installer:
        assert host.loaded["nvidia"].version == OLD
        assert host.userspace == OLD
    assert once(made).ended == [] or not with_old_installer


@pytest.mark.parametrize(
    "action",
    ["install-headers", "keep-nouveau-off", "fetch-driver", "install-driver", "load-driver", "install-userland"],
)
@pytest.mark.parametrize("fault", [Name.KILLED, Name.CONNECTION_LOST, Name.REPLY_LOST])
def test_cut_off_at_any_step_it_comes_to_the_same_end(action: str, fault: Name) -> None:
    made, host = world()
    first = Controller(made, wanted=load({"s.yaml": spec()}))
    first.world.inject(Fault(fault, "kpro5", action=action))
    with contextlib.suppress(Killed):
        first.once()
    again = Controller(made, wanted=load({"s.yaml": spec()})).once()
    assert again.upcoming.in_sync, again.upcoming.blocked
    assert host.loaded["nvidia"].version == VERSION
    assert made.userlands == {"ceph:vm-129-disk-0": VERSION}
