import os
import stat
from pathlib import Path

import pytest

from controller.core.view import View
from controller.core.words import Drift, InSync, NotKnown, Verdict
from controller.facts.words import HostFacts, Known, ParseError, Section
from controller.layers import gpu_health
from controller.layers.boot.facts import BootFacts, Recorded
from controller.layers.driver.facts import DriverFacts
from controller.layers.gpu_health.facts import GpuFacts, parse
from controller.layers.shared.boards import same_model
from controller.spec.model import Host, Specs
from tests.layers.shell import ask, write

PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.126.09  Fri Jan 10 20:00:00 UTC 2025\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  565.77  Release Build  (nixbld@)  Sun Feb  9 2025\n"
DEVICES = "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n510 nvidia-uvm\n\nBlock devices:\n  8 sd\n"
ROW = "0, GPU-aaaa, 00000000:4F:00.0, NVIDIA RTX A6000, 580.126.09, 8.6, 49140, 12, 0\n"


def card(root: Path, pci: str, device: str, driver: str, pci_class: str = "0x030000", group: str = "31") -> None:
    at = f"/sys/bus/pci/devices/{pci}"
    write(root, {f"{at}/vendor": "0x10de\n", f"{at}/device": f"0x{device}\n", f"{at}/class": f"{pci_class}\n"})
    write(root, {f"{at}/driver_override": "(null)\n", f"{at}/numa_node": "-1\n"})
    groups = root / f"sys/kernel/iommu_groups/{group}"
    (groups / "devices" / pci).mkdir(parents=True)
    (root / at.lstrip("/") / "iommu_group").symlink_to(groups)
    if driver:
        (root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
        (root / at.lstrip("/") / "driver").symlink_to(root / f"sys/bus/pci/drivers/{driver}")


def information(root: Path, pci: str, minor: int, uuid: str = "GPU-aaaa") -> None:
    text = f"Model: \t\t NVIDIA RTX A6000\nIRQ:   41\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
    write(root, {f"/proc/driver/nvidia/gpus/{pci}/information": text, "/proc/driver/nvidia/version": PROPRIETARY})


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write(tmp_path, {"/proc/devices": DEVICES})
    return tmp_path


def test_cards_on_the_bus_with_drivers_groups_and_companions(tree: Path) -> None:
    card(tree, "0000:4f:00.0", "2230", "vfio-pci")
    card(tree, "0000:4f:00.1", "1aef", "", "0x040300")
    (tree / "sys/bus/pci/devices/0000:00:1f.0").mkdir()
    write(tree, {"/sys/bus/pci/devices/0000:00:1f.0/vendor": "0x8086\n"})
    facts = parse(ask(gpu_health.LAYER.probe, tree))
    assert [(f.pci, f.device, f.driver, f.is_gpu) for f in facts.functions] == [
        ("0000:4f:00.0", "10de:2230", "vfio-pci", True),
        ("0000:4f:00.1", "10de:1aef", "", False),
    ]
    assert facts.functions[0].group == "31"
    assert facts.functions[0].mates == ("0000:4f:00.0", "0000:4f:00.1")
    assert facts.functions[0].override == ""
    assert facts.functions[0].numa_node is None
    assert facts.module is None
    assert facts.smi_failure is None


def test_the_modules_cards_majors_and_nodes(tree: Path) -> None:
    card(tree, "0000:4f:00.0", "2230", "nvidia")
    information(tree, "0000:4f:00.0", 1)
    (tree / "dev").mkdir()
    write(tree, {"/dev/nvidia1": ""})
    facts = parse(ask(gpu_health.LAYER.probe, tree))
    assert facts.module is not None
    assert (facts.module.version, facts.module.flavour) == ("580.126.09", "proprietary")
    gpu = facts.gpu("0000:4f:00.0")
    assert gpu is not None
    assert (gpu.minor, gpu.uuid) == (1, "GPU-aaaa")
    assert facts.major("nvidia-uvm") == 510
    assert facts.major("nvidia-uvm-tools") is None
    node = next(n for n in facts.nodes if n.path.endswith("/dev/nvidia1"))
    assert not node.is_device


@pytest.mark.skipif(os.geteuid() != 0, reason="making a device node needs root")
def test_a_node_with_its_numbers(tree: Path) -> None:
    (tree / "dev").mkdir()
    os.mknod(tree / "dev/nvidia-uvm", 0o666 | stat.S_IFCHR, os.makedev(510, 0))
    node = parse(ask(gpu_health.LAYER.probe, tree)).nodes[0]
    assert node.is_device
    assert (node.major, node.minor) == (510, 0)


@pytest.mark.parametrize(
    ("text", "version", "flavour"), [(PROPRIETARY, "580.126.09", "proprietary"), (OPEN, "565.77", "open")]
)
def test_versions_of_both_flavours(text: str, version: str, flavour: str) -> None:
    module = parse(Section(0, f"module|{text}")).module
    assert module is not None
    assert (module.version, module.flavour) == (version, flavour)


def test_rows_of_nvidia_smi() -> None:
    facts = parse(Section(0, f"smi|exit 0\n{ROW}"))
    row = facts.row("0000:4f:00.0")
    assert row is not None
    assert row.memory_total == 49140 * 1024 * 1024
    assert row.compute_capability == "8.6"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("none\n", "no-nvidia-smi"),
        ("hung 4711\n", "nvidia-smi-hangs"),
        ("exit 18\nFailed to initialize NVML: Driver/library version mismatch\n", "nvidia-smi-failed"),
        ("exit 6\nNo devices were found\n", "nvidia-smi-failed"),
        ("exit 0\nBonjour\n", "nvidia-smi-failed"),
    ],
)
def test_why_nvidia_smi_has_no_rows(text: str, reason: str) -> None:
    failure = parse(Section(0, f"smi|{text}")).smi_failure
    assert failure is not None
    assert failure.reason == reason


@pytest.mark.parametrize(
    "out", ["x\n", "pci|a|b\n", "module|something\n", "major|nvidia|x\n", "node|/dev/x\n", "smi|\n"]
)
def test_garbage_is_no_fact(out: str) -> None:
    with pytest.raises(ParseError):
        parse(Section(0, out))


def judged(facts: GpuFacts, *gpus: dict[str, str]) -> Verdict:
    host = Host.model_validate(
        {"kind": "Host", "name": "h", "address": "10.1.2.5", "platform": "proxmox", "nvidia": {"gpus": list(gpus)}}
    )
    return gpu_health.check(
        View(Specs(hosts={"h": host}), {"h": HostFacts("h", {"host.gpu-health": Known(facts)})}), host
    )


A6000 = {"pci": "4f:00.0", "model": "RTX A6000", "owner": "containers"}
SEEN = "pci|0000:4f:00.0|0x2230|0x030000|vfio-pci|(null)|31|0000:4f:00.0|0|16|16\n"


def test_a_listed_card_that_is_there_is_in_sync() -> None:
    assert judged(parse(Section(0, SEEN)), A6000) == InSync()


@pytest.mark.parametrize(
    ("out", "gpu", "reason"),
    [
        ("", A6000, "gpu-missing"),
        (SEEN.replace("4f:", "50:"), A6000, "gpu-missing"),
        (SEEN, {**A6000, "model": "RTX 3090"}, "other-model"),
        (SEEN + "smi|exit 6\nNo devices were found\n", A6000, "nvidia-smi-failed"),
    ],
)
def test_what_is_wrong_with_a_card_is_named(out: str, gpu: dict[str, str], reason: str) -> None:
    verdict = judged(parse(Section(0, out)), gpu)
    assert isinstance(verdict, Drift)
    assert verdict.reason == reason


def test_a_hanging_nvidia_smi_makes_the_cards_unknown() -> None:
    with pytest.raises(NotKnown):
        judged(parse(Section(0, SEEN + "smi|hung 12\n")), A6000)


@pytest.mark.parametrize(
    ("wanted", "found", "same"),
    [
        ("RTX A6000", "NVIDIA RTX A6000", True),
        ("RTX 3090", "NVIDIA GeForce RTX 3090", True),
        ("RTX 3090", "NVIDIA GeForce RTX 3090 Ti", False),
        ("RTX 6000", "NVIDIA RTX A6000", False),
        ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation", True),
        ("H200", "NVIDIA H200", True),
    ],
)
def test_models_by_name(wanted: str, found: str, same: bool) -> None:
    assert same_model(wanted, found) is same


LOST = SEEN.replace("|0|16|16", "|0|63|16") + (
    "smi|exit 255\nUnable to determine the device handle\n"
    "kernel|[  12.5] NVRM: Xid (PCI:0000:4f:00): 79, GPU has fallen off the bus.\n"
)


def test_a_card_off_the_bus_is_told_with_what_the_kernel_said() -> None:
    verdict = judged(parse(Section(0, LOST)), A6000)
    assert isinstance(verdict, Drift)
    assert verdict.reason == "off-the-bus"
    assert "Xid (PCI:0000:4f:00): 79" in verdict.message


@pytest.mark.parametrize(("errors", "reason"), [("0", ""), ("[N/A]", ""), ("3", "uncorrected-errors")])
def test_uncorrected_memory_errors(errors: str, reason: str) -> None:
    verdict = judged(parse(Section(0, f"{SEEN}smi|exit 0\n{ROW.replace(', 0', f', {errors}')}")), A6000)
    assert (verdict.reason if isinstance(verdict, Drift) else "") == reason


OTHER = SEEN.replace("4f:", "50:")
INFORMATION = "gpu|0000:{}:00.0|Device Minor: \t 0\ngpu|0000:{}:00.0|GPU UUID: \t {}\n"


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        (SEEN + INFORMATION.format("4f", "4f", "GPU-1"), ""),
        (OTHER + INFORMATION.format("50", "50", "GPU-1"), "gpu-moved"),
        (OTHER + INFORMATION.format("50", "50", "GPU-2"), "gpu-missing"),
        (SEEN + OTHER + INFORMATION.format("50", "50", "GPU-1"), "gpu-moved"),  # and a twin took its place
        (SEEN + INFORMATION.format("4f", "4f", "GPU-2"), "other-card"),
        (SEEN + OTHER + INFORMATION.format("4f", "4f", "GPU-2") + INFORMATION.format("50", "50", "GPU-1"), "gpu-moved"),
    ],
)
def test_a_recorded_card_is_known_again_wherever_it_is(out: str, reason: str) -> None:
    record = BootFacts(cards=(Recorded("0000:4f:00.0", "10de:2230", "nvidia", 0, "GPU-1"),))
    host = Host.model_validate(
        {"kind": "Host", "name": "h", "address": "10.1.2.5", "platform": "proxmox", "nvidia": {"gpus": [A6000]}}
    )
    facts = {"host.gpu-health": Known(parse(Section(0, out))), "host.boot": Known(record)}
    verdict = gpu_health.check(View(Specs(hosts={"h": host}), {"h": HostFacts("h", facts)}), host)
    assert (verdict.reason if isinstance(verdict, Drift) else "") == reason


MISMATCH = "exit 18\nFailed to initialize NVML: Driver/library version mismatch\n"
OTHER_LIBRARY = DriverFacts(libraries=("575.57.08",))
SAME_LIBRARY = DriverFacts(libraries=("580.126.09",))


@pytest.mark.parametrize(
    ("driver", "libraries", "reported"),
    [
        (None, OTHER_LIBRARY, True),  # the driver is only observed: nobody else would say it
        ("580.126.09", OTHER_LIBRARY, False),  # host.driver says it, and puts it right
        ("580.126.09", SAME_LIBRARY, True),
    ],
)
def test_a_library_of_another_version_is_left_to_the_driver_layer(
    driver: str | None, libraries: DriverFacts, reported: bool
) -> None:
    facts = parse(Section(0, SEEN + f"module|{PROPRIETARY}smi|{MISMATCH}"))
    wish = {"driver": {"version": driver, "source": "runfile"}} if driver else {}
    host = Host.model_validate(
        {"kind": "Host", "name": "h", "address": "10.1.2.5", "platform": "proxmox", "nvidia": {"gpus": [A6000], **wish}}
    )
    sections = {"host.gpu-health": Known(facts), "host.driver": Known(libraries)}
    verdict = gpu_health.check(View(Specs(hosts={"h": host}), {"h": HostFacts("h", sections)}), host)
    assert isinstance(verdict, Drift) is reported
