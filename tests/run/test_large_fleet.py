"""The loop over 200 hosts, ten of them dead or slow."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from controller.layers.shared.truth import Fleet
from controller.run.loop import PERIOD
from controller.world.sim import file as simfile
from controller.world.sim.faults import Fault, Name
from tests.run.test_daemon import Process, logged, wait_for
from tests.sim.loops import Player

HOSTS = 200
DEAD = range(0, 5)
SLOW = range(5, 10)


def fleet_text() -> str:
    """Nodes alone in their clusters, with a container each."""
    host = """  h{n}:
    cluster: c{n}
    lxc:
      {id}:
        running: true
        config: |
          arch: amd64
          hostname: ct{n}
          memory: 1024
          ostype: debian
          rootfs: local-lvm:vm-{id}-disk-0,size=8G
"""
    return "simulated_fleet: 1\nhosts:\n" + "".join(host.format(n=n, id=100 + n) for n in range(HOSTS))


def spec_text(n: int, state: str = "running") -> bytes:
    return f"""kind: Host
name: h{n}
address: 10.9.{n // 250}.{n % 250 + 1}
platform: proxmox
policy: {{mode: enforce}}
---
kind: Container
name: ct{n}
id: {100 + n}
host: h{n}
state: {state}
policy: {{mode: enforce, allow: [restart-container]}}
""".encode()


def fleet() -> Fleet:
    return simfile.load(fleet_text(), "large.sim.yaml")


def test_an_hour_costs_the_same_at_its_end_as_at_its_beginning(tmp_path: Path) -> None:
    player = Player(fleet(), tmp_path / "state", {f"h{n}.yaml": spec_text(n) for n in range(HOSTS)})
    for n in DEAD:
        player.world.inject(Fault(Name.UNREACHABLE, f"h{n}"))
    player.play(60, lambda: player.loop.picture().observed)
    assert player.play(60, lambda: player.condition("Container/ct50") == "True")
    assert player.condition("Container/ct0") == "Unknown"
    player.play(200)  # everything that is remembered for a while is there
    events = len(player.memory.events())
    cpu, objects = [], []
    for _ in range(6):
        began = time.process_time()
        player.play(600)
        cpu.append(time.process_time() - began)
        gc.collect()
        objects.append(len(gc.get_objects()))
    print(f"{min(cpu) / (HOSTS * 600 / PERIOD) * 1e3:.2f} ms a look; objects: {objects}")
    assert min(cpu[3:]) < 1.5 * min(cpu[:3])
    assert objects[-1] < objects[1] + 1000
    assert len(player.memory.events()) == events


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    text = tmp_path / "large.yaml"
    text.write_text(fleet_text() + f"unreachable: [{', '.join(f'h{n}' for n in DEAD)}]\n")
    made = Process(tmp_path, fleet=text)
    made.specs.mkdir()
    for n in range(HOSTS):
        (made.specs / f"h{n}.yaml").write_bytes(spec_text(n))
    made.start()
    try:
        yield made
    finally:
        made.stop(signal.SIGKILL)


@pytest.mark.alone
def test_a_change_on_a_good_host_is_acted_on_at_once(process: Process) -> None:
    wait_for(lambda: process.is_ready("ct50"), 120)
    assert process.metric('reconcile_host_up{host="h50"}') == 1.0
    for n in (20, 50, 90):
        began = time.time()
        (process.specs / f"h{n}.yaml").write_bytes(spec_text(n, "stopped"))
        wait_for(lambda n=n: [e for e in process.stops() if str(e.object) == f"Container/ct{n}"])
        step = next(e.step for e in process.stops() if str(e.object) == f"Container/ct{n}")
        wait_for(lambda step=step: logged(process, step))
        took = datetime.fromisoformat(logged(process, step)[0]["at"]).timestamp() - began
        print(f"acted on after {took:.2f} s")
        assert took < 5.0, "a second on a quiet machine"
