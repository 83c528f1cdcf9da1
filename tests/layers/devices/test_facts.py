"""The fragment under a real shell, against a tree as pmxcfs shows it, and what is made of its answer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from controller.facts.words import ParseError, Section
from controller.layers import devices
from controller.layers.devices.facts import GuestFacts, parse
from tests.layers.shell import ask, write

# As pmxcfs words it (pve-cluster status.c): one node a line.
MEMBERS = """{
"nodename": "kpro5",
"version": 8,
"cluster": { "name": "lab", "version": 3, "nodes": 3, "quorate": 1 },
"nodelist": {
  "kpro4": { "id": 1, "online": 1, "ip": "10.1.2.4"},
  "kpro5": { "id": 2, "online": 1, "ip": "10.1.2.5"},
  "kpro6": { "id": 3, "online": 0}
  }
}
"""
DEVICES = """Character devices:
  1 mem
195 nvidia
195 nvidiactl
508 nvidia-uvm
226 drm

Block devices:
  8 sd
254 virtblk
"""
CONF = "# Über\narch: amd64\n"
TREE = {
    "/etc/pve/.members": MEMBERS,
    "/etc/pve/nodes/kpro5/lxc/129.conf": CONF,
    "/etc/pve/nodes/kpro5/lxc/129.conf.tmp.77": "half",
    "/etc/pve/nodes/kpro5/qemu-server/210.conf": "hostpci0: 4f:00\n",
    "/etc/pve/nodes/kpro4/lxc/100.conf": "arch: arm64\n",
    "/etc/pve/nodes/kpro6/lxc/130.conf": "arch: armhf",
    "/etc/pve/nodes/kpro7/lxc/131.conf": "",
    "/etc/pve/mapping/pci.cfg": "rtx3090\n\tmap id=10de:2204,node=kpro5,path=0000:17:00\n",
    "/proc/devices": DEVICES,
    "/sys/fs/cgroup/cgroup.controllers": "cpu\n",
    "/run/qemu-server/pci-id-reservations": "0000:17:00.0 210 pid:4711\n0000:31:00.0 211 time:1764500000\n",
}
SHELLS = [shell for shell in ("dash", "bash", "busybox sh") if shutil.which(shell.split()[0])]


def seen(root: Path, shell: str = "dash") -> GuestFacts:
    section = ask(devices.LAYER.probe, root, shell=shell)
    assert section.rc == 0, section.err
    return parse(section)


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if " " not in shell])
def test_a_node_as_it_answers(tmp_path: Path, shell: str) -> None:
    write(tmp_path, TREE)
    facts = seen(tmp_path, shell)
    assert (facts.node, facts.cgroup2) == ("kpro5", True)
    assert [(g.kind, g.id, g.node, g.text) for g in facts.guests] == [
        ("lxc", 129, "kpro5", CONF),
        ("lxc", 130, "kpro6", "arch: armhf"),  # its node is not online: nobody else can tell of it
        ("lxc", 131, "kpro7", ""),  # its node is no member any more
        ("qemu", 210, "kpro5", "hostpci0: 4f:00\n"),
    ]
    assert facts.reservations == (("0000:17:00.0", 210), ("0000:31:00.0", 211))
    assert facts.drivers == ((1, "mem"), (195, "nvidia"), (508, "nvidia-uvm"), (226, "drm"))
    assert facts.mappings.startswith("rtx3090\n")
    assert facts.container(129) is not None
    assert facts.container(130) is None


def test_a_config_comes_byte_for_byte(tmp_path: Path) -> None:
    data = b"hostname: \xff\xfe\r\n\r\n#caf\xc3\xa9\nno end"
    write(tmp_path, TREE)
    (tmp_path / "etc/pve/nodes/kpro5/lxc/129.conf").write_bytes(data)
    guest = seen(tmp_path).container(129)
    assert guest is not None
    assert guest.text.encode("utf-8", "surrogateescape") == data


def test_a_node_without_guests_and_without_a_cluster(tmp_path: Path) -> None:
    write(tmp_path, {"/etc/pve/.members": '{\n"nodename": "solo",\n"version": 0\n}\n', "/proc/devices": DEVICES})
    (tmp_path / "etc/pve/nodes/solo/lxc").mkdir(parents=True)
    facts = seen(tmp_path)
    assert (facts.node, facts.cgroup2, facts.guests, facts.mappings) == ("solo", False, (), "")


@pytest.mark.parametrize("members", ["", '{"nodename": "elsewhere"}\n'])
def test_without_a_cluster_file_system_nothing_is_known(tmp_path: Path, members: str) -> None:
    write(tmp_path, {**TREE, "/etc/pve/.members": members})
    section = ask(devices.LAYER.probe, tmp_path)
    assert section.rc != 0
    assert "which node" in section.err


@pytest.mark.parametrize("out", ["", "cgroup 2\n==files\n", "cgroup 3\nnode a\n==files\n", "node a\ncgroup 2\n"])
def test_half_an_answer_is_no_fact(out: str) -> None:
    with pytest.raises(ParseError):
        parse(Section(0, out))


def test_two_looks_at_the_same_say_the_same(tmp_path: Path) -> None:
    write(tmp_path, TREE)
    assert ask(devices.LAYER.probe, tmp_path) == ask(devices.LAYER.probe, tmp_path)
