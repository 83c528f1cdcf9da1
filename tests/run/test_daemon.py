"""`reconcile run` as a process: the simulated fleet in real time, spec files saved as editors do."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from controller.run.memory import Event, Memory
from controller.run.session import memory_dir
from controller.spec.ref import Ref
from tests.sim.controllers import SPECS

PATIENCE = 240.0  # on a machine that is busy with the lab


class Process:
    """`reconcile run` on a copy of the demo's specs and fleet."""

    def __init__(self, folder: Path, fleet: Path = SPECS / "fleet.sim.yaml") -> None:
        self.folder = folder
        self.specs = folder / "specs"
        self.state = folder / "state"
        self.fleet = folder / "fleet.sim.yaml"
        shutil.copy(fleet, self.fleet)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = folder / "log"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*self.command("run"), "--listen", f"127.0.0.1:{self.port}"], stderr=log)

    def command(self, *args: str) -> list[str]:
        common = ["--specs", str(self.specs), "--fleet", f"sim:{self.fleet}", "--state", str(self.state)]
        return [sys.executable, "-m", "controller", *args, *common]

    def call(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*args), capture_output=True, text=True, timeout=PATIENCE, check=False)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return answer.read().decode()

    def status(self) -> dict[str, object]:
        return json.loads(self.get("/status"))

    def metric(self, start: str) -> float | None:
        try:
            lines = self.get("/metrics").splitlines()
        except OSError:
            return None
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start)), None)

    def is_ready(self, name: str = "ct129") -> bool:
        series = (
            f'reconcile_object_condition{{kind="Container",name="{name}",reason="InSync",status="True",type="Ready"}}'
        )
        return self.metric(series) == 1.0

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def events(self, kind: str | None = None) -> list[Event]:
        with contextlib.closing(Memory.open(memory_dir(f"sim:{self.fleet}", self.state))) as memory:
            return memory.events(kind=kind)

    def stops(self) -> list[Event]:
        """What was done to stop the container."""
        return [event for event in self.events("step-started") if event.action in ("stop", "shutdown")]


def wait_for(what: Callable[[], object], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"did not come about within {seconds} s"
        time.sleep(0.05)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    made = Process(tmp_path)
    made.specs.mkdir()
    for file in SPECS.glob("*.yaml"):
        if not file.name.endswith(".sim.yaml"):
            shutil.copy(file, made.specs)
    made.start()
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
            made.process.wait()


def edited(process: Process, state: str) -> bytes:
    text = (SPECS / "ct129.yaml").read_text()
    return text.replace("state: running", f"state: {state}").encode()


def in_place(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def renamed_over(path: Path, data: bytes) -> None:
    beside = path.with_name(".tmp-save")
    beside.write_bytes(data)
    beside.rename(path)


def with_backup(path: Path, data: bytes) -> None:
    """As vim saves: the old one out of the way, a new one in its place."""
    path.rename(path.with_name(path.name + "~"))
    path.write_bytes(data)


def checked_out(path: Path, data: bytes) -> None:
    """As version control: other files come, and the file is taken away and made anew, one byte after the other."""
    for n in range(50):
        path.with_name(f"more{n}.yaml").write_text(
            f"kind: Host\nname: h{n}\naddress: 10.9.0.{n + 1}\nplatform: linux\n"
        )
    path.unlink()
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(data), 64):
            file.write(data[at : at + 64])


def folder_swapped(path: Path, data: bytes) -> None:
    """As deployment tools do: another folder of the same name."""
    other = path.parent.with_name("other")
    shutil.copytree(path.parent, other)
    (other / path.name).write_bytes(data)
    path.parent.rename(path.parent.with_name("before"))
    other.rename(path.parent)


def test_it_looks_after_the_fleet_answers_and_stops(process):
    wait_for(process.is_ready)
    assert process.get("/healthz").strip()
    assert process.get("/readyz").strip()
    assert process.stop() == 0
    assert [e.action for e in process.events("step-ended")] == ["edit-config", "restart"]
    lines = [json.loads(line) for line in process.log.read_text().splitlines()]
    assert {"restart", "edit-config"} <= {line.get("action") for line in lines}
    assert lines[-1]["event"] == "stopped"


@pytest.mark.alone
@pytest.mark.parametrize(
    "save", [in_place, renamed_over, with_backup, checked_out, folder_swapped], ids=lambda f: f.__name__
)
def test_an_edit_is_acted_on_at_once_however_it_is_saved(process, save):
    wait_for(process.is_ready)
    began = time.time()
    save(process.specs / "ct129.yaml", edited(process, "stopped"))
    wait_for(process.stops)
    [stop] = process.stops()
    wait_for(lambda: logged(process, stop.step))
    acted = datetime.fromisoformat(logged(process, stop.step)[0]["at"])
    assert acted.timestamp() - began < 5.0, "a second on a quiet machine"
    assert process.metric("reconcile_spec_errors") == 0.0
    assert len([e for e in process.events("spec") if e.object == Ref("Container", "ct129")]) == 2


def logged(process: Process, step: str) -> list[dict[str, str]]:
    """The lines of the log about a step."""
    lines = process.log.read_text().splitlines(keepends=True)
    return [line for line in map(json.loads, (x for x in lines if x.endswith("\n"))) if line.get("step") == step]


def test_a_broken_file_and_an_empty_folder_do_nothing(process, tmp_path):
    wait_for(process.is_ready)
    steps = len(process.events("step-started"))
    good = (process.specs / "ct129.yaml").read_bytes()
    (process.specs / "ct129.yaml").write_text("kind: Container\nname: ct129\n  host: [")
    wait_for(lambda: (process.metric("reconcile_spec_errors") or 0) >= 1)
    (process.specs / "ct129.yaml").write_bytes(good)
    wait_for(lambda: process.metric("reconcile_spec_errors") == 0)
    away = tmp_path / "away"
    process.specs.rename(away)
    wait_for(lambda: (process.metric("reconcile_spec_errors") or 0) >= 1)
    assert process.is_ready()
    process.stop(signal.SIGKILL)
    process.start()
    wait_for(process.is_ready)
    assert process.metric("reconcile_spec_errors") == 1.0
    away.rename(process.specs)
    wait_for(lambda: process.metric("reconcile_spec_errors") == 0)
    assert len(process.events("step-started")) == steps


def test_killed_at_random_moments_no_event_is_lost_or_there_twice(process):
    chance = random.Random(7)
    for _ in range(6):
        time.sleep(chance.uniform(0.0, 0.8))  # what is tested is that it does not matter when
        process.stop(signal.SIGKILL)
        process.start()
    wait_for(process.is_ready)
    wait_for(lambda: _keys(process, "step-started") == _keys(process, "step-ended"))
    worked = [e.action for e in process.events("step-ended") if e.result == "worked"]
    assert set(worked) <= {"edit-config", "restart"}
    assert worked.count("restart") <= 1
    assert process.stop() == 0


def _keys(process: Process, kind: str) -> list[str]:
    return sorted(event.key.rsplit(":", 1)[0] for event in process.events(kind))


def test_what_people_decide_reaches_the_running_controller(process):
    wait_for(process.is_ready)
    assert process.call("suspend", "ct129", "--reason", "I am at it").returncode == 0
    wait_for(lambda: process.metric('reconcile_object_suspended{kind="Container",name="ct129"}') == 1.0)
    (process.specs / "ct129.yaml").write_bytes(edited(process, "stopped"))
    wait_for(lambda: process.metric('reconcile_drift{kind="Container",layer="container.power",name="ct129"}') == 1.0)
    assert process.stops() == []
    assert process.call("resume", "ct129").returncode == 0
    wait_for(process.stops)


def test_a_second_one_with_the_same_state_is_refused(process):
    wait_for(process.is_ready)
    second = process.call("run")
    assert second.returncode == 1
    assert str(process.process.pid) in second.stderr


def test_it_waits_for_what_is_there_and_an_idle_one_costs_nothing(process):
    wait_for(process.is_ready)
    before = _cpu(process.process.pid)
    time.sleep(5.0)
    assert _cpu(process.process.pid) - before < 1.0  # of five seconds, on a machine that may be busy


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
