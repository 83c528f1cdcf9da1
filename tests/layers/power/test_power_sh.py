"""The script that starts, stops and restarts, for real, with a stand-in for pct."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from controller.layers import power
from tests.layers.scripts import Machine

CONF = "/etc/pve/nodes/kpro5/lxc/129.conf"
TEXT = b"arch: amd64\n"
SEEN = hashlib.sha256(TEXT).hexdigest()
TICKS = 100000

# What pct does to the machine's tree: the command socket comes and goes, the init gets a new start.
PCT = """case $1 in
shutdown) echo 'Num RefCount' >{root}/proc/net/unix ;;
start)
	echo '0: 2 0 10000 1 1 77 @/var/lib/lxc/129/command' >>{root}/proc/net/unix
	echo "4711 (init) S 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 200000 0" >{root}/proc/4711/stat ;;
esac"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.write(CONF, TEXT)
    machine.starts(129, ticks=TICKS)
    machine.command("pct", PCT.replace("{root}", str(machine.root)))
    machine.command("sleep", "exit 0")
    return machine


def halted(machine: Machine) -> None:
    machine.write("/proc/net/unix", "Num RefCount\n")


def do(machine: Machine, action: str, since: int = TICKS, seen: str = SEEN, why: str = "why") -> int:
    done = machine.run(power.POWER, (action, "129", seen, str(since), why))
    machine.log.append(done.stderr.decode())
    return done.returncode


def pct(machine: Machine) -> list[str]:
    return [call for call in machine.calls if call.startswith("pct")]


SHUTDOWN = "pct shutdown 129 --timeout 60 --forceStop 1"


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_a_restart_stops_and_starts_once(machine: Machine, shell: str) -> None:
    machine.shell = shell
    machine.write("/run/reconcile/edited/129", "1\nold\n")
    assert do(machine, "restart") == 0, machine.log
    assert pct(machine) == [SHUTDOWN, "pct start 129"]
    assert machine.path("/run/reconcile/restarted/129").read_text() == "200000 why\n"
    assert not machine.path("/run/reconcile/edited/129").exists()


def test_a_start(machine: Machine) -> None:
    halted(machine)
    assert do(machine, "start", since=0, why="") == 0, machine.log
    assert pct(machine) == ["pct start 129"]


def test_a_stop(machine: Machine) -> None:
    assert do(machine, "stop") == 0
    assert pct(machine) == [SHUTDOWN]


STALE = {
    "its config has changed": lambda m: m.write(CONF, "arch: arm64\n"),
    "it has moved": lambda m: m.path(CONF).unlink(),
    "it was restarted meanwhile": lambda m: m.starts(129, ticks=TICKS + 1),
    "it was stopped meanwhile": lambda m: m.command("lxc-info", "exit 1"),
    "HA manages it meanwhile": lambda m: m.write("/etc/pve/ha/resources.cfg", "vm: 100\n\nct: 129\n\tstate started\n"),
}


@pytest.mark.parametrize("name", STALE)
@pytest.mark.parametrize("action", ["restart", "stop"])
def test_not_as_it_was_seen(machine: Machine, name: str, action: str) -> None:
    STALE[name](machine)
    assert do(machine, action) == 75
    assert pct(machine) == []


def test_a_start_of_what_runs_already(machine: Machine) -> None:
    assert do(machine, "start", since=0) == 75
    assert pct(machine) == []


def test_another_container_that_ha_manages_is_nothing_to_it(machine: Machine) -> None:
    machine.write("/etc/pve/ha/resources.cfg", "ct: 1290\n\nct: 12\n")
    assert do(machine, "stop") == 0


def test_a_start_that_only_queues_is_no_start(machine: Machine) -> None:
    halted(machine)
    machine.command("pct", "echo 'Requesting HA start for CT 129'; exit 0")
    assert do(machine, "start", since=0) == 1
    assert "does not run after pct start (exit 0)" in machine.log[-1]


def test_a_start_that_fails(machine: Machine) -> None:
    halted(machine)
    machine.command("pct", "echo 'startup for container 129 failed' >&2; exit 255")
    assert do(machine, "start", since=0) == 1
    assert "startup for container 129 failed" in machine.log[-1]
    assert "exit 255" in machine.log[-1]


def test_a_shutdown_that_does_not_stop_it_is_not_followed_by_a_start(machine: Machine) -> None:
    machine.command("pct", "exit 0")
    assert do(machine, "restart") == 1
    assert pct(machine) == [SHUTDOWN]


def test_pct_cannot_swallow_what_comes_after_it(machine: Machine) -> None:
    machine.command("pct", "cat >/dev/null\n" + PCT.replace("{root}", str(machine.root)))
    assert do(machine, "restart") == 0
