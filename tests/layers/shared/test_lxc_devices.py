"""Device rules as LXC reads and orders them, and nodes as configs name them."""

from __future__ import annotations

import pytest

from controller.layers.shared.lxc_devices import (
    ALLOW,
    DENY,
    Dev,
    Mount,
    Rule,
    RuleKind,
    allowed,
    nvidia_node,
    passed,
    read_dev,
    read_mount,
    read_rule,
)
from controller.layers.shared.pve_conf import parse

CARD = (195, 0)

RULES = {
    "a": Rule(RuleKind.EVERYTHING, True, "a"),
    "c 195:0 rwm": Rule(RuleKind.NUMBERS, True, "c", 195, 0, "rwm"),
    "c 195:* rw": Rule(RuleKind.NUMBERS, True, "c", 195, None, "rw"),
    "c *:* m": Rule(RuleKind.NUMBERS, True, "c", None, None, "m"),
    "b 8:0 r": Rule(RuleKind.NUMBERS, True, "b", 8, 0, "r"),
    "a *:* rwm": Rule(RuleKind.NUMBERS, True, "a", None, None, "rwm"),
    "c 195:* rwm # nvidia": Rule(RuleKind.NUMBERS, True, "c", 195, None, "rwm"),
    "c 195:* rw # nvidia": Rule(RuleKind.BAD, True, "c", 195, None, "rw "),
    "c  195:0 rwm": Rule(RuleKind.BAD, True, "c", 195, 0, "rwm"),
    "c 195:0 xyz": Rule(RuleKind.BAD, True, "c", 195, 0, "xyz"),
    "/dev/nvidia-uvm rwm": Rule(RuleKind.PATH, True, "c", access="rwm", path="/dev/nvidia-uvm"),
    "/dev/nvidia-uvm x": Rule(RuleKind.BAD, True, "c", access="x", path="/dev/nvidia-uvm"),
    "c 195:0": Rule(RuleKind.BAD, True),
    "c c3:0 rwm": Rule(RuleKind.BAD, True),
    "": Rule(RuleKind.BAD, True),
}


@pytest.mark.parametrize("value", RULES)
def test_rules(value: str) -> None:
    assert read_rule(ALLOW, value) == RULES[value]


ORDERS = {
    "nothing": ((), False),
    "by number": (("+c 195:0 rwm",), True),
    "another number": (("+c 195:1 rwm",), False),
    "a wildcard": (("+c 195:* rwm",), True),
    "all majors": (("+c *:0 rwm",), True),
    "reading alone": (("+c 195:0 r",), False),
    "reading here, writing there": (("+c 195:0 r", "+c 195:0 w"), False),
    "without mknod": (("+c 195:0 rw",), True),
    "a block device": (("+b 195:0 rwm",), False),
    "any type": (("+a 195:0 rwm",), True),
    "the first counts": (("-c 195:0 rw", "+c 195:* rwm"), False),
    "the first counts, the other way round": (("+c 195:* rwm", "-c 195:0 rw"), True),
    "an equal one takes it back in its place": (("+c 195:0 rwm", "+c 195:* rw", "-c 195:0 rwm"), False),
    "a refusal of less than is asked for": (("-c 195:0 w", "+c 195:0 rwm"), True),
    "a refusal of more than is asked for": (("-c 195:0 rwm", "+c 195:* rwm"), False),
    "everything": (("+a",), True),
    "everything but": (("-c 195:0 rwm", "+a"), False),
    "everything, then nothing": (("+a", "-a"), False),
    "nothing but": (("-a", "+c 195:0 rwm"), True),
    "by path": (("+/dev/nvidia0 rwm",), True),
    "by another path": (("+/dev/nvidia1 rwm",), False),
    "by a path that leads nowhere": (("+/dev/nvidia7 rwm",), False),
    "what cannot be read": (("+c 195:0 rw # x",), False),
}


@pytest.mark.parametrize("name", ORDERS)
def test_which_rule_counts(name: str) -> None:
    lines, may = ORDERS[name]
    rules = [read_rule(ALLOW if line[0] == "+" else DENY, line[1:]) for line in lines]
    nodes = {"/dev/nvidia0": (195, 0), "/dev/nvidia1": (195, 1)}
    assert allowed(rules, CARD, nodes.get) == may


@pytest.mark.parametrize(
    ("path", "node"),
    [
        ("/dev/nvidia0", "nvidia0"),
        ("dev/nvidiactl", "nvidiactl"),
        ("/dev/nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap1"),
        ("/dev/nvidia-caps/", "nvidia-caps"),
        ("/var/lib/lxc/129/rootfs/dev/nvidia0", "nvidia0"),
        ("/dev/dri/card0", ""),
        ("/srv/dev/nvidia0", ""),
        ("/dev/nvme0", ""),
        ("/dev", ""),
    ],
)
def test_nodes(path: str, node: str) -> None:
    assert nvidia_node(path) == node


def test_a_mount_is_known_by_its_source_and_a_hand_made_node_by_its_target() -> None:
    assert read_mount("/dev/nvidia1 dev/nvidia0 none bind") == Mount("/dev/nvidia1", "dev/nvidia0", "none bind")
    assert Mount("/dev/nvidia1", "dev/nvidia0", "none bind").node == "nvidia1"
    assert Mount("/lxc/x", "dev/nvidia0", "none bind").node == "nvidia0"
    assert read_mount("/dev/nvidia0 dev/nvidia0") is None
    assert Mount("/a", "b", "none bind,optional,create=file 0 0").is_optional
    assert not Mount("/a", "b", "none bind").is_optional


def test_devs() -> None:
    assert read_dev("/dev/nvidia0,gid=44") == Dev("/dev/nvidia0", ("gid=44",))
    assert read_dev("gid=44,path=/dev/nvidia0,mode=0666") == Dev("/dev/nvidia0", ("gid=44", "mode=0666"))
    assert read_dev("/dev/x,deny-write=1").denies_writing
    here = passed(parse("dev1: /dev/nvidia1\ndev0: /dev/dri/card0\ndev300: /dev/nvidia7\ndev01: /dev/nvidia6\n").main)
    assert [number for number, _ in here.devs] == [0, 1]
    assert here.cards == {1}
