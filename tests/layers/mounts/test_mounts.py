"""The fragment under a real shell; and what is done about mounts whose source is not there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from controller.core.view import View
from controller.core.words import Block, Drift, InSync, NotKnown, Skipped, Step, Verdict
from controller.facts.words import HostFacts, Known, ParseError, Section
from controller.layers import mounts
from controller.layers.mounts.facts import MountFacts, parse
from controller.spec.model import Container
from tests.layers.fleet import access_facts, container, guest_facts, host, specs, view
from tests.layers.shell import ask, write

CONF = (
    "# about\narch: amd64\nmp0: /srv/models,mp=/models,ro=1\nmp1: ceph:vm-129-disk-1,mp=/data\n"
    "mp2: volume=/srv/list,mp=/list\nlxc.mount.entry: /gone shared none bind,create=dir 0 0\n"
    "lxc.mount.entry = /maybe maybe none bind,optional,create=dir\n"
    "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind\n"
    "lxc.mount.entry: /srv/a\\040b ab none bind\nlxc.mount.entry: /dangling d none bind\n"
    "[1no-header]\nlxc.mount.entry: /late late none bind\n[snap]\nmp0: /other,mp=/models\n"
)
HEAD = CONF[: CONF.index("[1no-header]")]


def tree(root: Path) -> None:
    write(
        root,
        {
            "/etc/pve/nodes/kpro5/lxc/129.conf": CONF,
            "/etc/pve/nodes/kpro6/lxc/130.conf": "mp0: /srv/models,mp=/m\n",
            "/etc/pve/nodes/kpro6/lxc/131.conf": "mp0: /srv/models,mp=/m\n",
            "/proc/mounts": "proc /proc proc rw 0 0\nnas:/x /mnt/nas nfs4 rw,hard 0 0\nlxcfs /x fuse.lxcfs rw 0 0\n",
            "/srv/models/x": "",
            "/srv/list": "",
            "/srv/a b/x": "",
        },
    )
    os.symlink("/nowhere/at/all", root / "dangling")


@pytest.mark.parametrize("shell", [shell for shell in ("dash", "bash") if shutil.which(shell)])
def test_what_is_there(tmp_path: Path, shell: str) -> None:
    tree(tmp_path)
    section = ask(mounts.LAYER.probe, tmp_path, (129, 130, 999), shell=shell)
    assert (section.rc, section.err) == (0, "")
    facts = parse(section)
    assert [guest for guest, _ in facts.guests] == [129, 130]
    found = {(m.bind.source, m.bind.target): m.there for m in facts.of(129) or ()}
    assert found == {
        ("/srv/models", "/models"): "dir",
        ("/srv/list", "/list"): "file",
        ("/gone", "/shared"): "missing",
        ("/maybe", "/maybe"): "missing",
        ("/srv/a b", "/ab"): "dir",
        ("/dangling", "/d"): "missing",
        ("/late", "/late"): "missing",
    }
    assert [m.bind.optional for m in facts.of(129) or () if m.bind.source == "/maybe"] == [True]


def test_a_dead_file_server_holds_up_nothing(tmp_path: Path) -> None:
    tree(tmp_path)
    conf = "mp0: /mnt/nas/models,mp=/m\nmp1: /mnt/nas,mp=/n\nmp2: /mnt/nasty,mp=/o\n"
    write(tmp_path, {"/etc/pve/nodes/kpro5/lxc/129.conf": conf, "/mnt/nas/x": "", "/mnt/nasty/x": ""})
    hangs = (
        'detached() { shift 2; case "$*" in\n*models) echo "hung 7" ;;\n'
        "*) printf 'exit 0\\ndirectory\\n' ;;\nesac; }\n"
    )
    facts = parse(ask(hangs + mounts.LAYER.probe, tmp_path, (129,)))
    assert {m.bind.source: m.there for m in facts.of(129) or ()} == {
        "/mnt/nas/models": "unknown",
        "/mnt/nas": "dir",
        "/mnt/nasty": "dir",
    }


def test_a_file_server_that_answers(tmp_path: Path) -> None:
    tree(tmp_path)
    conf = "mp0: /mnt/nas/models,mp=/m\nmp1: /mnt/nas,mp=/n\nmp2: /mnt/nas/file,mp=/o\n"
    write(tmp_path, {"/etc/pve/nodes/kpro5/lxc/129.conf": conf, "/mnt/nas/file": "1"})
    facts = parse(ask(mounts.LAYER.probe, tmp_path, (129,)))
    assert {m.bind.source: m.there for m in facts.of(129) or ()} == {
        "/mnt/nas/models": "missing",
        "/mnt/nas": "dir",
        "/mnt/nas/file": "file",
    }


def test_garbage() -> None:
    with pytest.raises(ParseError, match="cannot read"):
        parse(Section(0, "guest|129\nmount|129|door|mp0: /a,mp=/a\n"))


# The verdict


def world(*lines: str, who: Container | None = None, conf: str = HEAD) -> View:
    """A host on which the mounts are as the lines say."""
    facts = parse(Section(0, "guest|129\n" + "".join(f"mount|129|{line}\n" for line in lines)))
    seen = view(specs(host(), who or container()), guest_facts((129, conf)))
    sections = {**seen.facts["kpro5"].sections, mounts.NAME: Known(facts)}
    return View(seen.specs, {"kpro5": HostFacts("kpro5", sections)})


def judge(seen: View) -> Verdict:
    return mounts.check(seen, seen.specs.containers["ct129"])


GONE = "missing|lxc.mount.entry: /gone shared none bind,create=dir 0 0"
DROP = [{"target": "/shared", "when_missing": "drop"}]


def test_all_there() -> None:
    assert judge(world("dir|mp0: /srv/models,mp=/models,ro=1")) == InSync()


def test_what_may_be_missing_is_told() -> None:
    verdict = judge(world("missing|lxc.mount.entry = /maybe maybe none bind,optional,create=dir"))
    assert verdict == InSync("optional and not there: /maybe")


def test_what_has_to_be_there_blocks() -> None:
    verdict = judge(world(GONE))
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Block)
    assert verdict.remedy.reason == "mount-source-missing"
    assert "when_missing: drop" in verdict.remedy.needs


def test_it_is_dropped_where_the_spec_says_so() -> None:
    seen = world(GONE, who=container(mounts=DROP))
    verdict = judge(seen)
    assert isinstance(verdict, Drift)
    step = verdict.remedy
    assert isinstance(step, Step)
    assert step.stdin.decode() == HEAD.replace("lxc.mount.entry: /gone shared none bind,create=dir 0 0\n", "")
    assert step.layer == mounts.NAME
    after = View(seen.specs, step.effect(seen.facts))
    assert judge(after) == InSync()


def test_a_mount_point_is_dropped_with_every_line_of_its_key() -> None:
    conf = "arch: amd64\nmp0: /old,mp=/shared\nmp0: /gone,mp=/shared\n"
    seen = world("missing|mp0: /gone,mp=/shared", who=container(mounts=DROP), conf=conf)
    verdict = judge(seen)
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Step)
    assert verdict.remedy.stdin == b"arch: amd64\n"


def test_one_needed_mount_keeps_the_other_from_being_dropped() -> None:
    verdict = judge(world(GONE, "missing|mp0: /srv/models,mp=/models,ro=1", who=container(mounts=DROP)))
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Block)
    assert "/models" in verdict.remedy.message
    assert "/shared" not in verdict.remedy.message


def test_a_locked_container_is_not_edited() -> None:
    verdict = judge(world(GONE, who=container(mounts=DROP), conf=HEAD + "lock: backup\n"))
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Block)
    assert verdict.remedy.reason == "locked"


def test_nobody_knows() -> None:
    with pytest.raises(NotKnown) as unknown:
        judge(world("unknown|mp0: /srv/models,mp=/models"))
    assert unknown.value.reason == "mount-source-unknown"
    with pytest.raises(NotKnown):
        judge(View(world().specs, {"kpro5": world().facts["kpro5"].with_section(mounts.NAME, MountFacts(()))}))


def test_a_container_that_is_not_there_is_not_judged() -> None:
    seen = view(specs(), guest_facts(), access=access_facts(((129, "kpro6", "lxc"),)))
    assert isinstance(mounts.check(seen, container()), Skipped)
