"""A run is cut off at any point; the next one comes to the same end, and nothing was done twice."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.scenarios.stage import LabStage
from tests.scenarios.stale import CONF

pytestmark = pytest.mark.lab


def pct_log(stage: LabStage) -> list[str]:
    """The calls of pct on kpro5 since the scenario began."""
    return stage.lab.run("kpro5", "cat /run/lab-log/pct.log 2>/dev/null").stdout.splitlines()


def asked(stage: LabStage) -> bool:
    return stage.lab.path("kpro5", "/run/reconcile").exists()


def laid_down(stage: LabStage) -> bool:
    return stage.lab.path("kpro5", "/var/lib/reconcile/generation").exists()


def edited(stage: LabStage) -> bool:
    return stage.conf(129).decode() != CONF


def shutting_down(stage: LabStage) -> bool:
    log = stage.lab.path("kpro5", "/run/lab-log/pct.log")
    return log.exists() and "shutdown" in log.read_text()


def starting(stage: LabStage) -> bool:
    log = stage.lab.path("kpro5", "/run/lab-log/pct.log")
    return log.exists() and "start" in log.read_text().replace("restart", "")


MOMENTS: dict[str, Callable[[LabStage], bool]] = {
    "looked": asked,
    "laid-down": laid_down,
    "edited": edited,
    "shutting-down": shutting_down,
    "starting": starting,
}


def begin(stage: LabStage) -> subprocess.Popen[str]:
    return subprocess.Popen(
        stage.command("--once"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=stage.env()
    )


def wait_for(stage: LabStage, moment: Callable[[LabStage], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 240
    while not moment(stage):
        assert time.monotonic() < until, "the moment never came"
        if process.poll() is not None:
            return
        time.sleep(0.005)


def same_end(stage: LabStage) -> None:
    """The next run's end: as wanted, restarted once by all runs together, and a further run does nothing."""
    done = stage.reconcile("--once")
    assert done.rc == 0, done.out + done.err
    assert [stage.opens(129, f"/dev/nvidia{n}") for n in range(4)] == ["absent", "absent", "allowed", "allowed"]
    calls = [line for line in pct_log(stage) if "shutdown" in line]
    assert len(calls) == 1, calls
    kept = stage.lab.run("kpro5", "find /var/lib/reconcile/kept -name '129.conf@*' ! -name '*.marker'").stdout.split()
    assert len(kept) == 1
    assert stage.lab.read("kpro5", kept[0]).decode() == CONF
    assert "Nothing was done" in stage.reconcile("--once").out


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed(lab_stage: LabStage, moment: str) -> None:
    process = begin(lab_stage)
    wait_for(lab_stage, MOMENTS[moment], process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    same_end(lab_stage)


@pytest.mark.parametrize("moment", MOMENTS)
def test_disconnected(lab_stage: LabStage, moment: str) -> None:
    process = begin(lab_stage)
    wait_for(lab_stage, MOMENTS[moment], process)
    lab_stage.lab.cut("kpro5")
    try:
        # It gives up by itself, or is ended like one whose network is gone for good.
        process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    lab_stage.lab.heal()
    same_end(lab_stage)


def test_two_controllers_at_once(lab_stage: LabStage) -> None:
    lab_stage.lab.write("kpro5", "/run/lab-faults/pct-shutdown-ignored", "")
    first = begin(lab_stage)
    wait_for(lab_stage, shutting_down, first)
    second = lab_stage.reconcile("--once", "--timeout", "1", state="other-state")
    assert second.rc == 2
    assert "held by" in second.out or "runs on kpro5" in second.out, second.out
    lab_stage.lab.run("kpro5", "rm /run/lab-faults/pct-shutdown-ignored")
    out, _ = first.communicate(timeout=300)
    assert first.returncode == 0, out
    same_end(lab_stage)


def test_the_lease_of_a_controller_that_was_killed_runs_out(lab_stage: LabStage) -> None:
    process = begin(lab_stage)
    wait_for(lab_stage, edited, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    refused = lab_stage.reconcile("--once", state="other-state")
    assert refused.rc == 2
    assert "held by" in refused.out
    same_end(lab_stage)


def test_the_same_state_directory_is_not_used_twice(lab_stage: LabStage) -> None:
    lab_stage.lab.write("kpro5", "/run/lab-faults/pct-shutdown-ignored", "")
    first = begin(lab_stage)
    wait_for(lab_stage, shutting_down, first)
    second = lab_stage.reconcile("--once")
    assert second.rc == 1
    assert str(first.pid) in second.err
    lab_stage.lab.run("kpro5", "rm /run/lab-faults/pct-shutdown-ignored")
    first.communicate(timeout=300)
    assert first.returncode == 0
