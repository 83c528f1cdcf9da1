"""Hosts that hang, answer nonsense, or are edited by people: unknown with a reason, nothing done, others go on."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.scenarios.stage import LabStage
from tests.scenarios.stale import CONF

pytestmark = pytest.mark.lab


def test_plan_changes_nothing_on_any_host(lab_stage: LabStage) -> None:
    lab = lab_stage.lab
    lab_stage.spec("---\n".join(lab_stage.host(name) for name in lab.hosts if name != "kpro5"), "others.yaml")
    before = {host: lab.snapshot_tree(host) for host in lab.hosts}
    assert lab_stage.reconcile("plan").rc == 0
    assert lab_stage.reconcile("status").rc == 2
    assert {host: lab.snapshot_tree(host) for host in lab.hosts} == before


def test_a_hanging_nvidia_smi_is_unknown_and_does_not_pile_up(lab_stage: LabStage) -> None:
    lab = lab_stage.lab
    lab_stage.spec(lab_stage.host("box1"), "box1.yaml")
    lab.write("kpro5", "/run/lab-faults/nvidia-smi-hang", "")
    try:
        for _ in range(3):
            done = lab_stage.reconcile("--once", "-o", "json")
            assert done.rc == 1, done.out
            unknown = {(u["object"], u["layer"], u["reason"]) for u in done.json["unknown"]}
            assert ("Host/kpro5", "host.gpu-health", "nvidia-smi-hangs") in unknown
            assert not any(obj == "Host/box1" for obj, _, _ in unknown)
            assert done.json["performed"] == []
        alive = lab.run("kpro5", "pgrep -c -x nvidia-smi").stdout.strip()
        assert int(alive) <= 1
        assert lab_stage.conf(129).decode() == CONF
    finally:
        lab.delete("kpro5", "/run/lab-faults/nvidia-smi-hang")
        lab.kernel("hang", "kpro5", on=False)
    assert lab_stage.reconcile("--once").rc == 0


def test_a_hanging_cluster_file_system_holds_up_no_other_host(lab_stage: LabStage) -> None:
    lab = lab_stage.lab
    lab_stage.spec(lab_stage.host("box1"), "box1.yaml")
    lab.pve_hang("kpro5", "nodes/kpro5/lxc/129.conf")
    try:
        done = lab_stage.reconcile("status", "-o", "json")
        assert done.rc == 1
        ready = {o["object"]: o["conditions"][0]["status"] for o in done.json["objects"]}
        assert ready == {"Host/box1": "True", "Host/kpro5": "Unknown", "Container/ct129": "Unknown"}
    finally:
        lab.pve_release()


NONSENSE = {
    "garbage": "#!/bin/sh\nprintf 'Bonjour, le monde\\n'; exec cat >/dev/null\n",
    "huge": "#!/bin/sh\nhead -c 10000000 /dev/zero | tr '\\0' x; exec cat >/dev/null\n",
    "silent": "#!/bin/sh\nexec cat >/dev/null\n",
    "gone": "#!/bin/sh\nexit 3\n",
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_host_that_answers_nonsense_is_unknown(lab_stage: LabStage, kind: str) -> None:
    lab = lab_stage.lab
    lab_stage.spec(lab_stage.host("box1").replace('"root"', '"odd"'), "box1.yaml")
    lab.write("box1", "/usr/local/bin/odd-shell", NONSENSE[kind], 0o755)
    lab.run(
        "box1", "useradd -m -s /usr/local/bin/odd-shell odd; mkdir -p ~odd/.ssh; cp ~/.ssh/authorized_keys ~odd/.ssh/"
    )
    lab.run("box1", "chown -R odd ~odd/.ssh; usermod -p '*' odd")
    began = time.monotonic()
    done = lab_stage.reconcile("--once", "-o", "json")
    assert time.monotonic() - began < 90
    assert done.rc == 1, done.out + done.err
    reasons = {u["reason"] for u in done.json["unknown"] if u["object"] == "Host/box1"}
    assert reasons <= {"garbage", "too-long", "timed-out", "no-shell", "cut-off"}
    assert reasons
    assert {p["result"] for p in done.json["performed"]} == {"worked"}  # kpro5's container was put right all the same


def test_an_edit_between_look_and_step_survives(lab_stage: LabStage) -> None:
    """A person saves the config while our edit waits for Proxmox's lock."""
    lab = lab_stage.lab
    changed = CONF.replace("memory: 4096", "memory: 5120")
    with lab_stage_lock(lab_stage):
        process = subprocess.Popen(
            lab_stage.command("--once", "-o", "json"), stdout=subprocess.PIPE, text=True, env=lab_stage.env()
        )
        until = time.monotonic() + 240
        generation = lab.path("kpro5", "/var/lib/reconcile/generation")
        while not generation.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        lab_stage.write_conf(129, changed.encode())
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert json.loads(out)["performed"][0]["result"] == "stale"
    assert "memory: 5120" in lab_stage.conf(129).decode()


class lab_stage_lock:  # noqa: N801 - used as a statement
    """Proxmox's lock on the container's config, held by a process in the host."""

    def __init__(self, stage: LabStage) -> None:
        self._stage = stage

    def __enter__(self) -> None:
        lab = self._stage.lab
        lab.run("kpro5", "mkdir -p /run/lock/lxc; rm -f /run/held; mkfifo /run/held")
        hold = (
            "exec 9>>/run/lock/lxc/pve-config-129.lock; flock 9; echo up >/run/lock-is-held; cat /run/held >/dev/null"
        )
        lab.run("kpro5", f"rm -f /run/lock-is-held; setsid sh -c '{hold}' >/dev/null 2>&1 </dev/null &")
        until = time.monotonic() + 10
        while not Path(lab.path("kpro5", "/run/lock-is-held")).exists():
            assert time.monotonic() < until
            time.sleep(0.01)

    def __exit__(self, *_: object) -> None:
        self._stage.lab.run("kpro5", "echo go >/run/held; rm -f /run/held", timeout=20)
