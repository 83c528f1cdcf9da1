"""Cards come to the drivers of their owners, and are there again after the power was off. Played in both worlds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controller.layers.shared import pve_physics
from controller.layers.shared.truth import Node
from tests.lab.fixtures import need_lab
from tests.lab.lab import Lab
from tests.scenarios import cards
from tests.scenarios.cards import A6000, RTX3090
from tests.scenarios.stage import LabStage, SimStage, Stage


@pytest.fixture(scope="module")
def bare_lab() -> Iterator[Lab]:
    """A lab without a driver, with every card on vfio-pci."""
    need_lab()
    with Lab(hosts=cards.lab_hosts(driver=False), pve_files=cards.pve_files()) as started:
        yield started


@pytest.fixture(scope="module")
def driven_lab() -> Iterator[Lab]:
    """A lab with the driver, and the A6000 on it."""
    need_lab()
    with Lab(hosts=cards.lab_hosts(driver=True), pve_files=cards.pve_files()) as started:
        yield started


World = Callable[..., Stage]


@pytest.fixture(params=["sim", pytest.param("lab", marks=pytest.mark.lab)])
def bare(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    """kpro5 without a driver, in each of the two worlds."""
    return _stage(request, tmp_path, "bare_lab", driver=False)


@pytest.fixture(params=["sim", pytest.param("lab", marks=pytest.mark.lab)])
def driven(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    """kpro5 with the driver, in each of the two worlds."""
    return _stage(request, tmp_path, "driven_lab", driver=True)


def _stage(request: pytest.FixtureRequest, place: Path, fixture: str, *, driver: bool) -> Stage:
    stage: Stage
    if request.param == "sim":
        stage = SimStage(place, cards.sim_file(driver=driver))
    else:
        lab: Lab = request.getfixturevalue(fixture)
        lab.reset()
        stage = LabStage(place, lab)
    cards.specification(stage, driver=driver)
    return stage


def drivers(stage: Stage, *pcis: str) -> list[str | None]:
    """The drivers that have these cards."""
    if isinstance(stage, LabStage):
        functions = stage.lab.kernel("state", "kpro5")["functions"]
        return [functions[pci]["driver"] for pci in pcis]
    assert isinstance(stage, SimStage)
    return [stage.world().fleet.hosts["kpro5"].functions[pci].driver for pci in pcis]


def overrides(stage: Stage, *pcis: str) -> list[str | None]:
    """Their driver_override."""
    if isinstance(stage, LabStage):
        functions = stage.lab.kernel("state", "kpro5")["functions"]
        return [functions[pci]["override"] for pci in pcis]
    assert isinstance(stage, SimStage)
    return [stage.world().fleet.hosts["kpro5"].functions[pci].override for pci in pcis]


def moved(stage: Stage) -> set[str]:
    """The cards whose driver changed since the lab's start; the simulated fleet keeps no record of it."""
    if not isinstance(stage, LabStage):
        return set()
    changes = stage.lab.kernel("links", "kpro5")
    return {change["address"] for change in changes if change["cause"] not in ("boot", "modprobe vfio-pci")}


def claim(stage: Stage, vmid: int, lines: str) -> None:
    """A person gives a card to a VM, or takes it back."""
    stage.pve(f"nodes/kpro5/qemu-server/{vmid}.conf", cards.VM + lines)


def file(stage: Stage, path: str, text: str) -> None:
    """A person writes a file of kpro5."""
    if isinstance(stage, LabStage):
        stage.lab.write("kpro5", path, text)
        return
    assert isinstance(stage, SimStage)
    world = stage.world()
    with world.change("kpro5") as host:
        host.files[path] = type(next(iter(host.files.values())))(text)
    world.close()


def nodes(stage: Stage) -> set[str]:
    """NVIDIA's device nodes on kpro5."""
    if isinstance(stage, LabStage):
        said = stage.lab.run("kpro5", "find /dev -maxdepth 1 -name 'nvidia*' -type c").stdout
        return {path.removeprefix("/dev/") for path in said.split()}
    assert isinstance(stage, SimStage)
    there = stage.world().fleet.hosts["kpro5"].dev
    return {
        path.removeprefix("/dev/") for path, node in there.items() if isinstance(node, Node) and path.count("/") == 2
    }


def blocked(stage: Stage) -> list[tuple[str, str]]:
    report = stage.reconcile("plan", "-o", "json").json
    return [(row["layer"], row["reason"]) for row in report["blocked"]]


def test_the_containers_cards_are_freed_and_no_card_of_a_vm_is_touched(bare: Stage) -> None:
    before = bare.reconcile("plan", "-o", "json").json
    steps = [(s["layer"], s["action"], s["summary"].split()[1]) for s in before["steps"]]
    assert steps == [("host.gpu-binding", "bind-gpu", pci) for pci in A6000]
    assert drivers(bare, *A6000, *RTX3090) == ["vfio-pci"] * 5

    done = bare.reconcile("--once")
    assert done.rc == 0, done.out + done.err
    assert drivers(bare, *A6000, *RTX3090) == [None, None, "vfio-pci", "vfio-pci", "vfio-pci"]
    assert overrides(bare, *A6000, *RTX3090) == ["nvidia", "nvidia", None, None, None]
    assert moved(bare) <= set(A6000)

    again = bare.reconcile("--once")
    assert again.rc == 0
    assert "Nothing was done" in again.out
    assert bare.reconcile("plan", "--detailed-exitcode").rc == 0


def test_without_permission_nothing_is_bound(bare: Stage) -> None:
    cards.specification(bare, allow="[]")
    done = bare.reconcile("--once")
    assert done.rc == 2
    assert "--allow rebind-gpu:Host/kpro5" in done.out
    assert drivers(bare, *A6000) == ["vfio-pci"] * 2


CLAIMS = {
    "a stopped VM": "hostpci0: 0000:4f:00.0\n",
    "all functions": "hostpci3: 4f:00,pcie=1\n",
    "a template": "template: 1\nhostpci0: host=4f:00.0;ce:00.0,pcie=1\n",
    "pending": "\n[PENDING]\nhostpci1: 0000:4f:00.0\n",
    "args": "args: -device vfio-pci,host=0000:4f:00.0\n",
    "a mapping": "hostpci0: mapping=big,pcie=1\n",
}


@pytest.mark.parametrize("how", CLAIMS)
def test_what_a_vm_claims_is_left_alone(bare: Stage, how: str) -> None:
    bare.pve("mapping/pci.cfg", "big\n\tmap id=10de:2230,iommugroup=31,node=kpro5,path=0000:4f:00.0\n")
    claim(bare, 203, CLAIMS[how])
    done = bare.reconcile("--once")
    assert done.rc == 2, done.out + done.err
    assert ("host.gpu-binding", "claimed-by-vm") in blocked(bare)
    assert drivers(bare, "0000:4f:00.0") == ["vfio-pci"]
    assert overrides(bare, "0000:4f:00.0") == [None]
    # One card that cannot be helped keeps no other from its owner
    assert drivers(bare, "0000:ce:00.0") == ["vfio-pci" if "ce:00" in CLAIMS[how] else None]


def test_a_vm_that_runs_with_the_card_keeps_it(bare: Stage) -> None:
    claim(bare, 203, "machine: q35\nhostpci0: 0000:4f:00,pcie=1\n")
    if isinstance(bare, LabStage):
        bare.lab.run("kpro5", "qm start 203", check=True)
    else:
        assert isinstance(bare, SimStage)
        world = bare.world()
        assert pve_physics.qm_start(world.fleet, world.fleet.hosts["kpro5"], 203).rc == 0
        world.close()
    before = len(bare.lab.kernel("links", "kpro5")) if isinstance(bare, LabStage) else 0
    assert bare.reconcile("--once").rc == 2
    assert ("host.gpu-binding", "claimed-by-vm") in blocked(bare)
    if isinstance(bare, LabStage):
        changes = bare.lab.kernel("links", "kpro5")[before:]
        assert {change["address"] for change in changes} <= {"0000:ce:00.0"}
        bare.lab.run("kpro5", "qm stop 203", check=True)


def test_after_the_power_was_off_everything_is_where_it_was(driven: Stage) -> None:
    """An operator's vfio.conf takes all A6000 by their ids at boot, and nothing loads nvidia or makes nodes."""
    file(driven, "/etc/modprobe.d/vfio.conf", cards.VFIO_CONF)
    file(driven, "/etc/modules", "vfio\nvfio_pci\n")
    if isinstance(driven, LabStage):
        driven.lab.run("kpro5", "systemctl disable nvidia-device-nodes.service; rm -f /etc/modules-load.d/nvidia.conf")
    assert driven.reconcile("plan", "--next-boot").rc == 1  # whose?
    said = driven.reconcile("plan", "--next-boot", "--host", "kpro5", "-o", "json", "--detailed-exitcode")
    assert said.rc == 2, said.out + said.err
    assert {(w["layer"], w["reason"]) for w in said.json["wrong"]} == {("host.boot", "gpu-on-vfio")}

    done = driven.reconcile("--once")
    assert done.rc == 0, done.out + done.err
    assert driven.reconcile("plan", "--detailed-exitcode").rc == 0
    said = driven.reconcile("plan", "--next-boot", "--host", "kpro5", "--detailed-exitcode")
    assert said.rc == 0, said.out + said.err

    driven.power_off("kpro5")
    driven.power_on("kpro5")
    assert drivers(driven, *A6000, *RTX3090) == ["nvidia", "nvidia", "vfio-pci", "vfio-pci", "vfio-pci"]
    assert {"nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"} <= nodes(driven)
    again = driven.reconcile("--once")
    assert again.rc == 0, again.out + again.err
    assert "Nothing was done" in again.out


def test_a_card_that_got_anothers_minor_has_no_node(driven: Stage) -> None:
    """A card in a lower slot makes the others count from one further: no container gets its neighbour's card."""
    assert driven.reconcile("--once").rc == 0
    if isinstance(driven, LabStage):
        driven.lab.run("kpro5", "systemctl disable nvidia-device-nodes.service")
    file(driven, "/etc/reconcile/gpus", _swapped(driven))
    driven.power_off("kpro5")
    driven.power_on("kpro5")
    assert drivers(driven, *A6000) == ["nvidia", "nvidia"]
    assert not {"nvidia0", "nvidia1"} & nodes(driven)

    done = driven.reconcile("--once")
    assert done.rc == 0, done.out + done.err
    assert {"nvidia0", "nvidia1"} <= nodes(driven)


def _swapped(stage: Stage) -> str:
    """The recorded minors of the two cards exchanged, as if they had been plugged the other way round."""
    if isinstance(stage, LabStage):
        text = stage.lab.read("kpro5", "/etc/reconcile/gpus")
        text = text.decode() if isinstance(text, bytes) else text
    else:
        assert isinstance(stage, SimStage)
        text = stage.world().fleet.hosts["kpro5"].files["/etc/reconcile/gpus"].text
    return text.replace("nvidia 0 ", "nvidia x ").replace("nvidia 1 ", "nvidia 0 ").replace("nvidia x ", "nvidia 1 ")


def test_a_card_in_use_stays_until_it_is_free(driven: Stage) -> None:
    """Unbinding a card in use would wait in the kernel for ever: it is not begun."""
    cards.specification(driven, ce="vms")
    use(driven, "0000:ce:00.0", "python3")
    assert driven.reconcile("--once").rc == 2
    assert blocked(driven) == [("host.gpu-binding", "gpu-in-use")]
    assert drivers(driven, "0000:ce:00.0") == ["nvidia"]

    use(driven, "0000:ce:00.0", "")
    done = driven.reconcile("--once")
    assert done.rc == 0, done.out + done.err
    assert drivers(driven, *A6000) == ["nvidia", "vfio-pci"]


def use(stage: Stage, pci: str, name: str) -> None:
    """Let a process use a card, or (without a name) end it."""
    if isinstance(stage, LabStage) and name:
        stage.lab.run("kpro5", "setsid gpu-process /dev/nvidia1 >/run/user-of-it 2>&1 </dev/null &")
        stage.lab.run("kpro5", "until grep -q open /run/user-of-it; do sleep 0.1; done", check=True, timeout=20)
    elif isinstance(stage, LabStage):
        stage.lab.run("kpro5", "pkill -x gpu-process; while pgrep -x gpu-process >/dev/null; do sleep 0.1; done")
    else:
        assert isinstance(stage, SimStage)
        world = stage.world()
        with world.change("kpro5") as host:
            gpu = host.functions[pci].gpu
            assert gpu is not None
            gpu.used_by = [f"host:{name}"] if name else []
        world.close()


def test_a_group_shared_with_a_vms_card_is_refused(bare: Stage) -> None:
    if isinstance(bare, LabStage):
        bare.lab.kernel("set", "kpro5", pci="0000:b1:00.0", values={"iommu_group": 31})
    else:
        assert isinstance(bare, SimStage)
        world = bare.world()
        with world.change("kpro5") as host:
            host.functions["0000:b1:00.0"].iommu_group = 31
        world.close()
    assert bare.reconcile("--once").rc == 2
    assert blocked(bare) == [("host.gpu-binding", "shared-iommu-group")]
    assert drivers(bare, "0000:4f:00.0", "0000:ce:00.0") == ["vfio-pci", None]


def test_a_card_in_no_spec_is_left_alone(bare: Stage) -> None:
    cards.specification(bare, ce="nobody", b1="nobody")
    done = bare.reconcile("--once")
    assert done.rc == 0, done.out
    assert drivers(bare, "0000:ce:00.0", "0000:b1:00.0") == ["vfio-pci", "vfio-pci"]
    assert overrides(bare, "0000:ce:00.0", "0000:b1:00.0") == [None, None]
    assert "4f" not in "".join(moved(bare) - {"0000:4f:00.0"})


def test_a_card_that_fell_off_the_bus_is_reported_and_not_touched(driven: Stage) -> None:
    """Failure 25."""
    if isinstance(driven, LabStage):
        driven.lab.kernel("xid", "kpro5", pci="0000:ce:00.0", xid=79, text="GPU has fallen off the bus.")
    else:
        assert isinstance(driven, SimStage)
        world = driven.world()
        with world.change("kpro5") as host:
            gpu = host.functions["0000:ce:00.0"].gpu
            assert gpu is not None
            gpu.lost = True
        world.close()
    cards.specification(driven, ce="vms")
    assert driven.reconcile("--once").rc == 2
    report = driven.reconcile("plan", "-o", "json").json
    found = {(d["layer"], d["reason"]): d["message"] for d in report["drift"]}
    assert "Xid (PCI:0000:ce:00): 79" in found["host.gpu-health", "off-the-bus"]
    assert report["steps"] == []
    assert drivers(driven, "0000:ce:00.0") == ["nvidia"]


def test_a_card_that_has_another_address_is_known_again(driven: Stage) -> None:
    """Its UUID was recorded: no other card takes its place without a word."""
    assert driven.reconcile("--once").rc == 0
    driven.power_off("kpro5")
    if isinstance(driven, LabStage):
        driven.lab.kernel("move", "kpro5", pci="0000:ce:00.0", slot="0000:d0:00")
    else:
        assert isinstance(driven, SimStage)
        world = driven.world()
        with world.change("kpro5") as host:
            for number in (0, 1):
                host.functions[f"0000:d0:00.{number}"] = host.functions.pop(f"0000:ce:00.{number}")
        world.close()
    driven.power_on("kpro5")
    driven.reconcile("--once")
    report = driven.reconcile("plan", "-o", "json").json
    found = {(d["layer"], d["reason"]): d["message"] for d in report["drift"]}
    assert "is at 0000:d0:00.0 now" in found["host.gpu-health", "gpu-moved"]
