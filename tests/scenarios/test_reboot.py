"""A host of the lab is rebooted by a step, and the pass goes on when it is back."""

from __future__ import annotations

import json

import pytest

from controller.core import observe
from controller.core.words import InSync
from controller.run import state
from controller.run.ended import Result
from controller.run.session import WallClock
from controller.spec.load import load
from controller.spec.ref import Ref
from controller.world.fleet import SshWorld
from tests.run.test_reboot import layers, once
from tests.scenarios.stage import LabStage

pytestmark = pytest.mark.lab


def test_a_host_is_rebooted_and_waited_for(moving_lab_stage: LabStage) -> None:
    lab, place = moving_lab_stage.lab, moving_lab_stage.place / "own"
    hosts = [{"kind": "Host", **lab.host_spec(name), "policy": {"mode": "enforce"}} for name in lab.proxmox]
    wanted = load({"s.yaml": "\n---\n".join(json.dumps(host) for host in hosts).encode()})
    lab.pve_write("nodes/kpro5/lxc/130.conf", "arch: amd64\n")
    boot = lab.read("kpro5", "/proc/sys/kernel/random/boot_id").decode().strip()
    made = layers(boot)
    world = SshWorld(wanted, place, state.identity(place), made)
    try:
        report, told = once(world, WallClock(), made, wanted, permitted=True)
    finally:
        world.close()
    assert [(e.step.action, e.result) for e in told.ended_] == [("reboot-host", Result.WORKED)]
    assert report.upcoming.verdict(Ref("Host", "kpro5"), "host.test") == InSync()
    units = observe.units(report.facts["kpro5"])
    assert units is not None
    assert units.boot_id != boot
