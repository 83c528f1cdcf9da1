"""The scripts that move and take over, for real, on a tree: cut off and interfered with before any command."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from controller.layers import placement
from tests.layers.devices.test_facts import MEMBERS
from tests.layers.scripts import Machine

TEXT = "arch: amd64\nrootfs: fast:vm-129-disk-0\n"
SEEN = hashlib.sha256(TEXT.encode()).hexdigest()
HERE, THERE = "/etc/pve/nodes/kpro5/lxc/129.conf", "/etc/pve/nodes/kpro6/lxc/129.conf"
DEAD = "/etc/pve/nodes/kpro6/lxc/129.conf"
NOBODY = """echo '{"watchers":[]}'"""
TAKE_OVER = dataclasses.replace(placement.TAKE_OVER, text=placement._RBD + placement.TAKE_OVER.text)
PCT = """case $1 in
shutdown) echo 'Num RefCount' >{root}/proc/net/unix ;;
migrate) mv {root}/etc/pve/nodes/kpro5/lxc/129.conf {root}/etc/pve/nodes/$3/lxc/129.conf ;;
esac"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.path("/etc/pve/nodes/kpro6/lxc").mkdir(parents=True)
    machine.write("/etc/pve/storage.cfg", "rbd: fast\n\tpool rbd\n")
    machine.write("/etc/pve/.members", MEMBERS)
    machine.command("sleep", "exit 0")
    machine.command("rbd", NOBODY)
    machine.command("pct", PCT.replace("{root}", str(tmp_path)))
    machine.command("lxc-info", "exit 1")
    return machine


def take_over(machine: Machine, images: Sequence[str] = ("fast:vm-129-disk-0",), **more: object) -> int:
    done = machine.run(TAKE_OVER, ("129", "kpro6", SEEN, *images), **more)  # type: ignore[arg-type]
    machine.log.append(done.stderr.decode())
    return done.returncode


@pytest.fixture
def dead(machine: Machine) -> Machine:
    """kpro6 is off, and the config lies there."""
    machine.write(DEAD, TEXT)
    return machine


def lies(machine: Machine) -> tuple[bool, bool]:
    return machine.path(HERE).exists(), machine.path(DEAD).exists()


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_taken_over(dead: Machine, shell: str) -> None:
    dead.shell = shell
    assert take_over(dead) == 0, dead.log
    assert lies(dead) == (True, False)
    assert dead.path(HERE).read_text() == TEXT
    assert take_over(dead) == 75


WATCHED = """echo '{"watchers":[{"address":"10.1.2.6:0/7"}]}'"""


@pytest.mark.parametrize(
    ("change", "rc", "said"),
    [
        (lambda m: m.write(DEAD, TEXT + "lock: migrate\n"), 75, "changed"),
        (lambda m: m.write(HERE, "arch: amd64\n"), 75, "is there now"),
        (lambda m: m.write("/etc/pve/nodes/kpro4/qemu-server/129.conf", ""), 75, "is there now"),
        (lambda m: m.write("/etc/pve/ha/resources.cfg", "ct: 129\n\tstate started\n"), 75, "HA manages"),
        (lambda m: m.write("/etc/pve/.members", MEMBERS.replace('"quorate": 1', '"quorate": 0')), 75, "quorate"),
        (lambda m: m.write("/etc/pve/.members", MEMBERS.replace('3, "online": 0', '3, "online": 1')), 75, "is back"),
        (lambda m: m.command("rbd", WATCHED), 75, "somebody has"),
        (lambda m: m.command("rbd", "exit 1"), 1, "does not say"),
        (lambda m: m.command("rbd", "echo hello"), 1, "does not say"),
        (lambda m: m.write("/etc/pve/storage.cfg", "dir: fast\n"), 1, "does not say"),
    ],
)
def test_nothing_is_taken_when_it_is_not_so_any_more(dead: Machine, change, rc: int, said: str) -> None:
    change(dead)
    before = lies(dead)
    assert take_over(dead) == rc, dead.log
    assert said in dead.log[-1]
    assert lies(dead) == before


def test_taking_over_is_cut_off_anywhere(dead: Machine) -> None:
    assert take_over(dead) == 0
    commands = len(dead.steps())
    assert commands > 8
    for at in range(1, commands + 1):
        dead.path(HERE).unlink(missing_ok=True)
        dead.write(DEAD, TEXT)
        assert take_over(dead, at=at) != 0
        assert lies(dead) in ((True, False), (False, True))
        assert take_over(dead) in (0, 75)
        assert lies(dead) == (True, False)
        assert dead.path(HERE).read_text() == TEXT


def test_a_config_that_appears_in_between_is_not_replaced(dead: Machine) -> None:
    assert take_over(dead) == 0
    commands = len(dead.steps())
    for at in range(1, commands + 1):
        dead.path(HERE).unlink(missing_ok=True)
        dead.write(DEAD, TEXT)
        take_over(dead, at=at, interrupt=f"[ -e {dead.path(HERE)} ] || echo theirs >{dead.path(HERE)}")
        assert dead.path(HERE).read_text() in ("theirs\n", TEXT)
        if dead.path(HERE).read_text() == "theirs\n":
            assert dead.path(DEAD).read_text() == TEXT


# --- moving ---


def move(machine: Machine, since: int = 0, **more: object) -> int:
    done = machine.run(placement.MOVE, ("129", "kpro4", SEEN, str(since)), **more)  # type: ignore[arg-type]
    machine.log.append(done.stderr.decode())
    return done.returncode


@pytest.fixture
def alive(machine: Machine) -> Machine:
    """The config lies here, and kpro4 is there."""
    machine.path("/etc/pve/nodes/kpro4/lxc").mkdir(parents=True)
    machine.write(HERE, TEXT)
    return machine


def pct(machine: Machine) -> list[str]:
    return [call for call in machine.calls if call.startswith("pct")]


def test_a_stopped_container_is_moved(alive: Machine) -> None:
    assert move(alive) == 0, alive.log
    assert pct(alive) == ["pct migrate 129 kpro4"]


def test_a_running_container_is_stopped_first_and_left_so(alive: Machine) -> None:
    alive.starts(129, ticks=4242)
    assert move(alive, since=4242) == 0, alive.log
    assert pct(alive) == ["pct shutdown 129 --timeout 60 --forceStop 1", "pct migrate 129 kpro4"]


def test_what_could_not_be_moved_runs_again(alive: Machine) -> None:
    alive.starts(129, ticks=4242)
    alive.command("pct", PCT.replace("{root}", str(alive.root)).replace("migrate) mv", "migrate) exit 255; mv"))
    assert move(alive, since=4242) == 1
    assert pct(alive)[-1] == "pct start 129"
    assert "pct migrate ended with 255; it has been started again" in alive.log[-1]


def test_a_lock_that_stayed_is_told(alive: Machine) -> None:
    locks = f"echo 'lock: migrate' >>{alive.root}/etc/pve/nodes/kpro4/lxc/129.conf; exit 255"
    alive.command(
        "pct", PCT.replace("{root}", str(alive.root)).replace("129.conf ;;\nesac", f"129.conf; {locks} ;;\nesac")
    )
    assert move(alive) == 1
    assert "pct unlock 129 on kpro4" in alive.log[-1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.path(HERE).unlink(), "not on this node"),
        (lambda m: m.write(HERE, TEXT + "lock: backup\n"), "changed"),
        (lambda m: m.write("/etc/pve/ha/resources.cfg", "ct: 129\n"), "HA manages"),
        (lambda m: m.write("/etc/pve/.members", MEMBERS.replace('"quorate": 1', '"quorate": 0')), "quorate"),
        (lambda m: m.write("/etc/pve/.members", MEMBERS.replace('1, "online": 1', '1, "online": 0')), "not in contact"),
        (lambda m: m.starts(129, ticks=77), "stopped or started"),
    ],
)
def test_nothing_is_moved_when_it_is_not_so_any_more(alive: Machine, change, said: str) -> None:
    change(alive)
    assert move(alive) == 75, alive.log
    assert said in alive.log[-1]
    assert pct(alive) == []
