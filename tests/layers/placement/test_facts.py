"""The fragment under a real shell, with a Ceph that answers, refuses or hangs; and what is made of its answer."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from controller.core import probe
from controller.facts.words import ParseError, Section, Unknown
from controller.layers import placement
from controller.layers.placement.facts import PlacementFacts, parse
from controller.layers.shared.volumes import Volume
from tests.layers.devices.test_facts import MEMBERS
from tests.layers.shell import write

STORAGE = """\
dir: local
\tpath /var/lib/vz
\tcontent iso,vztmpl

rbd: fast
\tcontent images,rootdir
\tmonhost 10.0.0.1 10.0.0.2;10.0.0.3
\tnamespace box
\tpool nvme
\tusername pve

# a comment
lvm: san
\tshared 1
\tvgname san
\tnodes kpro5,kpro6
\tdisable
"""
CONF = (
    "mp0: /tank,mp=/tank\nmp1: san:vm-130-disk-1,mp=/a\nrootfs: fast:vm-130-disk-0,size=8G\n"
    "[snap]\nmp2: fast:vm-130-disk-9\n"
)
TREE = {
    "/etc/pve/.members": MEMBERS,
    "/etc/pve/storage.cfg": STORAGE,
    "/etc/pve/priv/ceph/fast.keyring": "[client.pve]\n",
    "/etc/pve/nodes/kpro5/lxc/129.conf": "rootfs: fast:vm-129-disk-0\n",
    "/etc/pve/nodes/kpro6/lxc/130.conf": CONF,
    "/etc/pve/nodes/kpro7/lxc/131.conf": "rootfs: fast:vm-131-disk-0\n",
    "/proc/net/unix": "Num\n0: 2 @/var/lib/lxc/129/command\n0: 3 @/var/lib/lxc/200/command\n0: 3 /run/x\n",
    "/run/qemu-server/210.pid": "77\n",
    "/run/qemu-server/211.pid": "78\n",
    "/proc/77/stat": "77\n",
}
DISK = Volume("rootfs", "fast", "vm-130-disk-0")
GUESTS = (129, 130, 131, 999)
NOBODY = """echo '{"watchers":[]}'"""


def ask(root: Path, rbd: str, shell: str = "dash") -> Section:
    write(root, TREE)
    (root / "bin").mkdir(exist_ok=True)
    (root / "bin/rbd").write_text(f'#!/bin/sh\necho "$*" >>{root}/asked\n{rbd}\n')
    (root / "bin/rbd").chmod(0o755)
    here = f"root={root} run_dir={root}/run/reconcile PATH={root}/bin:$PATH\n"
    asked = probe.script({"x": placement.LAYER.probe}) + here + probe.look("token-1", 0, GUESTS)
    done = subprocess.run(shell.split(), input=asked.encode(), stdout=subprocess.PIPE, check=True, timeout=60)
    return probe.read(done.stdout, "token-1")["x"]


def seen(root: Path, rbd: str = NOBODY, shell: str = "dash") -> PlacementFacts:
    section = ask(root, rbd, shell)
    assert section.rc == 0, section.err
    return parse(section)


@pytest.mark.parametrize("shell", [s for s in ("dash", "bash", "busybox sh") if shutil.which(s.split()[0])])
def test_what_runs_and_who_watches(tmp_path: Path, shell: str) -> None:
    facts = seen(tmp_path, shell=shell)
    assert facts.running == {("lxc", 129), ("lxc", 200), ("qemu", 210)}
    assert {(image.guest, image.name, image.watchers) for image in facts.images} == {
        (130, "vm-130-disk-0", ()),
        (131, "vm-131-disk-0", ()),  # of a node that was taken out of the cluster
    }
    asked = (tmp_path / "asked").read_text().splitlines()[0]
    assert asked == (
        f"-p nvme --namespace box -m 10.0.0.1,10.0.0.2,10.0.0.3 --keyring {tmp_path}/etc/pve/priv/ceph/fast.keyring "
        "-n client.pve status --format json vm-130-disk-0"
    )


def test_storages(tmp_path: Path) -> None:
    facts = seen(tmp_path)
    local, fast, san = (facts.storage(name) for name in ("local", "fast", "san"))
    assert local is not None
    assert fast is not None
    assert san is not None
    assert (local.shared, fast.shared, san.shared) == (False, True, True)
    assert (fast.is_on("kpro5"), san.is_on("kpro5")) == (True, False)
    assert fast.content == ("images", "rootdir")
    assert facts.storage("other") is None


def test_watchers_old_and_new(tmp_path: Path) -> None:
    new = """echo '{"watchers":[{"address":"10.1.2.6:0/77","client":4,"cookie":1}]}'"""
    assert seen(tmp_path, new).watchers(130, DISK) == ("10.1.2.6:0/77",)
    old = """echo '{"watchers":{"watcher":{"address":"10.1.2.6:0/78","client":4}}}'"""
    assert seen(tmp_path, old).watchers(130, DISK) == ("10.1.2.6:0/78",)


@pytest.mark.parametrize(
    ("rbd", "reason"),
    [
        ("echo 'rbd: error opening pool: (2) No such file' >&2; exit 2", "ceph-failed"),
        ("echo '{}'", "ceph-failed"),
        ("echo Watchers: none", "ceph-failed"),
        ("true", "ceph-failed"),
        ("exec sleep 20", "ceph-hangs"),
    ],
)
def test_no_answer_is_not_nobody(tmp_path: Path, rbd: str, reason: str) -> None:
    begun = time.monotonic()
    watchers = seen(tmp_path, rbd).watchers(130, DISK)
    assert isinstance(watchers, Unknown)
    assert watchers.reason == reason
    assert time.monotonic() - begun < 15


def test_what_was_not_asked_is_unknown(tmp_path: Path) -> None:
    found = seen(tmp_path).watchers(130, Volume("mp9", "fast", "other"))
    assert isinstance(found, Unknown)
    assert found.reason == "not-asked"


def test_garbage() -> None:
    with pytest.raises(ParseError, match="no end"):
        parse(Section(0, "runs|lxc|1\n"))
    with pytest.raises(ParseError, match="cannot read"):
        parse(Section(0, "walks|lxc|1\n==storage\n"))
