"""What binds the cards at boot, and what the next boot would bring."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from controller.core.plan import plan
from controller.core.view import View
from controller.core.words import Block, Drift, InSync, NotKnown, Skipped, Step, Verdict
from controller.facts.words import HostFacts, Known, ParseError, Section, Unknown
from controller.layers import boot
from controller.layers.boot.facts import DATA, SCRIPT, UNIT, BootFacts, marked, parse
from controller.layers.boot.next_boot import next_boot
from controller.layers.driver.facts import DriverFacts, Installed
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.kernel.facts import Initramfs, KernelFacts
from controller.spec.model import Host, Specs
from tests.layers.fleet import FIRST, SECOND, VMS, function, gpu_facts, host, uuid
from tests.layers.shell import ask, write

DRIVER = {"version": "580.126.09", "kernel_modules": "proprietary", "source": "preinstalled"}
GPUS = [
    *({"pci": pci, "model": "RTX A6000", "owner": "containers"} for pci in (FIRST, SECOND)),
    *({"pci": pci, "model": "RTX 3090", "owner": "vms"} for pci in VMS),
]
KERNEL = "6.8.12-9-pve"
KEPT_OFF = (("/etc/modprobe.d/nouveau.conf", "blacklist nouveau\n"),)
IDS = ("/etc/modprobe.d/vfio.conf", "options vfio-pci ids=10de:2204,10de:2230\nsoftdep nvidia pre: vfio-pci\n")
KERNELS = KernelFacts(KERNEL, (KERNEL,), (KERNEL,), modprobe=KEPT_OFF)
INSTALLED = DriverFacts(modules=(Installed(KERNEL, "580.126.09", "proprietary"),), dkms=("580.126.09",))

NOTHING = BootFacts()


def wanted(**more: Any) -> Host:
    return host(**{"nvidia": {"gpus": GPUS, "driver": DRIVER}, **more})


def view(
    record: BootFacts = NOTHING,
    gpus: GpuFacts | None = None,
    kernel: KernelFacts = KERNELS,
    driver: DriverFacts = INSTALLED,
    spec: Host | None = None,
) -> View:
    sections = {
        "host.boot": record,
        "host.gpu-health": gpus or gpu_facts(),
        "host.kernel": kernel,
        "host.driver": driver,
    }
    facts = HostFacts("kpro5", {name: Known(value) for name, value in sections.items()})
    return View(Specs(hosts={"kpro5": spec or wanted()}), {"kpro5": facts})


def judged(record: BootFacts = NOTHING, **more: Any) -> Verdict:
    seen = view(record, **more)
    return boot.check(seen, seen.host("kpro5"))


def files(gpus: GpuFacts | None = None, obj: str = "Host/kpro5") -> dict[str, str]:
    """The files as they are written for what is seen."""
    cards = boot.wanted_cards(wanted(), gpus or gpu_facts(), BootFacts())
    bodies = {UNIT: boot.BOOT_UNIT, SCRIPT: boot.BOOT_SCRIPT, DATA: boot.data_text(cards)}
    return {path: marked(body, obj, boot.SCHEMA) for path, body in bodies.items()}


def seen(texts: dict[str, str], root: Path, *, enabled: bool = True) -> BootFacts:
    """What the real fragment tells of them."""
    write(root, texts)
    link = root / "etc/systemd/system/sysinit.target.wants/reconcile-gpus.service"
    link.parent.mkdir(parents=True, exist_ok=True)
    if enabled and not link.is_symlink():
        link.symlink_to(f"{root}{UNIT}")
    return parse(ask(boot.LAYER.probe, root))


def test_what_was_written_is_in_sync(tmp_path: Path) -> None:
    record = seen(files(), tmp_path)
    assert boot.is_set_up(record, "kpro5")
    assert judged(record) == InSync()
    first = record.card(FIRST)
    assert first is not None
    assert (first.driver, first.minor, first.uuid) == ("nvidia", 0, uuid(FIRST))
    assert record.card(VMS[0]).driver == "vfio-pci"  # type: ignore[union-attr]


def test_a_release_with_another_script_changes_nothing(tmp_path: Path) -> None:
    texts = files()
    texts[SCRIPT] = marked("# as an earlier release wrote it\n", "Host/kpro5", 1)
    assert judged(seen(texts, tmp_path)) == InSync()


MINORS = gpu_facts(minors={FIRST: 1, SECOND: 0})
CHANGES: dict[str, tuple[dict[str, str], str]] = {
    "nothing there": ({UNIT: "", SCRIPT: "", DATA: ""}, "not-set-up"),
    "no script": ({SCRIPT: ""}, "not-set-up"),
    "an edited script": ({SCRIPT: files()[SCRIPT] + "exit 0\n"}, "changed-by-hand"),
    "an edited unit": ({UNIT: files()[UNIT].replace("Before=", "After=")}, "changed-by-hand"),
    "another host's": (files(obj="Host/kpro6"), "changed-by-hand"),
    "another owner": ({DATA: files()[DATA].replace("10de:2204 vfio-pci", "10de:2204 nvidia")}, "other-cards"),
    "a card less": ({DATA: re.sub("card 0000:ce.*\n", "", files()[DATA])}, "other-cards"),
    "other minors": ({DATA: files(MINORS)[DATA]}, "other-minors"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_written_anew(name: str, tmp_path: Path) -> None:
    changes, reason = CHANGES[name]
    texts = {path: text for path, text in {**files(), **changes}.items() if text}
    verdict = judged(seen(texts, tmp_path))
    assert isinstance(verdict, Drift)
    assert verdict.reason == reason
    assert isinstance(verdict.remedy, Step)
    assert verdict.remedy.action == "set-up-boot"
    assert [str(d) for d in verdict.remedy.disrupts] == ["rebind-gpu:Host/kpro5"]
    after = plan((boot.LAYER,), view().specs, view(seen(texts, tmp_path)).facts)
    assert after.then.in_sync


def test_a_unit_that_is_not_enabled(tmp_path: Path) -> None:
    verdict = judged(seen(files(), tmp_path, enabled=False))
    assert isinstance(verdict, Drift)
    assert verdict.reason == "not-enabled"


def test_ids_that_take_a_containers_card_are_named() -> None:
    verdict = judged(kernel=dataclasses.replace(KERNELS, modprobe=(IDS,)))
    assert isinstance(verdict, Drift)
    assert verdict.reason == "taken-by-ids"
    assert FIRST in verdict.message
    assert VMS[0] not in verdict.message


def test_somebody_elses_file_is_not_replaced(tmp_path: Path) -> None:
    verdict = judged(seen({SCRIPT: "#!/bin/sh\nmine\n"}, tmp_path))
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Block)
    assert verdict.remedy.reason == "not-ours"


@pytest.mark.parametrize("gone", ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"])
def test_nodes_that_are_not_there_are_made(gone: str, tmp_path: Path) -> None:
    gpus = gpu_facts()
    gpus = dataclasses.replace(gpus, nodes=tuple(node for node in gpus.nodes if node.path != gone))
    record = seen(files(), tmp_path)
    verdict = judged(record, gpus=gpus)
    assert isinstance(verdict, Drift)
    assert verdict.reason == "missing-nodes"
    assert gone in verdict.message
    predicted = plan((boot.LAYER,), view().specs, view(record, gpus).facts)
    assert [p.step.action for p in predicted.steps] == ["make-nodes"]
    assert predicted.then.in_sync


@pytest.mark.parametrize("spec", [{"nvidia": {"gpus": GPUS}}, {"nvidia": None}, {"lifecycle": "maintenance"}])
def test_hosts_that_it_does_not_concern(spec: dict[str, Any]) -> None:
    assert isinstance(judged(spec=wanted(**spec)), Skipped)


@pytest.mark.parametrize("out", ["", "enabled\n", "odd\n==files\n"])
def test_garbage_is_no_fact(out: str) -> None:
    with pytest.raises(ParseError):
        parse(Section(0, out))


def test_a_unit_that_systemd_takes(tmp_path: Path) -> None:
    unit = tmp_path / "reconcile-gpus.service"
    unit.write_text(files()[UNIT])
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert "reconcile-gpus.service" not in done.stderr, done.stderr


# The next boot


@pytest.fixture
def record(tmp_path: Path) -> BootFacts:
    return seen(files(), tmp_path)


def wrong(**more: Any) -> set[tuple[str, str, str]]:
    """What would be wrong: layer, reason, and of which card."""
    played = view(**more)
    found = next_boot(played, played.host("kpro5"))
    return {(w.layer, w.reason, match[0] if (match := re.search(r"0000:\S+", w.message)) else "") for w in found}


def test_a_host_with_our_unit_comes_back(record: BootFacts) -> None:
    assert wrong(record=record) == set()


def test_whatever_the_initramfs_gives_to_vfio(record: BootFacts) -> None:
    """Failures 9 and 11: cards on vfio-pci at boot, by ids that take all of a model."""
    files_ = (("conf/modules", "vfio_pci\n"), (f"etc/modprobe.d/{'vfio.conf'}", IDS[1]))
    image = Initramfs(KERNEL, ("lib/modules/x/vfio-pci.ko",), files_)
    kernel = dataclasses.replace(KERNELS, modprobe=(*KEPT_OFF, IDS), initramfs=(image,))
    assert wrong(kernel=kernel) == {("host.boot", "gpu-on-vfio", FIRST), ("host.boot", "gpu-on-vfio", SECOND)}
    assert wrong(kernel=kernel, record=record) == set()


def test_the_last_line_of_ids_counts() -> None:
    lines = ("/etc/modprobe.d/vfio.conf", IDS[1] + "options vfio-pci ids=10de:2204\n")
    assert wrong(kernel=dataclasses.replace(KERNELS, modprobe=(*KEPT_OFF, lines))) == {("host.boot", "no-nodes", "")}


def test_a_vms_card_that_nvidia_would_take(record: BootFacts) -> None:
    """Failure 10."""
    assert wrong() == {("host.boot", "vm-gpu-on-nvidia", pci) for pci in VMS} | {("host.boot", "no-nodes", "")}
    assert wrong(record=record) == set()


def test_nouveau(record: BootFacts) -> None:
    """Failure 8."""
    found = wrong(kernel=dataclasses.replace(KERNELS, modprobe=()))
    assert ("host.kernel", "gpu-on-nouveau", FIRST) in found
    assert ("host.kernel", "gpu-on-nouveau", VMS[0]) in found
    image = Initramfs(KERNEL, ("lib/modules/x/nouveau.ko.zst",))
    assert ("host.kernel", "gpu-on-nouveau", FIRST) in wrong(kernel=dataclasses.replace(KERNELS, initramfs=(image,)))
    assert wrong(kernel=dataclasses.replace(KERNELS, initramfs=(image,)), record=record) == set()


def test_a_kernel_without_the_module(record: BootFacts) -> None:
    """Failure 6: the kernel was upgraded, and DKMS had no headers for it."""
    newer = dataclasses.replace(KERNELS, installed=(KERNEL, "6.8.12-11-pve"))
    assert ("host.driver", "no-module", "") in wrong(kernel=newer, record=record)
    pinned = dataclasses.replace(newer, pin=KERNEL)
    assert wrong(kernel=pinned, record=record) == set()


def test_a_card_in_no_spec(record: BootFacts) -> None:
    gpus = gpu_facts()
    more = dataclasses.replace(gpus, functions=(*gpus.functions, function("0000:f0:00.0", "10de:2204", "")))
    assert wrong(gpus=more, record=record) == {("host.driver", "unlisted-gpu", "0000:f0:00.0")}
    lower = dataclasses.replace(gpus, functions=(function("0000:01:00.0", "10de:2204", ""), *gpus.functions))
    assert ("host.boot", "other-minors", FIRST) in wrong(gpus=lower, record=record)


def test_nothing_loads_nvidia() -> None:
    kept_off = (("/etc/modprobe.d/x.conf", "blacklist nouveau\nblacklist nvidia\n"),)
    found = wrong(kernel=dataclasses.replace(KERNELS, modprobe=kept_off))
    assert found == {("host.boot", "gpu-on-no-driver", FIRST), ("host.boot", "gpu-on-no-driver", SECOND)}
    by_name = BootFacts(modules=("nvidia",))
    assert ("host.boot", "no-nodes", "") in wrong(
        kernel=dataclasses.replace(KERNELS, modprobe=kept_off), record=by_name
    )


def test_an_initramfs_that_cannot_be_read_is_not_known() -> None:
    image = Initramfs(KERNEL, unread=Unknown("initramfs-unreadable", "packed in an unknown way"))
    with pytest.raises(NotKnown, match="unknown way"):
        wrong(kernel=dataclasses.replace(KERNELS, initramfs=(image,)))
