"""A move, or a take-over, is cut off at any point; the next run comes to the same end, and nothing was done twice."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from controller.layers.shared.truth import Fleet
from controller.spec.load import load
from controller.world.sim import file as simfile
from controller.world.sim.faults import Fault, Killed, Moment, Name
from tests.scenarios.move import sim_file, specification
from tests.scenarios.stage import LabStage, SimStage
from tests.scenarios.test_interrupted import begin
from tests.scenarios.test_move import arrived
from tests.sim.controllers import Controller

ACTIONS = {"move": "move-container", "take-over": "take-over-container"}
MOMENTS = (Moment.BEFORE, Moment.DURING, Moment.AFTER)


# --- in the simulated fleet, at each moment of each step ---


def fleet_and_specs(way: str, tmp_path: Path) -> tuple[Fleet, Controller]:
    stage = SimStage(tmp_path, sim_file())
    specification(stage, kpro6="active" if way == "move" else "decommissioned")
    made = simfile.load(sim_file(), "move.sim.yaml")
    wanted = load({"spec.yaml": (stage.specs / "spec.yaml").read_bytes()})
    first = Controller(made, wanted=wanted)
    if way == "take-over":
        first.world.inject(Fault(Name.POWER_OFF, "kpro6"))
    return made, first


@pytest.mark.parametrize("way", ACTIONS)
@pytest.mark.parametrize("what", [Name.KILLED, Name.CONNECTION_LOST])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("step", range(4))
def test_cut_off_anywhere_in_the_simulation(way: str, what: Name, moment: Moment, step: int, tmp_path: Path) -> None:
    made, first = fleet_and_specs(way, tmp_path)
    chain = (ACTIONS[way], "edit-config", "edit-config", "start")
    host = "kpro6" if chain[step] == "move-container" else "kpro5"
    first.world.inject(Fault(what, host, moment, chain[step], skip=int(step == 2)))
    with contextlib.suppress(Killed):
        first.once()
    assert first.world.armed == ()
    second = Controller(made, wanted=first.specs)
    second.world.clock.wait(1)
    report = second.once()
    assert report.upcoming.in_sync, report.upcoming.judged
    assert [host for host, truth in made.hosts.items() if 129 in truth.containers] == ["kpro5"]
    assert second.once().ended == []


# --- in the lab, at moments that can be seen from outside ---


def called(host: str, word: str) -> Callable[[LabStage], bool]:
    def seen(stage: LabStage) -> bool:
        log = stage.lab.path(host, "/run/lab-log/pct.log")
        return log.exists() and word in log.read_text().replace("restart", "")

    return seen


def laid_down(host: str) -> Callable[[LabStage], bool]:
    return lambda stage: stage.lab.path(host, "/var/lib/reconcile/generation").exists()


def came(stage: LabStage) -> bool:
    """Asked of that place alone: whoever looks through all of them may miss it as it moves."""
    try:
        stage.lab.pve_read("nodes/kpro5/lxc/129.conf", "kpro5")
    except FileNotFoundError:
        return False
    return True


MOVING: dict[str, tuple[str, Callable[[LabStage], bool]]] = {
    "laid-down": ("kpro6", laid_down("kpro6")),
    "shutting-down": ("kpro6", called("kpro6", "shutdown")),
    "migrating": ("kpro6", called("kpro6", "migrate")),
    "arrived": ("kpro6", came),
    "edited": ("kpro5", laid_down("kpro5")),
    "starting": ("kpro5", called("kpro5", "start")),
}
TAKING: dict[str, tuple[str, Callable[[LabStage], bool]]] = {
    "laid-down": ("kpro5", laid_down("kpro5")),
    "arrived": ("kpro5", came),
    "starting": ("kpro5", called("kpro5", "start")),
}


def wait_for(stage: LabStage, moment: Callable[[LabStage], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 240
    while not moment(stage):
        assert time.monotonic() < until, "the moment never came"
        if process.poll() is not None:
            return
        time.sleep(0.005)


def cut_off(stage: LabStage, way: str, host: str, moment: Callable[[LabStage], bool]) -> None:
    process = begin(stage)
    wait_for(stage, moment, process)
    if way == "killed":
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        return
    stage.lab.cut(host)
    try:
        process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    stage.lab.heal()


def same_end(stage: LabStage) -> None:
    done = stage.reconcile("--once")
    assert done.rc == 0, done.out + done.err
    arrived(stage)


@pytest.mark.lab
@pytest.mark.parametrize("way", ["killed", "disconnected"])
@pytest.mark.parametrize("moment", MOVING)
def test_a_move_is_cut_off(moving_lab_stage: LabStage, moment: str, way: str) -> None:
    cut_off(moving_lab_stage, way, *MOVING[moment])
    same_end(moving_lab_stage)
    log = moving_lab_stage.lab.read("kpro6", "/run/lab-log/pct.log").decode()
    assert len([line for line in log.splitlines() if "migrate" in line]) == 1, log


@pytest.mark.lab
@pytest.mark.parametrize("way", ["killed", "disconnected"])
@pytest.mark.parametrize("moment", TAKING)
def test_a_take_over_is_cut_off(moving_lab_stage: LabStage, moment: str, way: str) -> None:
    moving_lab_stage.power_off("kpro6")
    specification(moving_lab_stage, kpro6="decommissioned")
    cut_off(moving_lab_stage, way, *TAKING[moment])
    same_end(moving_lab_stage)
