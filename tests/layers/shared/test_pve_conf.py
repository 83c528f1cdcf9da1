"""The config parser against what PVE 8 itself made of the same bytes, and what an edit may never touch."""

import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.layers.shared.pve_conf import Insert, LineKind, Settings, edit, main_lines, parse

SAMPLES = Path(os.environ.get("RECONCILE_SHARED", Path(__file__).parents[4] / "shared")) / "samples" / "proxmox"
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason="the samples of real Proxmox files are not there")

VECTORS = json.loads((SAMPLES / "pct_config_vectors.json").read_text()) if SAMPLES.is_dir() else {}
REAL = json.loads((SAMPLES / "samples_parsed_by_pve8.json").read_text()) if SAMPLES.is_dir() else {}

# PVE checks the inner format of these values; this parser does not, and so gives no warning for them.
FORMATS = ("format error", "value without key")


def flat(settings: Settings) -> dict:
    conf = dict(settings.keys)
    if settings.lxc:
        conf["lxc"] = [list(pair) for pair in settings.lxc]
    if settings.description:
        conf["description"] = settings.description
    return conf


def as_pve_says(text: str) -> dict:
    conf = parse(text)
    return {
        **flat(conf.main),
        "digest": conf.digest,
        "pending": flat(conf.pending),
        "snapshots": {name: flat(snapshot) for name, snapshot in conf.snapshots.items()},
    }


def of_bytes(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


@needs_samples
@pytest.mark.parametrize("name", VECTORS)
def test_vectors_of_pves_own_parser(name):
    vector = VECTORS[name]
    text = of_bytes(vector["input"].encode("latin-1"))
    assert as_pve_says(text) == vector["conf"]
    wanted = [w.removeprefix("vm 129 - ").rstrip("\n") for w in vector["warnings"]]
    assert list(parse(text).warnings) == [w for w in wanted if not any(f in w for f in FORMATS)]


@needs_samples
@pytest.mark.parametrize("name", REAL)
def test_real_configs_parse_as_pve_parses_them(name):
    text = of_bytes((SAMPLES / name).read_bytes())
    assert as_pve_says(text) == REAL[name]["conf"]


def everything_but(line: str, text: str) -> list[str]:
    return [each for each in text.split("\n") if each != line]


@needs_samples
@pytest.mark.parametrize("name", REAL)
def test_a_real_config_can_be_edited_and_reads_back_unchanged_but_for_what_was_asked(name):
    before = of_bytes((SAMPLES / name).read_bytes())
    line = ("lxc.cgroup2.devices.allow", "c 195:7 rwm")
    after = edit(before, insert=[Insert(*line), Insert("dev9", "/dev/nvidia7")])
    was, now = parse(before), parse(after)
    assert sorted(now.main.lxc) == sorted([*was.main.lxc, line])
    assert now.main.keys == {**was.main.keys, "dev9": "/dev/nvidia7"}
    assert (now.snapshots, now.pending, now.main.description) == (was.snapshots, was.pending, was.main.description)
    assert after.endswith("\n") == before.endswith("\n")
    raw = next(each for each in main_lines(after) if (each.key, each.value) == line)
    key = next(each for each in main_lines(after) if each.key == "dev9")
    assert edit(after, delete=[raw.index, key.index]).rstrip("\n") == before.rstrip("\n")


SNAPSHOT = "arch: amd64\nmemory: 512\n\n[snap1]\nmemory: 64\nlxc.cgroup2.devices.allow: c 195:* rwm\n"

PLACES = {
    "raw lines of the same key": (
        "lxc.cap.drop:\nlxc.mount.entry: /a a none bind\nlxc.apparmor.profile: x\n",
        Insert("lxc.mount.entry", "/b b none bind"),
        "lxc.cap.drop:\nlxc.mount.entry: /a a none bind\nlxc.mount.entry: /b b none bind\nlxc.apparmor.profile: x\n",
    ),
    "raw, none of its key": (
        "arch: amd64\nlxc.cap.drop:\n# end\n",
        Insert("lxc.mount.entry", "/b b none bind"),
        "arch: amd64\nlxc.cap.drop:\nlxc.mount.entry: /b b none bind\n# end\n",
    ),
    "raw, none at all, before a snapshot": (
        SNAPSHOT,
        Insert("lxc.cap.drop", "x"),
        SNAPSHOT.replace("512\n", "512\nlxc.cap.drop: x\n"),
    ),
    "key, before a snapshot": (SNAPSHOT, Insert("swap", "0"), SNAPSHOT.replace("512\n", "512\nswap: 0\n")),
    "key in its order, comments stay with what follows them": (
        "arch: amd64\n# net\nnet0: x\n",
        Insert("dev0", "/dev/a"),
        "arch: amd64\ndev0: /dev/a\n# net\nnet0: x\n",
    ),
    "dev after the last dev": (
        "dev3: /dev/a\ndev1: /dev/b\nhostname: x\n",
        Insert("dev2", "/dev/c"),
        "dev3: /dev/a\ndev1: /dev/b\ndev2: /dev/c\nhostname: x\n",
    ),
    "first key, after the description": (
        "#about\nmemory: 1\n",
        Insert("arch", "amd64"),
        "#about\narch: amd64\nmemory: 1\n",
    ),
    "main section is empty": ("[snap]\nmemory: 1\n", Insert("arch", "amd64"), "arch: amd64\n[snap]\nmemory: 1\n"),
    "file is empty": ("", Insert("arch", "amd64"), "arch: amd64\n"),
    "no last newline": ("arch: amd64", Insert("memory", "1"), "arch: amd64\nmemory: 1"),
    "no last newline, not at the end": (
        "arch: amd64\n# end",
        Insert("memory", "1"),
        "arch: amd64\nmemory: 1\n# end",
    ),
    "carriage returns": (
        "arch: amd64\r\nswap: 0\r\n",
        Insert("memory", "1"),
        "arch: amd64\r\nmemory: 1\r\nswap: 0\r\n",
    ),
    "carriage returns, no last newline": (
        "arch: a\r\nhostname: b",
        Insert("memory", "1"),
        "arch: a\r\nhostname: b\nmemory: 1",
    ),
    "a header that is none does not end the section": (
        "memory: 1\n[1snap]\nlxc.cap.drop: x\n",
        Insert("lxc.cap.drop", "y"),
        "memory: 1\n[1snap]\nlxc.cap.drop: x\nlxc.cap.drop: y\n",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_where_a_new_line_goes(name):
    before, line, after = PLACES[name]
    assert edit(before, insert=[line]) == after


SPELLINGS = {
    "lxc.cap.drop = x": "lxc.cap.drop = y",
    "lxc.cap.drop=x": "lxc.cap.drop=y",
    "lxc.cap.drop:x  ": "lxc.cap.drop:y  ",
    "lxc.cap.drop:\tx\r": "lxc.cap.drop:\ty\r",
    "lxc.cap.drop:": "lxc.cap.drop: y",
    "lxc.cap.drop: \r": "lxc.cap.drop: y\r",
}


@pytest.mark.parametrize("before", SPELLINGS)
def test_a_replaced_value_keeps_how_its_line_is_spelled(before):
    assert edit(f"arch: a\n{before}\n", replace={1: ("lxc.cap.drop", "y")}) == f"arch: a\n{SPELLINGS[before]}\n"


def test_a_value_that_is_in_its_key_too():
    assert edit("memory: m\n", replace={0: ("memory", "1")}) == "memory: 1\n"
    assert edit("lxc.x:\nlxc.cap.drop: :\n", replace={1: ("lxc.cap.drop", "=")}) == "lxc.x:\nlxc.cap.drop: =\n"


def test_another_key_on_the_same_line():
    before = "lxc.cgroup.devices.allow: c 195:* rwm\r\narch: a\r\n"
    after = edit(before, replace={0: ("lxc.cgroup2.devices.allow", "c 195:0 rwm")})
    assert after == "lxc.cgroup2.devices.allow: c 195:0 rwm\r\narch: a\r\n"


@pytest.mark.parametrize(
    "line",
    [
        Insert("memory", "1\nprotection: 0"),
        Insert("memory", "1\r"),
        Insert("memory", ""),
        Insert("memory", " 1"),
        Insert("Memory", "1"),
        Insert("hostname", "x snapstate: delete"),
        Insert("description", "x"),
        Insert("lxc.cgroup3.devices.allow", "a"),
        Insert("lxc.rootfs.path", "/"),
        Insert("[snap]", "x"),
        Insert("#", "x"),
    ],
)
def test_what_would_not_read_back_is_refused(line):
    with pytest.raises(ValueError, match="cannot write"):
        edit("arch: a\n", insert=[line])


@pytest.mark.parametrize("index", [0, 1, 2, 4, 9])
def test_only_settings_of_the_main_section_can_be_changed(index):
    text = "#about\n\njunk line\narch: a\n[snap]\nmemory: 1\n"
    for change in ({"delete": [index]}, {"replace": {index: ("memory", "1")}}):
        with pytest.raises(ValueError, match="no setting of the main section"):
            edit(text, **change)


# Any file at all, and any edit of it.

ODD = r"""
  # x

#c
# %41:
junk
[1snap]
[snap one]
LXC.a: b
memory:
snapstate: delete
description: x%0Ay
delete: net0
host-managed: 1
lxc.foo: 1"""
SETTINGS = r"""arch: amd64
memory: 512
memory: 12M
dev0: /dev/nvidia0
dev0: /dev/b
dev10: path=/dev/x,mode=0666
net0: a=b
unprivileged: yes
lxc.cap.drop:
lxc.cgroup.devices.allow: a
lxc.cgroup2.devices.allow = c 195:* rwm
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind"""
odd = st.sampled_from([*ODD.split("\n"), " ", "\udcff\udc80: x", "#\udcc3"])
setting = st.sampled_from([*SETTINGS.split("\n"), "hostname: \udcff", "swap: 0  "])
header = st.sampled_from(["[snap1]", "[PVE:pending]", "[pve:pending] ", "[a-b_c]\r"])
ends = st.sampled_from(["\n", "\r\n"])


@st.composite
def files(draw):
    end = draw(ends)
    main = draw(st.lists(st.one_of(odd, setting), max_size=12))
    rest = draw(st.lists(st.one_of(odd, setting, header), max_size=12))
    lines = [*main, *([draw(header), *rest] if rest else [])]
    return end.join(lines) + (end if draw(st.booleans()) else "")


new_lines = st.sampled_from(
    [
        Insert("dev7", "/dev/nvidia7"),
        Insert("lxc.mount.entry", "/dev/nvidia7 dev/nvidia7 none bind,optional,create=file"),
        Insert("lxc.cgroup2.devices.allow", "c 195:7 rwm"),
        Insert("memory", "7"),
        Insert("lxc.cap.drop", ""),
    ]
)


@st.composite
def edits(draw):
    text = draw(files())
    settings = [line for line in main_lines(text) if line.kind in (LineKind.KEY, LineKind.RAW)]
    chosen = draw(st.lists(st.sampled_from(settings), unique_by=lambda line: line.index)) if settings else []
    delete = [line.index for line in chosen[::2]]
    replace = {line.index: (line.key, "77") for line in chosen[1::2]}
    return text, replace, delete, draw(st.lists(new_lines, max_size=3))


def outside_main(text: str) -> str:
    count = len(main_lines(text))
    return "\n".join(text.split("\n")[count:])


@given(edits())
def test_an_edit_does_what_was_asked_and_nothing_else(change):
    before, replace, delete, insert = change
    after = edit(before, replace, delete, insert)
    was, now = parse(before), parse(after)
    assert outside_main(after) == outside_main(before)
    assert (now.snapshots, now.pending, now.main.description) == (was.snapshots, was.pending, was.main.description)
    assert now.warnings == parse(edit(before, replace, delete)).warnings

    def kept(text, kinds):
        return [line for line in main_lines(text) if line.kind in kinds]

    others = (LineKind.COMMENT, LineKind.OTHER, LineKind.BLANK)
    bodies = [before.split("\n")[line.index].rstrip("\r") for line in kept(before, others)]
    assert [after.split("\n")[line.index].rstrip("\r") for line in kept(after, others)] == bodies
    wanted = [
        replace.get(line.index, (line.key, line.value))
        for line in kept(before, (LineKind.KEY, LineKind.RAW))
        if line.index not in delete
    ]
    settings = [(line.key, line.value) for line in kept(after, (LineKind.KEY, LineKind.RAW))]
    for line in insert:
        settings.remove((line.key, line.value))
    assert sorted(settings) == sorted(wanted)
    assert set(after) - set(before) <= set("\n\r 77" + "".join(i.key + i.value + ":" for i in insert))


@given(files())
def test_an_edit_that_asks_for_nothing_changes_nothing(text):
    assert edit(text) == text
    same = {
        line.index: (line.key, line.value)
        for line in main_lines(text)
        if line.kind in (LineKind.KEY, LineKind.RAW) and line.value.strip()
    }
    assert edit(text, replace=same) == text


@given(files(), new_lines)
def test_what_was_put_in_can_be_taken_out(text, line):
    after = edit(text, insert=[line])
    here = [each for each in main_lines(after) if (each.key, each.value) == (line.key, line.value)]
    assert here
    again = [edit(after, delete=[each.index]) for each in here]
    assert any(one.rstrip("\r\n") == text.rstrip("\r\n") for one in again)


@given(st.binary(max_size=300))
def test_any_bytes_parse_and_come_back(data):
    text = of_bytes(data)
    assert parse(text).digest == hashlib.sha1(data).hexdigest()
    assert edit(text).encode("utf-8", "surrogateescape") == data
