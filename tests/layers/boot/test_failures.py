"""What people report of cards and boots, by the numbers of the project's list of failures: seen, named, put right.

Each row: the number, what happens, what is seen, and by which layer with which reason and which step (none: reported).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from controller.core.words import Drift, Step, Verdict
from controller.layers.boot.facts import BootFacts
from controller.layers.boot.next_boot import next_boot
from controller.layers.gpu_health.facts import GpuFacts
from tests.layers.binding import test_binding as cards
from tests.layers.boot import test_boot as boots
from tests.layers.fleet import CHAR, FIRST, MAJORS, VMS, gpu_facts, node


def with_node(path: str, kind: str = CHAR, major: int = 0, minor: int = 0) -> GpuFacts:
    """The cards, with another thing at a path under /dev."""
    facts = gpu_facts()
    others = tuple(each for each in facts.nodes if each.path != path)
    return dataclasses.replace(facts, nodes=(*others, node(path, major, minor, kind)))


def without(path: str) -> GpuFacts:
    facts = gpu_facts()
    return dataclasses.replace(facts, nodes=tuple(each for each in facts.nodes if each.path != path))


NOW: dict[str, GpuFacts] = {
    "1 nvidia-uvm has another major since the reboot": with_node("/dev/nvidia-uvm", major=MAJORS["nvidia-uvm"] + 1),
    "3 /dev/nvidia-uvm is absent until a program asks for it": without("/dev/nvidia-uvm"),
    "13 an empty plain file where a card's node should be": with_node("/dev/nvidia0", "regular empty file"),
}


@pytest.mark.parametrize("what", NOW)
def test_nodes(what: str, tmp_path: Path) -> None:
    verdict = boots.judged(boots.seen(boots.files(), tmp_path), gpus=NOW[what])
    assert named(verdict) == ("missing-nodes", "make-nodes")


BINDING: dict[str, tuple[GpuFacts, str, str]] = {
    "8 nouveau owns the card": (cards.STEPS["nouveau has it"][0], "not-on-nvidia", "bind-gpu"),
    "9 the card is on vfio-pci": (cards.ON_VFIO, "not-on-nvidia", "bind-gpu"),
    "10 nvidia grabbed a VM's card": (cards.change(cards.LOADED, VMS[0], driver="nvidia"), "not-on-vfio", "bind-gpu"),
    "11 ids= took both of two identical cards": (cards.HALF, "not-on-nvidia", "bind-gpu"),
}


@pytest.mark.parametrize("what", BINDING)
def test_drivers(what: str) -> None:
    gpus, reason, action = BINDING[what]
    assert named(cards.judged(gpus)) == (reason, action)


BROKEN = {
    "12 spaces in ids=": "options vfio-pci ids=10de:2230, 10de:2204\n",
    "12 the option is misspelt": "option vfio-pci ids=10de:2204\n",
    "12 the folder is misspelt (modeprobe.d)": "",
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_vfio_conf_does_not_matter_with_our_unit(what: str, tmp_path: Path) -> None:
    conf = ("/etc/modprobe.d/vfio.conf", BROKEN[what])
    kernel = dataclasses.replace(boots.KERNELS, modprobe=(*boots.KEPT_OFF, conf))
    modules = ("vfio_pci",)
    before = boots.wrong(kernel=kernel, record=BootFacts(modules=modules))
    assert ("host.boot", "vm-gpu-on-nvidia", VMS[0]) in before
    record = dataclasses.replace(boots.seen(boots.files(), tmp_path), modules=modules)
    assert boots.wrong(kernel=kernel, record=record) == set()


def test_9_ids_in_modprobe_d_are_named_before_the_boot() -> None:
    kernel = dataclasses.replace(boots.KERNELS, modprobe=(*boots.KEPT_OFF, boots.IDS))
    assert named(boots.judged(kernel=kernel)) == ("taken-by-ids", "set-up-boot")
    played = boots.view(BootFacts(modules=("vfio_pci",)), kernel=kernel)
    found = {w.reason for w in next_boot(played, played.host("kpro5")) if FIRST in w.message}
    assert found == {"gpu-on-vfio"}


def named(verdict: Verdict) -> tuple[str, str]:
    """A drift's reason and what is done about it."""
    assert isinstance(verdict, Drift)
    return verdict.reason, verdict.remedy.action if isinstance(verdict.remedy, Step) else ""
