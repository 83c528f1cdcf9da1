"""What a repair makes of a config: tables, real files, and any file at all."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.layers.devices.reasons import Reason
from controller.layers.devices.repair import Repair, Want, repair
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.shared.lxc_devices import allowed, dev_rules, device_of, passed, resolver
from controller.layers.shared.pve_conf import LineKind, main_lines, parse
from controller.spec.model import Passthrough
from tests.layers.fleet import MAJORS, gpu_facts, guest_facts, node

SAMPLES = Path(os.environ.get("RECONCILE_SHARED", Path(__file__).parents[4] / "shared")) / "samples" / "proxmox"
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason="the samples of real Proxmox files are not there")

DRIVERS = guest_facts().drivers


def want(
    *minors: int,
    style: Passthrough = Passthrough.KEEP,
    alone: bool = False,
    gpus: GpuFacts | None = None,
    drivers: tuple[tuple[int, str], ...] = DRIVERS,
) -> Want:
    return Want(minors, style, alone, gpus or gpu_facts(), drivers)


def reasons(done: Repair) -> list[str]:
    return [str(finding.reason) for finding in done.findings]


RAW_TAIL = "none bind,optional,create=file"


def raw(*nodes: str, rules: tuple[str, ...] = (), tail: str = RAW_TAIL) -> str:
    lines = [f"lxc.cgroup2.devices.allow: {rule}" for rule in rules]
    lines += [f"lxc.mount.entry: /dev/{n} dev/{n} {tail}" for n in nodes]
    return "".join(line + "\n" for line in lines)


RIGHT_RULES = ("c 195:0 rwm", "c 195:1 rwm", "c 195:255 rwm", "c 508:* rwm")
RIGHT = raw("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", rules=RIGHT_RULES)
FOUR_STALE = raw(
    "nvidia0",
    "nvidia1",
    "nvidia2",
    "nvidia3",
    "nvidiactl",
    "nvidia-uvm",
    rules=("c 195:* rwm", "c 510:* rwm"),
)

# name: (config, want, config afterwards, reasons)
TABLE = {
    "in sync, raw": (RIGHT, want(0, 1), RIGHT, []),
    "in sync, dev": (
        "dev0: /dev/nvidia0\ndev1: /dev/nvidia1\ndev2: /dev/nvidiactl\ndev3: /dev/nvidia-uvm\n",
        want(0, 1),
        "dev0: /dev/nvidia0\ndev1: /dev/nvidia1\ndev2: /dev/nvidiactl\ndev3: /dev/nvidia-uvm\n",
        [],
    ),
    "in sync, by path": (
        raw(
            "nvidia0", "nvidiactl", "nvidia-uvm", rules=("/dev/nvidia0 rwm", "/dev/nvidiactl rw", "/dev/nvidia-uvm rwm")
        ),
        want(0),
        raw(
            "nvidia0", "nvidiactl", "nvidia-uvm", rules=("/dev/nvidia0 rwm", "/dev/nvidiactl rw", "/dev/nvidia-uvm rwm")
        ),
        [],
    ),
    "a wildcard is all right for whom all cards are": (
        raw("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", rules=("c 195:* rwm", "c 508:* rwm")),
        want(0, 1, alone=True),
        raw("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", rules=("c 195:* rwm", "c 508:* rwm")),
        [],
    ),
    "four cards with stale majors, two wanted": (
        FOUR_STALE,
        want(0, 1),
        raw("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", rules=RIGHT_RULES),
        ["too-many-cards", "too-many-cards", "stale-major"],
    ),
    "other cards": (
        raw(
            "nvidia2",
            "nvidia3",
            "nvidiactl",
            "nvidia-uvm",
            rules=("c 195:2 rwm", "c 195:3 rwm", "c 195:255 rwm", "c 508:* rwm"),
        ),
        want(0, 1),
        raw("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", rules=RIGHT_RULES),
        ["wrong-cards", "too-many-cards"],
    ),
    "one card too few": (
        raw("nvidia0", "nvidiactl", "nvidia-uvm", rules=("c 195:0 rwm", "c 195:255 rwm", "c 508:* rwm")),
        want(0, 1),
        raw(
            "nvidia0",
            "nvidiactl",
            "nvidia-uvm",
            "nvidia1",
            rules=("c 195:0 rwm", "c 195:255 rwm", "c 508:* rwm", "c 195:1 rwm"),
        ),
        ["too-few-cards"],
    ),
    "nothing at all": (
        "arch: amd64\nmemory: 512\n",
        want(0, 1),
        "arch: amd64\ndev0: /dev/nvidia0,mode=0666\ndev1: /dev/nvidia1,mode=0666\ndev2: /dev/nvidiactl,mode=0666\n"
        "dev3: /dev/nvidia-uvm,mode=0666\nmemory: 512\n",
        ["too-few-cards", "node-not-passed"],
    ),
    "nothing at all, raw wanted": (
        "arch: amd64\n\n[snap]\narch: amd64\n",
        want(0, style=Passthrough.LXC),
        "arch: amd64\n"
        + "".join(f"lxc.mount.entry: /dev/{n} dev/{n} {RAW_TAIL}\n" for n in ("nvidia0", "nvidiactl", "nvidia-uvm"))
        + "".join(f"lxc.cgroup2.devices.allow: {r}\n" for r in ("c 195:0 rwm", "c 195:255 rwm", "c 508:* rwm"))
        + "\n[snap]\narch: amd64\n",
        ["too-few-cards", "node-not-passed"],
    ),
    "options of dev stay": (
        "dev0: /dev/nvidia3,gid=44,mode=0660\ndev1: path=/dev/nvidiactl,uid=1000\ndev2: gid=5,path=/dev/nvidia2\n"
        "dev4: /dev/nvidia-uvm\n",
        want(0, 1),
        "dev0: /dev/nvidia0,gid=44,mode=0660\ndev1: path=/dev/nvidiactl,uid=1000\ndev2: gid=5,path=/dev/nvidia1\n"
        "dev4: /dev/nvidia-uvm\n",
        ["wrong-cards"],
    ),
    "a new dev is like its siblings, at the lowest free number": (
        "dev0: /dev/nvidia0,gid=44\ndev2: /dev/nvidiactl,gid=44\ndev3: /dev/nvidia-uvm,gid=44\n",
        want(0, 1),
        "dev0: /dev/nvidia0,gid=44\ndev2: /dev/nvidiactl,gid=44\ndev3: /dev/nvidia-uvm,gid=44\n"
        "dev1: /dev/nvidia1,gid=44\n",
        ["too-few-cards"],
    ),
    "a number that waits in pending is not free": (
        "dev0: /dev/nvidia0\ndev2: /dev/nvidiactl\ndev3: /dev/nvidia-uvm\n"
        "[pve:pending]\ndev1: /dev/zero\ndelete: dev4\n",
        want(0, 1),
        "dev0: /dev/nvidia0\ndev2: /dev/nvidiactl\ndev3: /dev/nvidia-uvm\ndev5: /dev/nvidia1\n"
        "[pve:pending]\ndev1: /dev/zero\ndelete: dev4\n",
        ["too-few-cards"],
    ),
    "a dev that is there twice goes as a whole": (
        "dev0: /dev/nvidia2\ndev1: /dev/nvidiactl\ndev2: /dev/nvidia-uvm\ndev0: /dev/nvidia3\ndev3: /dev/nvidia0\n",
        want(0),
        "dev1: /dev/nvidiactl\ndev2: /dev/nvidia-uvm\ndev3: /dev/nvidia0\n",
        ["too-many-cards"],
    ),
    "a card that may only be read": (
        "dev0: /dev/nvidia0,deny-write=1,gid=44\ndev1: /dev/nvidiactl\ndev2: /dev/nvidia-uvm\n",
        want(0),
        "dev0: /dev/nvidia0,gid=44\ndev1: /dev/nvidiactl\ndev2: /dev/nvidia-uvm\n",
        ["no-rule"],
    ),
    "dev and raw mixed, each kept": (
        "dev0: /dev/nvidia0\ndev1: /dev/nvidiactl\n" + raw("nvidia-uvm", rules=("c 195:* rwm", "c 510:* rwm")),
        want(0),
        "dev0: /dev/nvidia0\ndev1: /dev/nvidiactl\n" + raw("nvidia-uvm", rules=("c 508:* rwm",)),
        ["too-many-cards", "stale-major"],
    ),
    "raw to dev": (
        raw(
            "nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-modeset", rules=("c 195:* rwm", "c 508:* rwm", "c 226:* rwm")
        ),
        want(0, style=Passthrough.DEV),
        "dev0: /dev/nvidia0,mode=0666\ndev1: /dev/nvidiactl,mode=0666\ndev2: /dev/nvidia-uvm,mode=0666\n"
        "dev3: /dev/nvidia-modeset,mode=0666\nlxc.cgroup2.devices.allow: c 226:* rwm\n",
        ["wrong-style", "too-many-cards"],
    ),
    "dev to raw": (
        "dev0: /dev/nvidia0\ndev1: /dev/nvidiactl\ndev2: /dev/nvidia-uvm\ndev3: /dev/dri/card0\nlxc.cap.drop:\n",
        want(0, style=Passthrough.LXC),
        "dev3: /dev/dri/card0\nlxc.cap.drop:\n"
        + "".join(f"lxc.mount.entry: /dev/{n} dev/{n} {RAW_TAIL}\n" for n in ("nvidia0", "nvidiactl", "nvidia-uvm"))
        + "".join(f"lxc.cgroup2.devices.allow: {r}\n" for r in ("c 195:0 rwm", "c 195:255 rwm", "c 508:* rwm")),
        ["wrong-style"],
    ),
    "path rules stay path rules": (
        raw(
            "nvidia2",
            "nvidiactl",
            "nvidia-uvm",
            rules=("/dev/nvidia2 rwm", "/dev/nvidiactl rwm", "/dev/nvidia-uvm rwm"),
        ),
        want(0, 1),
        raw(
            "nvidia0",
            "nvidiactl",
            "nvidia-uvm",
            "nvidia1",
            rules=("/dev/nvidia0 rwm", "/dev/nvidia1 rwm", "/dev/nvidiactl rwm", "/dev/nvidia-uvm rwm"),
        ),
        ["wrong-cards", "too-many-cards"],
    ),
    "companions keep their way in when a wildcard goes": (
        raw(
            "nvidia0",
            "nvidiactl",
            "nvidia-uvm",
            "nvidia-modeset",
            "nvidia-uvm-tools",
            rules=("c 195:* rwm", "c 508:* rwm"),
        ),
        want(0),
        raw(
            *("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "nvidia-uvm-tools"),
            rules=("c 195:0 rwm", "c 195:255 rwm", "c 195:254 rwm", "c 508:* rwm"),
        ),
        ["too-many-cards"],
    ),
    "cgroup v1 rules become v2's": (
        "lxc.cgroup.devices.allow: c 195:* rwm\nlxc.cgroup.devices.allow: c 506:* rwm\n"
        "lxc.cgroup.devices.allow: c 226:* rwm\n" + raw("nvidia0", "nvidiactl", "nvidia-uvm"),
        want(0),
        "lxc.cgroup2.devices.allow: c 195:0 rwm\nlxc.cgroup2.devices.allow: c 195:255 rwm\n"
        "lxc.cgroup2.devices.allow: c 508:* rwm\nlxc.cgroup.devices.allow: c 226:* rwm\n"
        + raw("nvidia0", "nvidiactl", "nvidia-uvm"),
        ["no-rule"],
    ),
    "v1 rules beside right v2 ones stay": (
        "lxc.cgroup.devices.allow: c 195:* rwm\n" + RIGHT,
        want(0, 1),
        "lxc.cgroup.devices.allow: c 195:* rwm\n" + RIGHT,
        [],
    ),
    "a card under another's name": (
        raw("nvidiactl", "nvidia-uvm", rules=RIGHT_RULES[1:])
        + f"lxc.mount.entry: /dev/nvidia1 dev/nvidia0 {RAW_TAIL}\n",
        want(1),
        raw("nvidiactl", "nvidia-uvm", "nvidia1", rules=RIGHT_RULES[1:]),
        ["wrong-target"],
    ),
    "a node made by hand elsewhere counts by its target": (
        raw("nvidiactl", "nvidia-uvm", rules=RIGHT_RULES) + f"lxc.mount.entry: /lxc/1/nvidia0 dev/nvidia0 {RAW_TAIL}\n"
        f"lxc.mount.entry: /lxc/1/nvidia7 dev/nvidia7 {RAW_TAIL}\n",
        want(0, 1),
        raw("nvidiactl", "nvidia-uvm", rules=RIGHT_RULES) + f"lxc.mount.entry: /lxc/1/nvidia0 dev/nvidia0 {RAW_TAIL}\n"
        f"lxc.mount.entry: /dev/nvidia1 dev/nvidia1 {RAW_TAIL}\n",
        ["wrong-cards"],
    ),
    "no cards any more": (
        raw("nvidia0", "nvidiactl", rules=("c 195:0 rwm", "c 195:255 rwm")),
        want(),
        raw("nvidiactl", rules=("c 195:255 rwm",)),
        ["too-many-cards", "too-many-cards"],
    ),
    "a refusal before the right rule": (
        "lxc.cgroup2.devices.deny: c 195:0 rw\n" + RIGHT,
        want(0, 1),
        RIGHT,
        ["no-rule"],
    ),
    "a refusal that an equal rule after it takes back": (
        "lxc.cgroup2.devices.deny: c 195:0 rwm\n" + RIGHT,
        want(0, 1),
        "lxc.cgroup2.devices.deny: c 195:0 rwm\n" + RIGHT,
        [],
    ),
    "refused behind a wildcard, which comes first and counts": (
        raw("nvidia0", "nvidiactl", "nvidia-uvm", rules=("c 195:* rwm", "c 508:* rwm"))
        + "lxc.cgroup2.devices.deny: c 195:1 rwm\n",
        want(0),
        raw("nvidia0", "nvidiactl", "nvidia-uvm", rules=("c 195:0 rwm", "c 195:255 rwm", "c 508:* rwm"))
        + "lxc.cgroup2.devices.deny: c 195:1 rwm\n",
        ["too-many-cards"],
    ),
    "too little access": (
        raw("nvidia0", "nvidiactl", "nvidia-uvm", rules=("c 195:0 r", "c 195:255 rwm", "c 508:0 rw")),
        want(0),
        raw("nvidia0", "nvidiactl", "nvidia-uvm", rules=("c 195:0 rwm", "c 195:255 rwm", "c 508:0 rw")),
        ["no-rule"],
    ),
    "a rule that LXC cannot read": (
        raw("nvidia0", "nvidiactl", "nvidia-uvm", rules=("c 195:0 rw # card", "c 195:255 rwm # read", "c 508:* rwm")),
        want(0),
        raw("nvidia0", "nvidiactl", "nvidia-uvm", rules=("c 195:0 rwm", "c 195:255 rwm # read", "c 508:* rwm")),
        ["bad-rule", "no-rule"],
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_repairs(name: str) -> None:
    before, wanted, after, why = TABLE[name]
    done = repair(before, wanted)
    assert done.text == after
    assert reasons(done) == why
    assert done.remaining == ()
    assert repair(done.text, wanted).findings == ()


# Which rules are recognised as NVIDIA's of another host

CORE = raw("nvidia0", "nvidiactl", "nvidia-uvm")
DEAD = {
    "an unknown major beside a mount of nvidia-uvm": (CORE, "c 510:* rwm", {}, True),
    "several guesses": (CORE, "c 234:* rwm", {}, True),
    "with minors": (CORE, "c 510:0 rwm", {}, True),
    "nvidia-uvm itself is not mounted": (raw("nvidia0"), "c 510:* rwm", {}, True),
    "nothing of NVIDIA's is mounted": ("", "c 510:* rwm", {}, False),
    "the major is another driver's here": (CORE, "c 235:* rwm", {}, False),
    "a major that no driver gets by asking": (CORE, "c 120:* rwm", {}, False),
    "a misc device": (CORE, "c 10:200 rwm", {}, False),
    "DRI": (CORE, "c 226:* rwm", {}, False),
    "beside a device with an unknown major": (
        CORE + "lxc.mount.entry: /dev/apex_0 dev/apex_0 none bind\n",
        "c 510:* rwm",
        {},
        False,
    ),
    "beside a node made by hand": (
        CORE + "lxc.mount.entry: /lxc/x/apex_0 dev/apex_0 none bind\n",
        "c 510:* rwm",
        {},
        False,
    ),
    "beside devices with fixed majors": (
        CORE + "lxc.mount.entry: /dev/dri/card0 dev/dri/card0 none bind\n"
        "lxc.mount.entry: /dev/net/tun dev/net/tun none bind\n"
        "lxc.mount.entry: /srv/x srv/x none bind\nlxc.mount.entry: /dev/tty10 dev/tty8 none bind\n",
        "c 510:* rwm",
        {},
        True,
    ),
    "beside a hook that may bring anything": (CORE + "lxc.hook.autodev: /root/make-nodes\n", "c 510:* rwm", {}, False),
    "block devices": (CORE, "b 510:* rwm", {}, False),
    "a refusal": (CORE, None, {"deny": "c 510:* rwm"}, False),
}


@pytest.mark.parametrize("name", DEAD)
def test_only_what_is_recognisably_nvidias_goes(name: str) -> None:
    mounts, rule, more, goes = DEAD[name]
    line = f"lxc.cgroup2.devices.deny: {more['deny']}" if rule is None else f"lxc.cgroup2.devices.allow: {rule}"
    before = f"lxc.cgroup2.devices.allow: c 195:* rwm\n{line}\n{mounts}"
    done = repair(before, want(0))
    assert (line not in done.text.split("\n")) == goes
    assert ("stale-major" in reasons(done)) == goes


def test_what_was_left_alone_is_said() -> None:
    before = "lxc.cgroup2.devices.allow: c 235:* rwm\n" + RIGHT
    done = repair(before, want(0, 1))
    assert done.text == before
    assert done.left == ("`c 235:* rwm`: the major is kfd's on this host",)


# What cannot be put right

STUCK = {
    "everything is allowed": ("lxc.cgroup2.devices.allow: a\n" + RIGHT, Reason.ALLOWS_EVERYTHING),
    "all character devices are": ("lxc.cgroup2.devices.allow: c *:* rwm\n" + RIGHT, Reason.ALLOWS_EVERYTHING),
    "everything is refused by name": ("lxc.cgroup2.devices.deny: c *:* rwm\n" + RIGHT, Reason.DENIED),
}


@pytest.mark.parametrize("name", STUCK)
def test_a_rule_for_everything_stays_and_is_named(name: str) -> None:
    before, reason = STUCK[name]
    done = repair(before, want(0, 1))
    assert done.text == before
    assert [finding.reason for finding in done.remaining] == [reason]
    assert before.split("\n")[0].split(": ")[1] in done.remaining[0].message


def test_a_rule_for_everything_is_all_right_for_whom_all_cards_are() -> None:
    before = "lxc.cgroup2.devices.allow: a\n" + raw("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")
    assert repair(before, want(0, 1, alone=True)) == Repair(before, ())


def test_mknod_for_all_lets_nothing_be_opened() -> None:
    before = "lxc.cgroup2.devices.allow: c *:* m\n" + RIGHT
    assert repair(before, want(0, 1)) == Repair(before, ())


# Real files


@needs_samples
@pytest.mark.parametrize("path", sorted(SAMPLES.glob("lxc_*.conf")), ids=lambda path: path.stem)
@pytest.mark.parametrize("style", list(Passthrough))
def test_real_configs_can_be_put_right(path: Path, style: Passthrough) -> None:
    before = path.read_bytes().decode("utf-8", "surrogateescape")
    check_repair(before, want(0, 1, style=style))


@needs_samples
def test_the_hand_edited_config_line_by_line() -> None:
    before = (SAMPLES / "lxc_231_nvidia_hand_edited_comments_no_final_newline.conf").read_text()
    done = repair(before, want(0))
    allow = "lxc.cgroup2.devices.allow: c"
    expected = before
    for major in (237, 238, 239, 240):
        expected = expected.replace(f"{allow} {major}:* rwm\n", "")
    fixed = "\n".join(f"{allow} 195:{minor} rwm" for minor in (0, 255, 254))
    expected = expected.replace(f"{allow} 195:* rwm", fixed)
    expected = expected.replace(f"{allow} 234:* rwm", f"{allow} 511:1 rwm\n{allow} 511:2 rwm")
    assert done.text == expected
    assert reasons(done) == ["too-many-cards", "stale-major"]


# Any config


def check_repair(before: str, wanted: Want) -> None:
    done = repair(before, wanted)
    was, now = parse(before), parse(done.text)
    assert (now.pending, now.snapshots, now.main.description) == (was.pending, was.snapshots, was.main.description)
    again = repair(done.text, wanted)
    assert (again.text, again.findings, again.remaining) == (done.text, (), done.remaining), "not idempotent"
    assert bool(done.findings) == (done.text != before)
    assert done.text.endswith("\n") or not done.text or not before.endswith("\n")

    def others(text: str) -> list[str]:
        lines = text.split("\n")
        return [
            lines[line.index]
            for line in main_lines(text)
            if line.kind not in (LineKind.RAW, LineKind.KEY)
            or (line.kind is LineKind.KEY and not line.key.startswith("dev"))
            or (line.kind is LineKind.RAW and not line.key.startswith(("lxc.cgroup", "lxc.mount.entry")))
            or (line.key == "lxc.mount.entry" and "nvidia" not in line.value)
        ]

    def other_devs(keys: Mapping[str, object]) -> dict[str, object]:
        return {k: v for k, v in keys.items() if k.startswith("dev") and "nvidia" not in str(v)}

    assert others(done.text) == others(before)
    assert other_devs(now.main.keys) == other_devs(was.main.keys)
    here = passed(now.main)
    assert here.cards == set(wanted.minors)
    if wanted.minors:
        assert {"nvidiactl", "nvidia-uvm"} <= here.nodes
    if done.remaining:
        return
    rules = [*dev_rules([dev for _, dev in here.devs], wanted.gpus), *here.rules]

    def may(node_name: str) -> bool:
        device = device_of(node_name, wanted.gpus)
        assert device is not None
        return allowed(rules, device, resolver(wanted.gpus))  # type: ignore[arg-type]

    for minor in range(8):
        if minor in wanted.minors:
            assert may(f"nvidia{minor}")
        elif not wanted.alone:
            assert not may(f"nvidia{minor}")
    if wanted.minors:
        assert may("nvidiactl")
        assert may("nvidia-uvm")


NODES = ["nvidia0", "nvidia1", "nvidia2", "nvidia7", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"]
NODES += ["nvidia-caps/nvidia-cap1", "nvidia-caps"]
numbers = st.sampled_from(["*", "0", "1", "2", "195", "226", "234", "254", "255", "508", "510", "511", "10"])
access = st.sampled_from(["rwm", "rw", "r", "m", "rwm # x", "rw # x", "mrw"])
rule = st.one_of(
    st.builds("c {}:{} {}".format, st.sampled_from(["195", "195", "508", "510", "234", "226", "*"]), numbers, access),
    st.builds("/dev/{} {}".format, st.sampled_from(NODES), access),
    st.sampled_from(["a", "b 8:* rwm", "c  195:0 rwm", "junk", "a *:* rwm"]),
)
rule_line = st.builds(
    "lxc.{}.devices.{}: {}".format,
    st.sampled_from(["cgroup2", "cgroup2", "cgroup2", "cgroup"]),
    st.sampled_from(["allow", "allow", "allow", "deny"]),
    rule,
)
tails = st.sampled_from([RAW_TAIL, "none bind", "none bind,create=file 0 0", "none bind,optional,create=dir"])
mount_line = st.one_of(
    st.builds(lambda n, tail: f"lxc.mount.entry: /dev/{n} dev/{n} {tail}", st.sampled_from(NODES), tails),
    st.builds(
        lambda n, m: f"lxc.mount.entry: /dev/{n} dev/{m} {RAW_TAIL}", st.sampled_from(NODES), st.sampled_from(NODES)
    ),
    st.builds(lambda n: f"lxc.mount.entry: /lxc/{n} dev/{n} none bind", st.sampled_from(NODES)),
    st.sampled_from(["lxc.mount.entry: /dev/dri dev/dri none bind", "lxc.mount.entry: /dev/kfd dev/kfd none bind"]),
    st.sampled_from(["lxc.mount.entry: short", "lxc.hook.autodev: /x"]),
)
dev_line = st.builds(
    "dev{}: {}{}{}".format,
    st.integers(0, 4),
    st.sampled_from(["/dev/", "path=/dev/"]),
    st.sampled_from([*NODES, "dri/card0"]),
    st.sampled_from(["", ",gid=44", ",mode=0666,uid=0", ",deny-write=1"]),
)
other_line = st.sampled_from(["# comment", "", "memory: 512", "junk line", "lxc.cap.drop:", "[1snap]"])
rest = st.sampled_from(["", "[snap]\ndev0: /dev/nvidia7\n", "[pve:pending]\nmemory: 1\n", "\n[a]\nlxc.mount.entry: x"])


@st.composite
def configs(draw: st.DrawFn) -> str:
    lines = draw(st.lists(st.one_of(rule_line, mount_line, dev_line, other_line), max_size=14))
    end = draw(st.sampled_from(["\n", "\r\n"]))
    tail = draw(rest)
    return end.join(lines) + (end if lines and (tail or draw(st.booleans())) else "") + tail


@given(
    configs(),
    st.sampled_from([(), (0,), (1,), (0, 1), (1, 0)]),
    st.sampled_from(list(Passthrough)),
    st.booleans(),
)
def test_any_config_can_be_put_right(before: str, minors: tuple[int, ...], style: Passthrough, alone: bool) -> None:
    check_repair(before, want(*minors, style=style, alone=alone))


def test_a_rule_for_a_major_that_a_boot_changes_is_by_path_where_the_node_is_there_at_each_boot() -> None:
    """facts: LXC takes a path since 2019, and looks its number up at each start."""
    made = dataclasses.replace(want(0, 1), named=True)
    done = repair(FOUR_STALE, made)
    assert "stale-major" in reasons(done)
    assert "lxc.cgroup2.devices.allow: /dev/nvidia-uvm rwm\n" in done.text
    assert "c 510:" not in done.text
    assert repair(done.text, made).findings == ()
    assert repair(RIGHT, made).text == RIGHT


def test_new_devs_have_the_hosts_mode() -> None:
    gpus = gpu_facts(
        nodes=[
            node("/dev/nvidia0", 195, 0, mode="660"),
            node("/dev/nvidiactl", 195, 255, mode="666"),
            node("/dev/nvidia-uvm", MAJORS["nvidia-uvm"], 0, mode="0"),
        ]
    )
    assert repair("", want(0, gpus=gpus)).text.split("\n")[:3] == [
        "dev0: /dev/nvidia0,mode=0660",
        "dev1: /dev/nvidiactl,mode=0666",
        "dev2: /dev/nvidia-uvm",
    ]
