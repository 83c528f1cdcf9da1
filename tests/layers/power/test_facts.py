"""The fragment under a real shell, against a tree, and what is made of its answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from controller.facts.words import ParseError, Section
from controller.layers import power
from controller.layers.power.facts import InnerNode, PowerFacts, Running, parse
from tests.layers.shell import ask, write

BOOTED = 1700000000
TICKS = 123456  # 1234.56 s after boot
GENERATED = "lxc.arch = amd64\nlxc.cgroup2.devices.allow = c 195:0 rw\n"
TREE = {
    "/proc/net/unix": "Num       RefCount Protocol Flags    Type St Inode Path\n"
    "0000000000000000: 00000002 00000000 00010000 0001 01 20411 @/var/lib/lxc/129/command\n"
    "0000000000000000: 00000002 00000000 00010000 0001 01 20412 @/var/lib/lxc/1290/command\n"
    "0000000000000000: 00000003 00000000 00000000 0001 03 20413 /run/systemd/journal/stdout\n",
    "/proc/stat": f"cpu  1 2 3\nbtime {BOOTED}\nprocesses 7\n",
    "/proc/4711/stat": f"4711 (in ) it) S 4700 {' '.join('0' for _ in range(17))} {TICKS} 0 0\n",
    "/var/lib/lxc/129/config": GENERATED,
}


def seen(root: Path, guests: tuple[int, ...] = (129, 130), lxc_info: str = "") -> PowerFacts:
    stand_in = root / "bin" / "lxc-info"
    stand_in.parent.mkdir(exist_ok=True)
    stand_in.write_text("#!/bin/sh\n" + (lxc_info or "printf 'State:          RUNNING\\nPID:            4711\\n'\n"))
    stand_in.chmod(0o755)
    section = ask("PATH=$root/bin:$PATH\nrun_dir=$root/run/reconcile\n" + power.LAYER.probe, root, guests)
    assert section.rc == 0, section.err
    return parse(section)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, TREE)
    at = BOOTED + 1234 - 1
    os.utime(tmp_path / "var/lib/lxc/129/config", (at, at))
    return tmp_path


def test_what_runs_and_what_it_was_started_with(root: Path) -> None:
    assert seen(root) == PowerFacts((Running(129, 4711, TICKS, GENERATED, None, ()),))


def test_a_config_written_after_the_start_tells_nothing(root: Path) -> None:
    at = BOOTED + 1234 + 2
    os.utime(root / "var/lib/lxc/129/config", (at, at))
    assert seen(root) == PowerFacts((Running(129, 4711, TICKS, None, None, ()),))


def test_nodes_inside(root: Path) -> None:
    dev = root / "proc/4711/root/dev"
    write(
        root,
        {"/proc/4711/root/dev/nvidia0": "", "/proc/4711/root/dev/null": "", "/proc/4711/root/dev/nvidia-caps/x": ""},
    )
    if os.getuid() == 0:
        os.mknod(dev / "nvidiactl", 0o20600, os.makedev(195, 255))
        os.mknod(dev / "nvidia-uvm", 0o20600, os.makedev(508, 1))
    running = seen(root).of(129)
    assert running is not None
    assert running.node("nvidia0") == InnerNode("nvidia0", "regular empty file", 0, 0)
    assert running.node("null") is None
    assert running.node("nvidia-caps/x") == InnerNode("nvidia-caps/x", "regular empty file", 0, 0)
    if os.getuid() == 0:
        assert running.node("nvidiactl") == InnerNode("nvidiactl", "character special file", 195, 255)
        assert running.node("nvidia-uvm") == InnerNode("nvidia-uvm", "character special file", 508, 1)


RECORDS = {
    "of this start": (
        {"edited": f"{TICKS + 1}\ndev0: /dev/nvidia3\n", "restarted": f"{TICKS} abc\n"},
        ("dev0: /dev/nvidia3",),
        "abc",
    ),
    "of another start": ({"edited": f"{TICKS - 1}\ndev0: /dev/nvidia3\n", "restarted": f"{TICKS - 1} abc\n"}, None, ""),
    "of a config that passed nothing": ({"edited": f"{TICKS + 1}\n\n"}, ("",), ""),
    "start without a why": ({"restarted": f"{TICKS} \n"}, None, ""),
    "none": ({}, None, ""),
}


@pytest.mark.parametrize("name", RECORDS)
def test_our_records(root: Path, name: str) -> None:
    records, edited, why = RECORDS[name]
    write(root, {f"/run/reconcile/{kind}/129": text for kind, text in records.items()})
    running = seen(root).of(129)
    assert running is not None
    assert (running.edited, running.restarted_for) == (edited, why)


BETWEEN = {
    "no init yet": "printf 'State:          STARTING\\n'",
    "its mounts are being made": "printf 'State:          STARTING\\nPID:            4711\\n'",
    "its init is gone": "printf 'State:          RUNNING\\nPID:            4712\\n'",
    "its monitor does not answer": "exit 1",
}


@pytest.mark.parametrize("name", BETWEEN)
def test_just_starting_or_stopping(root: Path, name: str) -> None:
    assert seen(root, lxc_info=BETWEEN[name]) == PowerFacts((), frozenset({129}))


def test_nothing_runs(root: Path) -> None:
    (root / "proc/net/unix").write_text("Num RefCount\n")
    assert seen(root) == PowerFacts(())


def test_nobody_asks_of_a_container_in_no_spec(root: Path) -> None:
    assert seen(root, guests=()) == PowerFacts(())
    assert seen(root, guests=(130,)) == PowerFacts(())


def test_what_cannot_be_read_is_not_nothing(root: Path) -> None:
    (root / "proc/net/unix").unlink()
    assert ask(power.LAYER.probe, root, (129,)).rc != 0


@pytest.mark.parametrize("out", ["", "running|129|4711|5\n", "running|129\n==files\n", "what\n==files\n"])
def test_half_an_answer_is_no_fact(out: str) -> None:
    with pytest.raises((ParseError, ValueError)):
        parse(Section(0, out))


def test_two_looks_at_the_same_say_the_same(root: Path) -> None:
    assert seen(root) == seen(root)
