"""Which card is on the wrong driver, what is done about it, and every reason why nothing is."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest

from controller.core.plan import plan
from controller.core.view import View
from controller.core.words import Block, Drift, InSync, NotKnown, Skipped, Step, Verdict
from controller.facts.words import HostFacts, Known, Later, ParseError, Section, Unknown
from controller.layers import binding
from controller.layers.binding.facts import BindingFacts, User, parse
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.shared.claims import digest
from controller.spec.model import Specs
from tests.layers.fleet import FIRST, SECOND, VMS, function, gpu_facts, guest_facts, host
from tests.layers.shell import ask, write

IDLE = BindingFacts()
NO_VMS = guest_facts()


def change(facts: GpuFacts, pci: str, **values: Any) -> GpuFacts:
    functions = (dataclasses.replace(f, **values) if f.pci == pci else f for f in facts.functions)
    gpus = tuple(g for g in facts.gpus if g.pci != pci or values.get("driver", "nvidia") == "nvidia")
    return dataclasses.replace(facts, functions=tuple(functions), gpus=gpus)


LOADED = gpu_facts()
BARE = dataclasses.replace(gpu_facts(minors={}), module=None, smi=(), majors=())
ON_VFIO = BARE  # every card on vfio-pci, no module
FREE = change(change(BARE, FIRST, driver="", override="nvidia"), SECOND, driver="", override="nvidia")

HALF = change(FREE, FIRST, driver="vfio-pci", override="")


def judged(gpus: GpuFacts, guests: Any = NO_VMS, users: BindingFacts = IDLE, **spec: Any) -> Verdict:
    wanted = host(**spec)
    sections = {"host.gpu-health": gpus, "host.gpu-binding": users, "container.devices": guests}
    known = {name: Known(value) for name, value in sections.items()}
    return binding.check(View(Specs(hosts={"kpro5": wanted}), {"kpro5": HostFacts("kpro5", known)}), wanted)


def vm(text: str, vmid: int = 201, **more: object) -> Any:
    return guest_facts((vmid, text), kind="qemu", **more)


RIGHT = {
    "cards of containers on nvidia, of VMs on vfio-pci": (LOADED, NO_VMS),
    "no module, and kept for it": (FREE, NO_VMS),
    "claimed by a VM, on no driver, kept from nvidia": (
        change(LOADED, VMS[0], driver="", override="vfio-pci"),
        vm("hostpci0: 17:00\n"),
    ),
    "a card that is not there": (gpu_facts(cards={SECOND: "10de:2230"}, minors={SECOND: 0}), NO_VMS),
    "a card of another model": (change(HALF, FIRST, device="10de:2204"), NO_VMS),
    "a card that fell off the bus": (change(HALF, FIRST, link_width=63), NO_VMS),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right(name: str) -> None:
    assert isinstance(judged(*RIGHT[name]), InSync)


STEPS = {
    "vfio-pci has it": (ON_VFIO, NO_VMS, ("bind", FIRST, "nvidia", "vfio-pci")),
    "nouveau has it": (
        change(FREE, FIRST, driver="nouveau", override=""),
        NO_VMS,
        ("bind", FIRST, "nvidia", "nouveau"),
    ),
    "driverless, the module is loaded": (change(LOADED, SECOND, driver=""), NO_VMS, ("bind", SECOND, "nvidia", "")),
    "no module, and not kept for it": (change(FREE, FIRST, override=""), NO_VMS, ("bind", FIRST, "nvidia", "")),
    "cut off after the override": (
        change(ON_VFIO, FIRST, override="nvidia"),
        NO_VMS,
        ("bind", FIRST, "nvidia", "vfio-pci"),
    ),
    "a VM's card, claimed by none, on nvidia": (
        change(LOADED, VMS[0], driver="nvidia"),
        NO_VMS,
        ("bind", VMS[0], "vfio-pci", "nvidia"),
    ),
    "a VM's card, claimed by none, on no driver": (
        change(LOADED, VMS[1], driver=""),
        NO_VMS,
        ("bind", VMS[1], "vfio-pci", ""),
    ),
    "a VM's card, claimed, on no driver": (
        change(FREE, VMS[1], driver=""),
        vm("hostpci0: 31:00\n"),
        ("guard", VMS[1], "vfio-pci", ""),
    ),
    "one is blocked, another is not": (ON_VFIO, vm("hostpci0: 4f:00\n"), ("bind", SECOND, "nvidia", "vfio-pci")),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_is_done(name: str) -> None:
    gpus, guests, args = STEPS[name]
    verdict = judged(gpus, guests)
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Step)
    assert verdict.remedy.args == (*args, digest(guests))
    assert [str(d) for d in verdict.remedy.disrupts] == ["rebind-gpu:Host/kpro5"]
    assert not any(word in verdict.remedy.script.text for word in ("new_id", "ids=")), "never by vendor and device"


SHARED = dataclasses.replace(
    LOADED,
    functions=(
        *(f for f in LOADED.functions if f.pci != FIRST),
        function(FIRST, "10de:2230", "nvidia", (FIRST, VMS[0])),
    ),
)
NVME = dataclasses.replace(
    LOADED,
    functions=(
        *(f for f in LOADED.functions if f.pci != FIRST),
        function(FIRST, "10de:2230", "nvidia", (FIRST, "0000:50:00.0")),
    ),
)
KVM = User(4711, "/dev/vfio/31", "/qemu.slice/203.scope", "kvm")
BLOCKS: dict[str, tuple[GpuFacts, Any, BindingFacts, str, str]] = {
    "by a stopped VM": (HALF, vm("hostpci0: 0000:4f:00.0\n"), IDLE, "claimed-by-vm", "VM 201 (hostpci0)"),
    "by all functions": (HALF, vm("hostpci9: 4f:00,pcie=1\n"), IDLE, "claimed-by-vm", "hostpci9"),
    "by its audio": (
        dataclasses.replace(HALF, functions=(*HALF.functions, function("0000:4f:00.1", "10de:1aef", ""))),
        vm("hostpci0: 4f:00.1\n"),
        IDLE,
        "claimed-by-vm",
        "VM 201",
    ),
    "by a template": (HALF, vm("template: 1\nhostpci0: host=ce:00.0;4f:00.0\n"), IDLE, "claimed-by-vm", "VM 201"),
    "by a pending change": (HALF, vm("cores: 1\n\n[PENDING]\nhostpci0: 4f:00.0\n"), IDLE, "claimed-by-vm", "VM 201"),
    "by args": (HALF, vm("args: -device vfio-pci,host=4f:00.0\n"), IDLE, "claimed-by-vm", "(args)"),
    "by a mapping": (
        HALF,
        vm("hostpci0: mapping=big\n", mappings="big\n\tmap id=10de:2230,node=kpro5,path=0000:4f:00.0\n"),
        IDLE,
        "claimed-by-vm",
        "VM 201",
    ),
    "by a reservation": (
        HALF,
        guest_facts(reservations=(("0000:4f:00.0", 203),)),
        IDLE,
        "claimed-by-vm",
        "VM 203 (running)",
    ),
    "by an open group": (HALF, NO_VMS, BindingFacts((KVM,)), "gpu-in-use", "VM 203 (kvm, process 4711)"),
    "a VM's card in the group": (SHARED, NO_VMS, IDLE, "shared-iommu-group", VMS[0]),
    "a VM's disk in the group": (NVME, vm("hostpci0: 50:00.0\n"), IDLE, "shared-iommu-group", "0000:50:00.0"),
    "a claimed card on nvidia": (
        change(LOADED, VMS[0], driver="nvidia"),
        vm("hostpci0: 17:00\n"),
        IDLE,
        "vm-card-taken",
        "is on nvidia",
    ),
    "no IOMMU": (change(LOADED, VMS[0], driver="nvidia", group=""), NO_VMS, IDLE, "no-iommu", VMS[0]),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_why_nothing_is_done(name: str) -> None:
    gpus, guests, users, reason, about = BLOCKS[name]
    verdict = judged(gpus, guests, users)
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Block), verdict
    assert verdict.remedy.reason == reason
    assert about in verdict.message
    assert verdict.remedy.needs


def test_a_snapshot_of_a_vm_claims_nothing() -> None:
    assert isinstance(judged(LOADED, vm("cores: 1\n\n[before]\nhostpci0: 4f:00.0\n")), InSync)


def test_a_card_in_use_on_nvidia_is_not_unbound() -> None:
    gpus = gpu_facts(minors={FIRST: 0, SECOND: 1, VMS[0]: 2})
    users = BindingFacts((User(9, "/dev/nvidia2", "/lxc/130/ns", "python3"), User(8, "/dev/nvidia0", "/", "x")))
    verdict = judged(gpus, NO_VMS, users)
    assert isinstance(verdict, Drift)
    assert verdict.reason == "gpu-in-use"
    assert "CT 130 (python3, process 9)" in verdict.message
    assert "process 8" not in verdict.message


def test_who_uses_it_is_not_known() -> None:
    with pytest.raises(NotKnown):
        judged(HALF, NO_VMS, BindingFacts(unknown=Unknown("users-not-known", "hung")))


def test_a_card_in_no_spec_is_never_touched() -> None:
    gpus = [{"pci": FIRST, "model": "RTX A6000", "owner": "containers"}]
    others = [
        change(FREE, pci, driver=driver) for pci in (SECOND, *VMS) for driver in ("", "nvidia", "nouveau", "vfio-pci")
    ]
    assert all(isinstance(judged(facts, nvidia={"gpus": gpus}), InSync) for facts in others)


def test_identical_cards_with_different_owners() -> None:
    gpus = [{"pci": p, "model": "RTX A6000", "owner": o} for p, o in ((FIRST, "containers"), (SECOND, "vms"))]
    verdict = judged(ON_VFIO, nvidia={"gpus": gpus})
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Step)
    assert verdict.remedy.args[:3] == ("bind", FIRST, "nvidia")
    assert isinstance(judged(change(FREE, SECOND, driver="vfio-pci"), nvidia={"gpus": gpus}), InSync)


@pytest.mark.parametrize("spec", [{"nvidia": None}, {"lifecycle": "maintenance"}, {"lifecycle": "decommissioned"}])
def test_hosts_that_it_does_not_concern(spec: dict[str, Any]) -> None:
    assert isinstance(judged(ON_VFIO, **spec), Skipped)


def test_the_plan_shows_the_whole_chain_and_numbers_come_later() -> None:
    gpus = change(LOADED, SECOND, driver="vfio-pci")
    known = {"host.gpu-health": Known(gpus), "host.gpu-binding": Known(IDLE), "container.devices": Known(NO_VMS)}
    predicted = plan((binding.LAYER,), Specs(hosts={"kpro5": host()}), {"kpro5": HostFacts("kpro5", known)})
    assert [p.step.args[1] for p in predicted.steps] == [SECOND]
    assert predicted.then.in_sync
    step = predicted.steps[0].step
    after = step.effect({"kpro5": HostFacts("kpro5", known)})["kpro5"].section("host.gpu-health")
    assert isinstance(after, Known)
    assert after.value.gpu(SECOND).minor == Later(step.id)  # type: ignore[attr-defined]


# What the host is asked


@pytest.mark.parametrize("out", ["", "what\n", "exit 0\n1|2\n", "exit 0\nx|/dev/nvidia0|/|a\n"])
def test_garbage_is_no_fact(out: str) -> None:
    with pytest.raises(ParseError):
        parse(Section(0, out))


def test_a_scan_that_hangs_is_unknown() -> None:
    assert parse(Section(0, "hung 12\n")).unknown is not None


def test_nothing_is_scanned_where_nothing_can_be_open(tmp_path: Path) -> None:
    write(tmp_path, {"/proc/1/cgroup": "0::/\n"})
    assert ask(binding.LAYER.probe, tmp_path).out == "idle\n"


def test_who_has_a_group_open(tmp_path: Path) -> None:
    write(tmp_path, {"/dev/vfio/31": "", "/proc/77/comm": "kvm\n", "/proc/77/cgroup": "0::/qemu.slice/203.scope\n"})
    (tmp_path / "proc/77/fd").mkdir()
    (tmp_path / "proc/77/fd/9").symlink_to("/dev/vfio/31")
    (tmp_path / "proc/77/fd/1").symlink_to("/dev/null")
    facts = parse(ask(binding.LAYER.probe, tmp_path))
    assert [(u.node, u.who) for u in facts.users] == [("/dev/vfio/31", "VM 203 (kvm, process 77)")]


def test_the_digest_of_claims_is_that_of_the_files_one_after_the_other() -> None:
    guests = guest_facts((1000, "b\n"), (201, "ä\udcff"), (100, "a\n"), kind="qemu", mappings="m\n")
    text = "a\n" + "b\n" + "ä\udcff" + "m\n"  # 100.conf, 1000.conf, 201.conf: the order of bytes
    assert digest(guests) == hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
    assert digest(None) == "none"
