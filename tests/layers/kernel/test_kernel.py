"""host.kernel: what the fragment reads, what is judged from it, and what the scripts do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from controller.core.view import View
from controller.core.words import Block, Drift, InSync, NotKnown, Skipped, Step, Verdict, Wait
from controller.facts.units import How, Job, UnitFacts
from controller.facts.words import HostFacts, Known, ParseError, Section, Unknown
from controller.layers import kernel
from controller.layers.driver.facts import DriverFacts, Installed
from controller.layers.kernel.facts import Initramfs, KernelFacts, keeps_off, parse
from controller.layers.shared.driver_wanted import too_new, wanted
from controller.spec.model import Driver, Host, Specs
from tests.layers.fleet import gpu_facts
from tests.layers.fleet import host as host_of
from tests.layers.shell import ask, write

PVE, NEXT = "6.8.12-9-pve", "6.8.12-11-pve"
OFF = ("/etc/modprobe.d/off.conf", "blacklist nouveau\n")
READY = KernelFacts(PVE, (PVE,), (PVE,), dkms=True, modprobe=(OFF,))
DRIVER = {"version": "580.126.09", "source": "runfile", "kernel_modules": "proprietary"}


def host(**driver: str) -> Host:
    gpus = [gpu.model_dump(mode="json") for gpu in host_of().gpus]
    return host_of(nvidia={"driver": {**DRIVER, **driver}, "gpus": gpus})


def judged(facts: KernelFacts, *, units: UnitFacts | None = None, spec: Host | None = None, **more: object) -> Verdict:
    spec = spec or host()
    gpus = more.get("gpus", dataclasses.replace(gpu_facts(), module=None, gpus=(), smi=()))
    sections = {
        "world": Known(units or UnitFacts(1, "boot")),
        "host.kernel": Known(facts),
        "host.driver": Known(more.get("driver", DriverFacts())),
        "host.gpu-health": Known(gpus),
    }
    return kernel.check(View(Specs(hosts={"kpro5": spec}), {"kpro5": HostFacts("kpro5", sections)}), spec)


def step_of(verdict: Verdict) -> Step:
    assert isinstance(verdict, Drift), verdict
    assert isinstance(verdict.remedy, Step), verdict.remedy
    return verdict.remedy


# What the fragment reads


def test_a_host_as_it_answers(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "/proc/sys/kernel/osrelease": f"{PVE}\n",
            f"/boot/vmlinuz-{PVE}": "",
            f"/boot/vmlinuz-{NEXT}": "",
            f"/lib/modules/{PVE}/build/Makefile": "",
            "/usr/sbin/dkms": "",
            "/etc/modprobe.d/a.conf": "blacklist nouveau",
            "/usr/lib/modprobe.d/a.conf": "# hidden by the one in /etc\n",
            "/usr/lib/modprobe.d/b.conf": "options x y=1\n",
            "/etc/kernel/proxmox-boot-pin": f"{PVE}\n",
        },
    )
    (tmp_path / "usr/sbin/dkms").chmod(0o755)
    section = ask(kernel.LAYER.probe, tmp_path)
    assert section.rc == 0, section.err
    facts = parse(section)
    assert (facts.running, facts.installed, facts.headers) == (PVE, (NEXT, PVE), (PVE,))
    assert (facts.pin, facts.next, facts.concerned) == (PVE, PVE, (PVE,))
    assert facts.secure_boot is False
    assert facts.dkms
    assert not facts.nouveau_loaded
    assert [text for _, text in facts.modprobe] == ["blacklist nouveau", "options x y=1\n"]


def test_secure_boot_as_the_firmware_tells_it(tmp_path: Path) -> None:
    variable = tmp_path / "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    write(tmp_path, {"/proc/sys/kernel/osrelease": f"{PVE}\n"})
    for content, told in ((b"\6\0\0\0\1", True), (b"\6\0\0\0\0", False)):
        variable.parent.mkdir(parents=True, exist_ok=True)
        variable.write_bytes(content)
        assert parse(ask(kernel.LAYER.probe, tmp_path)).secure_boot is told
    variable.unlink()  # an EFI whose variables are not mounted
    assert parse(ask(kernel.LAYER.probe, tmp_path)).secure_boot is None


def test_an_initramfs_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "/proc/sys/kernel/osrelease": f"{PVE}\n",
            f"/boot/vmlinuz-{PVE}": "",
            f"/boot/initrd.img-{PVE}": "no archive at all",
            f"/lib/modules/{PVE}/build/Makefile": "",
            "/usr/sbin/dkms": "",
        },
    )
    (tmp_path / "usr/sbin/dkms").chmod(0o755)
    (tmp_path / "run").mkdir()
    image = parse(ask(kernel.LAYER.probe, tmp_path)).of(PVE)
    assert image is not None
    assert image.unread is not None
    assert image.unread.reason == "initramfs-unreadable"


@pytest.mark.parametrize(
    "out", ["", "running x\n", "running x\n==odd\n", "running x\n==modprobe\n==initramfs k\nexit 0\nx\n"]
)
def test_garbage_is_no_fact(out: str) -> None:
    with pytest.raises(ParseError):
        parse(Section(0, out))


def test_what_apt_has() -> None:
    policy = "a:\n  Installed: (none)\n  Candidate: 1.0\n  Version table:\n     1.0 500\nb:\n  Candidate: (none)\n"
    facts = parse(Section(0, f"running x\nlists fresh\n==packages\nexit 0\n{policy}==modprobe\n"))
    assert (facts.packages, facts.lists_fresh) == (("a",), True)
    assert parse(Section(0, "running x\n==packages\nhung 3\n==modprobe\n")).packages is None


@pytest.mark.parametrize(
    ("line", "off"),
    [
        ("blacklist nouveau", True),
        ("  blacklist  nouveau  ", True),
        ("install nouveau /bin/false", True),
        ("install nouveau /usr/bin/true", True),
        ("# blacklist nouveau", False),
        ("blacklist nouveaux", False),
        ("options nouveau modeset=0", False),  # it still takes the card
        ("blacklist nvidiafb", False),
    ],
)
def test_what_keeps_nouveau_off(line: str, off: bool) -> None:
    assert keeps_off("nouveau", [f"options a b=1\n{line}\n"]) is off


@pytest.mark.parametrize(
    ("installed", "pins", "expected"),
    [
        ((PVE, NEXT), ("", ""), NEXT),  # 11 is newer than 9
        ((PVE, NEXT), ("", PVE), PVE),
        ((PVE, NEXT), (NEXT, PVE), NEXT),
        ((PVE,), ("", NEXT), PVE),  # a pin of a kernel that is gone
        ((), ("", ""), PVE),
        (("6.17.2-1-pve", NEXT), ("", ""), "6.17.2-1-pve"),
    ],
)
def test_which_kernel_boots_next(installed: tuple[str, ...], pins: tuple[str, str], expected: str) -> None:
    assert KernelFacts(PVE, installed, (), next_boot_pin=pins[0], pin=pins[1]).next == expected


# What is judged


def test_nothing_is_asked_of_a_host_without_a_driver_in_its_spec() -> None:
    assert isinstance(judged(dataclasses.replace(READY, headers=()), spec=host_of()), Skipped)


def test_a_host_that_is_ready() -> None:
    assert judged(READY) == InSync()


@pytest.mark.parametrize(
    ("change", "reason", "action"),
    [
        ({"headers": ()}, "headers-missing", "install-headers"),
        ({"installed": (PVE, NEXT)}, "headers-missing", "install-headers"),  # failure 6: the next one has none
        ({"dkms": False}, "headers-missing", "install-headers"),
        ({"modprobe": ()}, "nouveau-not-kept-off", "keep-nouveau-off"),  # failure 8
        (
            {"initramfs": (Initramfs(PVE, ("usr/lib/modules/k/kernel/nouveau.ko.zst",)),)},
            "nouveau-in-initramfs",
            "update-initramfs",
        ),
    ],
)
def test_what_is_wrong_is_named_and_put_right(change: dict[str, object], reason: str, action: str) -> None:
    facts = dataclasses.replace(READY, **change)
    verdict = judged(facts)
    assert isinstance(verdict, Drift)
    assert verdict.reason == reason
    step = step_of(verdict)
    assert step.action == action
    assert [str(d) for d in step.disrupts] == ["change-driver:Host/kpro5"]
    after = step.effect({"kpro5": HostFacts("kpro5", {"host.kernel": Known(facts)})})["kpro5"].section("host.kernel")
    assert isinstance(after, Known)
    assert isinstance(after.value, KernelFacts)
    assert not isinstance(again := judged(after.value), Drift) or again.reason != reason


def test_an_initramfs_with_nouveau_and_what_keeps_it_off_is_right() -> None:
    image = Initramfs(PVE, ("lib/nouveau.ko",), (("etc/modprobe.d/off.conf", "blacklist nouveau"),))
    assert judged(dataclasses.replace(READY, initramfs=(image,))) == InSync()


def test_an_initramfs_that_is_not_known_makes_the_layer_unseen() -> None:
    image = Initramfs(PVE, unread=Unknown("initramfs-unreadable", "packed in an unknown way"))
    with pytest.raises(NotKnown, match="packed in an unknown way"):
        judged(dataclasses.replace(READY, initramfs=(image,)))


def test_headers_that_no_repository_has_are_a_block() -> None:
    facts = dataclasses.replace(READY, headers=(), packages=("dkms",), lists_fresh=True)
    verdict = judged(facts)
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Block)
    assert verdict.remedy.reason == "no-headers-package"
    # while apt has not looked today, the step looks
    assert step_of(judged(dataclasses.replace(facts, lists_fresh=False))).action == "install-headers"


def test_a_job_at_work_is_waited_for_and_a_failed_one_told_of() -> None:
    facts = dataclasses.replace(READY, headers=())
    step = step_of(judged(facts))
    job = Job(step.id, "Host/kpro5", How.RUNNING, name="kernel-headers")
    waits = judged(facts, units=UnitFacts(1, "boot", jobs=(job,)))
    assert isinstance(waits, Drift)
    assert isinstance(waits.remedy, Wait)
    log = ("Reading package lists...", "no repository has headers of kernel 6.8.12-9-pve")
    failed = dataclasses.replace(job, how=How.EXIT, rc=1, log=log)
    told = judged(facts, units=UnitFacts(1, "boot", jobs=(failed,)))
    assert isinstance(told, Drift)
    assert step_of(told).id == step.id
    assert log[1] in told.message
    assert log[0] in told.evidence["last try"]


# What stands in the way of the driver is seen before anything is prepared


@pytest.mark.parametrize(
    ("change", "more", "spec", "reason"),
    [
        # failure 7: the driver is too old for the next kernel
        ({"installed": (PVE, "6.17.2-1-pve")}, {}, {"version": "550.135"}, "kernel-too-new"),
        # failure 24: secure boot
        ({"secure_boot": True}, {}, {}, "secure-boot"),
        # a card that is not listed and that the module would take
        (
            {},
            {
                "gpus": dataclasses.replace(
                    gpu_facts({"0000:99:00.0": "10de:2204"}, {}, drivers={"0000:99:00.0": ""}), module=None
                )
            },
            {},
            "unlisted-gpu",
        ),
        # Blackwell has open modules alone
        (
            {},
            {"gpus": dataclasses.replace(gpu_facts({"0000:4f:00.0": "10de:2bb5"}, {}), module=None)},
            {},
            "wrong-flavour",
        ),
    ],
)
def test_obstacles_come_before_any_preparation(
    change: dict[str, object], more: dict[str, object], spec: dict[str, str], reason: str
) -> None:
    for facts in (READY, dataclasses.replace(READY, headers=(), modprobe=())):
        verdict = judged(dataclasses.replace(facts, **change), spec=host(**spec), **more)
        assert isinstance(verdict, Drift)
        assert isinstance(verdict.remedy, Block)
        assert verdict.remedy.reason == reason
        assert verdict.remedy.needs


def test_secure_boot_is_no_obstacle_to_what_is_signed_with_an_enrolled_key() -> None:
    facts = dataclasses.replace(READY, secure_boot=True, enrolled_keys=("ours",), dkms_key_enrolled=True)
    assert judged(facts) == InSync()
    unsigned = DriverFacts(modules=(Installed(PVE, "580.126.09", "proprietary"),), libraries=("580.126.09",))
    assert isinstance(judged(facts, driver=unsigned), Drift)
    signed = DriverFacts(modules=(Installed(PVE, "580.126.09", "proprietary", "ours"),), libraries=("580.126.09",))
    assert judged(facts, driver=signed) == InSync()


@pytest.mark.parametrize(
    ("kernel_release", "version", "bad"),
    [
        ("6.8.12-9-pve", "550.135", False),
        ("6.17.2-1-pve", "550.135", True),
        ("6.17.2-1-pve", "555.42.02", True),
        ("6.17.2-1-pve", "580.119.02", False),
        ("6.17.9-1-pve", "580.119.02", True),
        ("6.17.9-1-pve", "580.126.09", False),
        ("7.0.1-1-pve", "580.119.02", True),
        ("7.1.0-1-pve", "580.142", True),
        ("7.1.0-1-pve", "580.159.04", False),
    ],
)
def test_kernels_that_a_driver_is_known_to_fail_on(kernel_release: str, version: str, bad: bool) -> None:
    assert bool(too_new(kernel_release, version)) is bad


@pytest.mark.parametrize(
    ("device", "version", "flavour"),
    [
        ("10de:2230", "580.126.09", "open"),
        ("10de:2230", "550.135", "proprietary"),
        ("10de:1b06", "580.126.09", "proprietary"),  # GTX 1080 Ti: no GSP
        ("10de:2bb5", "550.135", "open"),  # Blackwell
        ("10de:1eb8", "580.126.09", "open"),  # Turing
    ],
)
def test_auto_goes_by_the_generation_of_the_cards(device: str, version: str, flavour: str) -> None:
    wish = Driver.model_validate({"version": version, "source": "apt"})
    gpus = gpu_facts({"0000:4f:00.0": device, "0000:17:00.0": "10de:1b06"}, {})
    assert wanted(host_of(), wish, gpus).flavour == flavour  # the 17:00.0 is for VMs and does not count
