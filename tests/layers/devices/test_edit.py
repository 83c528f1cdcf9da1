"""The edit's script for real: it puts the file in place or leaves it, whenever it is cut off or somebody else edits."""

from __future__ import annotations

import fcntl
import hashlib
from pathlib import Path

import pytest

from controller.layers.power import LAYER as POWER
from controller.layers.power import facts as power
from controller.layers.shared.config_edit import EDIT
from tests.layers.scripts import Machine
from tests.layers.shell import ask

OLD = b"# caf\xe9\narch: amd64\r\ndev0: /dev/nvidia3\n\n[snap]\nmemory: 1"
NEW = OLD.replace(b"nvidia3", b"nvidia0")
THEIRS = OLD + b"\nmemory: 2\n"
CONF = "/etc/pve/nodes/kpro5/lxc/129.conf"
LINES = "dev0: /dev/nvidia3"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.write(CONF, OLD)
    return machine


def edit(machine: Machine, seen: bytes = OLD, **more: object) -> int:
    done = machine.run(EDIT, ("129", sha(seen), LINES), NEW, **more)  # type: ignore[arg-type]
    machine.log.append(done.stderr.decode("utf-8", "replace"))
    return done.returncode


def conf(machine: Machine) -> bytes:
    return machine.path(CONF).read_bytes()


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_the_new_file_is_in_place_and_the_old_one_kept(machine: Machine, shell: str) -> None:
    machine.shell = shell
    machine.path(CONF).chmod(0o640)
    assert edit(machine) == 0, machine.log
    assert conf(machine) == NEW
    assert machine.path(CONF).stat().st_mode & 0o777 == 0o640
    assert [p.name for p in machine.path(CONF).parent.iterdir()] == ["129.conf"]
    kept = [p for p in machine.path("state/kept").rglob("129.conf@*") if not p.name.endswith(".marker")]
    assert [p.read_bytes() for p in kept] == [OLD]


def test_a_file_that_has_changed_stays(machine: Machine) -> None:
    machine.write(CONF, THEIRS)
    assert edit(machine) == 75
    assert conf(machine) == THEIRS
    assert "has changed" in machine.log[-1]


def test_a_container_that_has_moved_away(machine: Machine) -> None:
    machine.path(CONF).unlink()
    assert edit(machine) == 75
    assert not machine.path(CONF).exists()


def test_doing_it_again_is_stale_and_changes_nothing(machine: Machine) -> None:
    assert edit(machine) == 0
    assert edit(machine) == 75
    assert conf(machine) == NEW


def test_while_proxmox_holds_its_lock_nothing_is_written(machine: Machine) -> None:
    machine.command("flock", 'shift 2; exec /usr/bin/flock -w 0.1 "$@"')  # the same, with less patience
    with machine.path("/run/lock/lxc/pve-config-129.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert edit(machine) == 75
        assert machine.calls == ["flock -w 10 9"]
    assert conf(machine) == OLD
    assert edit(machine) == 0


def test_the_lock_is_held_while_it_writes(machine: Machine) -> None:
    edit(machine)
    steps = machine.steps()
    machine.write(CONF, OLD)
    lock = machine.path("/run/lock/lxc/pve-config-129.lock")
    seen = machine.path("/seen")
    held = f"/usr/bin/flock -n {lock} true || echo held >>{seen}"
    for number in range(steps.index("flock") + 2, len(steps) + 1):
        machine.write(CONF, OLD)
        edit(machine, at=number, interrupt=held)
    assert seen.read_text().split() == ["held"] * (len(steps) - steps.index("flock") - 1)


def every_step(tmp_path: Path, running: bool) -> list[str]:
    machine = Machine(tmp_path / "rehearsal")
    machine.write(CONF, OLD)
    if running:
        machine.starts(129)
    assert edit(machine) == 0
    return machine.steps()


@pytest.mark.parametrize("running", [False, True])
def test_killed_anywhere_it_leaves_the_old_file_or_the_new_one(tmp_path: Path, running: bool) -> None:
    steps = every_step(tmp_path, running)
    assert len(steps) > 15
    for number in range(1, len(steps) + 1):
        machine = Machine(tmp_path / str(number))
        machine.write(CONF, OLD)
        if running:
            machine.starts(129)
        assert edit(machine, at=number) == -9
        assert conf(machine) in (OLD, NEW), steps[number - 1]
        assert edit(machine, seen=conf(machine)) == 0
        assert conf(machine) == NEW
        assert [p.name for p in machine.path(CONF).parent.iterdir()] == ["129.conf"]
        if running:
            assert started_with(machine) == (LINES,)


def test_an_edit_of_somebody_else_in_between_survives(tmp_path: Path) -> None:
    """An editor that takes no lock; only what it writes in the instant before the rename can be lost."""
    steps = every_step(tmp_path, running=False)
    last_look = len(steps) - 1 - steps[::-1].index("sha256sum")
    for number in range(1, last_look + 2):
        machine = Machine(tmp_path / str(number))
        machine.write(CONF, OLD)
        machine.write("/theirs", THEIRS)
        theirs = f"cat {machine.path('/theirs')} >{machine.path(CONF)}"
        assert edit(machine, at=number, interrupt=theirs) == 75, steps[number - 1]
        assert conf(machine) == THEIRS
        assert [p.name for p in machine.path(CONF).parent.iterdir()] == ["129.conf"]


def test_a_full_or_read_only_file_system_leaves_the_old_file(machine: Machine) -> None:
    machine.command(
        "cat", 'case $(readlink -f /proc/$$/fd/1) in *reconcile-tmp) exit 1 ;; esac; exec /usr/bin/cat "$@"'
    )
    assert edit(machine) == 1
    assert conf(machine) == OLD
    assert [p.name for p in machine.path(CONF).parent.iterdir()] == ["129.conf"]


# The record of what a running container was started with


def started_with(machine: Machine) -> object:
    """What the power layer makes of the record."""
    machine.path("/run/reconcile").mkdir(exist_ok=True)
    record = machine.path("/run/reconcile/edited/129")
    lines = record.read_text().split("\n")[:-1] if record.exists() else []
    return power._edited(lines, 100000)


def test_of_a_stopped_container_nothing_is_recorded(machine: Machine) -> None:
    machine.write("/run/reconcile/edited/129", "99\nold\n")
    assert edit(machine) == 0
    assert not machine.path("/run/reconcile/edited/129").exists()


def test_of_a_running_container_the_first_edit_since_its_start_is_recorded(machine: Machine) -> None:
    machine.starts(129, ticks=100000)
    machine.write("/run/reconcile/edited/129", "99999\nbefore it was started\n")
    assert edit(machine) == 0
    assert machine.path("/run/reconcile/edited/129").read_text() == f"123456\n{LINES}\n"
    machine.write("/proc/uptime", "2000.00 1.00\n")
    done = machine.run(EDIT, ("129", sha(NEW), "dev0: /dev/nvidia0"), OLD)
    assert done.returncode == 0
    assert machine.path("/run/reconcile/edited/129").read_text() == f"123456\n{LINES}\n"
    assert started_with(machine) == (LINES,)


def test_the_fragment_reads_what_the_script_wrote(machine: Machine) -> None:
    machine.starts(129)
    assert edit(machine) == 0
    machine.write("/proc/stat", "btime 1700000000\n")
    stood_in = "PATH=$root/bin:$PATH\nrun_dir=$root/run/reconcile\n"
    section = ask(stood_in + POWER.probe, machine.root, guests=(129,))
    assert section.rc == 0, section.err
    running = power.parse(section).of(129)
    assert running is not None
    assert running.edited == (LINES,)
