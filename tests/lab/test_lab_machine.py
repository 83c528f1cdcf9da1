"""The kernel's stand-in, without files and without a lab: what its driver core and NVIDIA's driver do."""

from __future__ import annotations

import errno
import lzma
import os
import subprocess
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab import boot, hosts, kmodules
from tests.lab.machine import Caller, Function, Machine, dynamic_major

A6000, OTHER_A6000, RTX3090 = "0000:4f:00.0", "0000:ce:00.0", "0000:17:00.0"
NOBODY = Caller()


def machine(described: dict[str, Any] | None = None) -> Machine:
    """Return kpro5, on: both A6000 with nvidia, the 3090s with vfio-pci."""
    started = Machine("kpro5", described or hosts.default()["kpro5"])
    started.power_on_first()
    return started


def story() -> Machine:
    """Return kpro5 as the story begins: no driver, every card with vfio-pci."""
    return machine(hosts.story()["kpro5"])


def driver_of(kernel: Machine, address: str) -> str | None:
    function = kernel.functions[address]
    return function.driver.name if function.driver else None


def minor_of(kernel: Machine, address: str) -> int | None:
    gpu = kernel.functions[address].gpu
    assert gpu
    return gpu.minor


def fails(number: int, action: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(OSError) as error:
        action(*arguments)
    assert errno.errorcode[error.value.errno] == errno.errorcode[number]


def insert_nvidia(kernel: Machine, options: str = "", **more: str) -> None:
    image = kmodules.driver_modules(kernel.release, "580.126.09", "proprietary", **more)["nvidia.ko"].image()
    kernel.insert(image, options, NOBODY)


def free(kernel: Machine, *addresses: str) -> None:
    """Take cards from vfio-pci."""
    for address in addresses:
        kernel.unbind(kernel.drivers["vfio-pci"], f"{address}\n", NOBODY)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def in_background(action: Callable[..., Any], *arguments: Any) -> tuple[threading.Thread, list[OSError]]:
    errors: list[OSError] = []

    def run() -> None:
        try:
            action(*arguments)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


class TestDriverCore:
    def test_unbind_of_a_driver_that_does_not_have_the_device(self) -> None:
        kernel = machine()
        fails(errno.ENODEV, kernel.unbind, kernel.drivers["nvidia"], f"{RTX3090}\n", NOBODY)
        assert driver_of(kernel, RTX3090) == "vfio-pci"

    def test_an_address_needs_its_domain(self) -> None:
        kernel = machine()
        fails(errno.ENODEV, kernel.unbind, kernel.drivers["vfio-pci"], "17:00.0\n", NOBODY)
        fails(errno.ENODEV, kernel.drivers_probe, "17:00.0\n", NOBODY)

    def test_bind_needs_a_match_and_a_free_device(self) -> None:
        kernel = machine()
        nvidia, vfio = kernel.drivers["nvidia"], kernel.drivers["vfio-pci"]
        fails(errno.EBUSY, kernel.bind, nvidia, f"{RTX3090}\n", NOBODY)  # nvidia would take any card
        kernel.unbind(nvidia, A6000, NOBODY)
        fails(errno.ENODEV, kernel.bind, vfio, A6000, NOBODY)
        kernel.bind(nvidia, A6000, NOBODY)
        assert driver_of(kernel, A6000) == "nvidia"

    def test_drivers_probe_follows_the_override(self) -> None:
        kernel = machine()
        kernel.set_override(kernel.functions[A6000], "vfio-pci\n", NOBODY)
        assert driver_of(kernel, A6000) == "nvidia"  # an override binds nothing by itself
        kernel.unbind(kernel.drivers["nvidia"], A6000, NOBODY)
        kernel.drivers_probe(A6000, NOBODY)
        assert driver_of(kernel, A6000) == "vfio-pci"

    def test_drivers_probe_of_what_nobody_takes_is_no_error(self) -> None:
        kernel = machine()
        kernel.unbind(kernel.drivers["nvidia"], A6000, NOBODY)
        kernel.set_override(kernel.functions[A6000], "nosuch", NOBODY)
        kernel.drivers_probe(A6000, NOBODY)
        assert driver_of(kernel, A6000) is None

    def test_an_empty_line_clears_an_override(self) -> None:
        kernel = machine()
        function = kernel.functions[A6000]
        kernel.set_override(function, "nvidia\n", NOBODY)
        assert function.override == "nvidia"
        kernel.set_override(function, "\n", NOBODY)
        assert function.override is None

    def test_new_id_takes_what_is_free_and_what_becomes_free_later(self) -> None:
        kernel = machine()
        kernel.unbind(kernel.drivers["nvidia"], A6000, NOBODY)
        kernel.new_id(kernel.drivers["vfio-pci"], "10de 2230\n")
        assert (driver_of(kernel, A6000), driver_of(kernel, OTHER_A6000)) == ("vfio-pci", "nvidia")
        kernel.unbind(kernel.drivers["nvidia"], OTHER_A6000, NOBODY)
        kernel.drivers_probe(OTHER_A6000, NOBODY)
        assert driver_of(kernel, OTHER_A6000) == "vfio-pci"  # registered before nvidia

    def test_an_override_keeps_a_device_from_new_id(self) -> None:
        kernel = machine()
        kernel.set_override(kernel.functions[A6000], "nvidia", NOBODY)
        kernel.unbind(kernel.drivers["nvidia"], A6000, NOBODY)
        kernel.new_id(kernel.drivers["vfio-pci"], "10de 2230")
        assert driver_of(kernel, A6000) is None

    def test_new_id_refuses_nonsense_and_what_it_knows(self) -> None:
        kernel = machine()
        vfio = kernel.drivers["vfio-pci"]
        for text in ("", "10de", "zz 2230"):
            fails(errno.EINVAL, kernel.new_id, vfio, text)
        fails(errno.EEXIST, kernel.new_id, vfio, "10de 2204")

    def test_remove_id_leaves_what_is_bound(self) -> None:
        kernel = machine()
        vfio = kernel.drivers["vfio-pci"]
        kernel.remove_id(vfio, "10de 2204")
        assert driver_of(kernel, RTX3090) == "vfio-pci"
        fails(errno.ENODEV, kernel.remove_id, vfio, "10de 2204")
        kernel.unbind(vfio, RTX3090, NOBODY)
        kernel.drivers_probe(RTX3090, NOBODY)
        assert driver_of(kernel, RTX3090) == "nvidia"

    def test_a_bridge_is_not_for_vfio(self) -> None:
        kernel = machine()
        kernel.set_override(kernel.functions["0000:00:00.0"], "vfio-pci", NOBODY)
        fails(errno.EINVAL, kernel.bind, kernel.drivers["vfio-pci"], "0000:00:00.0", NOBODY)

    def test_every_change_of_a_link_is_recorded(self) -> None:
        kernel = machine()
        before = len(kernel.link_changes)
        kernel.unbind(kernel.drivers["nvidia"], A6000, NOBODY)
        kernel.drivers_probe(A6000, NOBODY)
        changes = [(each.address, each.before, each.after, each.cause) for each in kernel.link_changes[before:]]
        assert changes == [(A6000, "nvidia", None, "unbind"), (A6000, None, "nvidia", "drivers_probe")]


class TestUse:
    def test_unbind_waits_for_the_last_user(self) -> None:
        kernel = machine()
        handle = kernel.open_node("nvidia0", 4711, "python3")
        waiting, errors = in_background(kernel.unbind, kernel.drivers["nvidia"], A6000, NOBODY)
        wait_until(lambda: kernel.functions[A6000].removing)
        assert not kernel.functions[A6000].linked  # the link goes before the driver's remove
        assert driver_of(kernel, A6000) == "nvidia"
        assert "Attempting to remove device 0000:4f:00.0 with non-zero usage count!" in kernel.log_text()
        kernel.close_node(handle)
        waiting.join(10)
        assert not waiting.is_alive()
        assert not errors
        assert driver_of(kernel, A6000) is None

    def test_who_is_killed_while_it_waits_gets_away_and_the_removal_goes_on(self) -> None:
        kernel = machine()
        handle = kernel.open_node("nvidia0", 4711, "python3")
        with subprocess.Popen(["sleep", "60"]) as process:
            waiting, errors = in_background(kernel.unbind, kernel.drivers["nvidia"], A6000, Caller(process.pid))
            wait_until(lambda: kernel.functions[A6000].removing)
            process.terminate()
            process.wait()
        waiting.join(10)
        assert [error.errno for error in errors] == [errno.EINTR]
        assert kernel.functions[A6000].removing
        kernel.close_node(handle)
        wait_until(lambda: driver_of(kernel, A6000) is None)

    def test_what_is_being_removed_cannot_be_touched(self) -> None:
        kernel = machine()
        kernel.set_users(A6000, [{"pid": 7, "name": "vllm"}])
        in_background(kernel.unbind, kernel.drivers["nvidia"], A6000, NOBODY)
        wait_until(lambda: kernel.functions[A6000].removing)
        fails(errno.ENODEV, kernel.open_node, "nvidia0", 1, "nvidia-smi")
        probing, _ = in_background(kernel.drivers_probe, A6000, NOBODY)
        probing.join(0.3)
        assert probing.is_alive()
        kernel.set_users(A6000, [])
        probing.join(10)
        assert driver_of(kernel, A6000) == "nvidia"

    def test_power_ends_every_wait(self) -> None:
        kernel = machine()
        kernel.open_node("nvidia0", 4711, "python3")
        waiting, errors = in_background(kernel.unbind, kernel.drivers["nvidia"], A6000, NOBODY)
        wait_until(lambda: kernel.functions[A6000].removing)
        kernel.power_off()
        waiting.join(10)
        assert [error.errno for error in errors] == [errno.EIO]

    def test_a_module_in_use_stays(self) -> None:
        kernel = machine()
        fails(errno.EWOULDBLOCK, kernel.remove, "nvidia", NOBODY)  # nvidia_uvm needs it
        handle = kernel.open_node("nvidia-uvm", 1, "python3")
        fails(errno.EWOULDBLOCK, kernel.remove, "nvidia-uvm", NOBODY)
        kernel.close_node(handle)
        kernel.remove("nvidia-uvm", NOBODY)
        kernel.set_users(A6000, [{"pid": 7}])
        fails(errno.EWOULDBLOCK, kernel.remove, "nvidia", NOBODY)
        kernel.set_users(A6000, [])
        kernel.remove("nvidia", NOBODY)
        assert driver_of(kernel, A6000) is None
        assert "nvidia" not in {name for _, _, name in kernel.character_devices}
        fails(errno.ENOENT, kernel.remove, "nvidia", NOBODY)


class TestNvidia:
    def test_it_takes_every_card_that_nobody_has(self) -> None:
        kernel = story()
        free(kernel, A6000, RTX3090)
        insert_nvidia(kernel)
        assert driver_of(kernel, A6000) == driver_of(kernel, RTX3090) == "nvidia"
        assert (minor_of(kernel, RTX3090), minor_of(kernel, A6000)) == (0, 1)
        assert "The NVIDIA probe routine was not called for 3 device(s)." in kernel.log_text()

    def test_an_override_keeps_a_card_from_it(self) -> None:
        kernel = story()
        kernel.set_override(kernel.functions[RTX3090], "vfio-pci", NOBODY)
        free(kernel, A6000, RTX3090)
        insert_nvidia(kernel)
        assert (driver_of(kernel, A6000), driver_of(kernel, RTX3090)) == ("nvidia", None)

    def test_without_a_free_card_it_does_not_load(self) -> None:
        kernel = story()
        fails(errno.ENODEV, insert_nvidia, kernel)
        assert "NVRM: No NVIDIA devices probed.\n" in kernel.log_text()
        assert "nvidia" not in kernel.modules
        assert not [name for _, _, name in kernel.character_devices if name.startswith("nvidia")]

    def test_the_lowest_free_minor_is_a_cards(self) -> None:
        kernel = machine()
        assert (minor_of(kernel, A6000), minor_of(kernel, OTHER_A6000)) == (0, 1)
        for address in (A6000, OTHER_A6000):
            kernel.unbind(kernel.drivers["nvidia"], address, NOBODY)
        for address in (OTHER_A6000, A6000):
            kernel.drivers_probe(address, NOBODY)
        assert (minor_of(kernel, A6000), minor_of(kernel, OTHER_A6000)) == (1, 0)

    def test_a_dead_card_is_not_taken(self) -> None:
        kernel = story()
        free(kernel, A6000, OTHER_A6000)
        kernel.xid(A6000, 79, "GPU has fallen off the bus.")
        insert_nvidia(kernel)
        assert (driver_of(kernel, A6000), driver_of(kernel, OTHER_A6000)) == (None, "nvidia")
        assert "NVRM: Xid (PCI:0000:4f:00): 79, GPU has fallen off the bus.\n" in kernel.log_text()
        assert "NVRM: The NVIDIA probe routine failed for 1 device(s).\n" in kernel.log_text()

    def test_options_become_parameters_in_decimal(self) -> None:
        kernel = story()
        free(kernel, A6000)
        insert_nvidia(kernel, "NVreg_DeviceFileMode=0660 NVreg_DeviceFileGID=44 NVreg_RegistryDwords=a=1")
        known = kernel.nvidia_parameters()
        assert (known["DeviceFileMode"], known["DeviceFileGID"], known["DeviceFileUID"]) == ("432", "44", "0")
        assert known["RegistryDwords"] == '"a=1"'


class TestModules:
    def test_secure_boot_wants_a_key_that_it_knows(self) -> None:
        kernel = story()
        kernel.secure_boot = True
        free(kernel, A6000)
        fails(errno.EKEYREJECTED, insert_nvidia, kernel)
        with pytest.raises(OSError, match="Key was rejected by service"):
            insert_nvidia(kernel, signer="DKMS module signing key")
        assert "Loading of module with unavailable key is rejected" in kernel.log_text()
        kernel.trusted_keys.add("DKMS module signing key")
        insert_nvidia(kernel, signer="DKMS module signing key")
        assert kernel.modules["nvidia"].taint == "PO"

    def test_a_module_is_for_one_kernel(self) -> None:
        kernel = story()
        other = kmodules.driver_modules("6.8.12-11-pve", "580.126.09", "open")["nvidia.ko"].image()
        fails(errno.ENOEXEC, kernel.insert, other, "", NOBODY)
        assert "nvidia: version magic '6.8.12-11-pve SMP" in kernel.log_text()
        fails(errno.ENOEXEC, kernel.insert, b"no module", "", NOBODY)

    def test_what_a_module_needs_comes_first(self) -> None:
        kernel = story()
        image = kmodules.driver_modules(kernel.release, "580.126.09", "open")["nvidia-uvm.ko"].image()
        fails(errno.ENOENT, kernel.insert, image, "", NOBODY)

    def test_vfio_takes_what_its_ids_say(self) -> None:
        kernel = Machine("box", {**hosts.default()["box1"], "kernel": "6.1.0-38-amd64"})
        kernel.power_on()
        for module in kmodules.kernel_modules(kernel.release).values():
            if module.name.startswith(("vfio", "irq")):
                options = "ids=10de:2684,nonsense,10de:22ba" if module.name == "vfio_pci" else ""
                kernel.insert(module.image(), options, NOBODY)
        assert driver_of(kernel, "0000:01:00.0") == driver_of(kernel, "0000:02:00.1") == "vfio-pci"
        assert 'vfio_pci: invalid id string "nonsense"' in kernel.log_text()
        assert "vfio_pci: add [10de:2684[ffffffff:ffffffff]] class 0x000000/00000000" in kernel.log_text()

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
    def test_who_may_not_load_modules(self) -> None:
        kernel = machine()
        with subprocess.Popen(["setpriv", "--reuid=65534", "--clear-groups", "sleep", "60"]) as process:
            wait_until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
            fails(errno.EPERM, kernel.remove, "nvidia-uvm", Caller(process.pid))
            process.terminate()

    def test_a_modules_file_says_what_it_is(self) -> None:
        module = kmodules.driver_modules("6.8.12-9-pve", "580.126.09", "proprietary", signer="a key")["nvidia-uvm.ko"]
        info = kmodules.modinfo(module.image())
        assert (info["name"], info["version"], info["depends"]) == (["nvidia_uvm"], ["580.126.09"], ["nvidia"])
        assert (info["signer"], info["vermagic"]) == (["a key"], ["6.8.12-9-pve SMP preempt mod_unload modversions "])


class TestMajors:
    def test_from_254_down_by_slots_of_255(self) -> None:
        assert dynamic_major(set()) == 254
        assert dynamic_major({254, 253}) == 252
        assert dynamic_major({509}) == 253  # 509 lies in the slot of 254
        assert dynamic_major(set(range(234, 255))) == 511
        assert dynamic_major({*range(234, 255), 511, 510}) == 509

    def test_another_boot_may_give_another(self) -> None:
        kernel = machine()
        assert (509, 0, "nvidia-uvm") in kernel.character_devices
        kernel.next_majors = {"nvidia-uvm": 511}
        assert (509, 0, "nvidia-uvm") in kernel.character_devices
        kernel.power_off()
        kernel.power_on_first()
        assert (511, 0, "nvidia-uvm") in kernel.character_devices


class TestPower:
    def test_nothing_outlives_it_but_the_hardware(self) -> None:
        kernel = machine()
        kernel.set_override(kernel.functions[A6000], "vfio-pci", NOBODY)
        kernel.xid(OTHER_A6000, 79, "GPU has fallen off the bus.")
        kernel.power_off()
        kernel.power_on()
        functions: list[Function] = list(kernel.functions.values())
        assert {each.override for each in functions} == {None}
        assert {driver_of(kernel, each.address) for each in functions if each.is_nvidia_display} == {None}
        assert set(kernel.drivers) == {"ahci", "e1000e"}
        assert not kernel.modules
        gpu = kernel.functions[OTHER_A6000].gpu
        assert gpu
        assert gpu.lost  # until somebody sets it right: some cards come back with power, some do not

    def test_two_things_at_one_address(self) -> None:
        kernel = machine()
        with pytest.raises(ValueError, match=r"0000:4f:00\.0 already"):
            kernel.plug(hosts.card("4f:00", "NVIDIA RTX A6000", 99, None))

    def test_a_card_can_go_and_come_and_move(self) -> None:
        kernel = machine()
        kernel.unplug(A6000)
        assert A6000 not in kernel.functions
        assert "0000:4f:00.1" not in kernel.functions
        kernel.move(OTHER_A6000, "0000:cf:00")
        assert "0000:cf:00.1" in kernel.functions
        assert "0000:ce:00.0" not in kernel.functions
        kernel.plug(hosts.card("4f:00", "NVIDIA RTX A6000", 31, None))
        assert driver_of(kernel, A6000) == "nvidia"
        assert minor_of(kernel, A6000) == 0


def archive(files: dict[str, bytes]) -> bytes:
    """Write cpio's "newc" format."""
    packed = b""
    for number, (name, data) in enumerate({**files, "TRAILER!!!": b""}.items(), start=1):
        mode = 0 if name == "TRAILER!!!" else 0o100644
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        packed += head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)
    return packed + b"\0" * (-len(packed) % 512)


@pytest.mark.parametrize(
    "pack",
    [
        lambda data: data,
        lambda data: zlib.compress(data, wbits=31),
        lzma.compress,
        lambda data: subprocess.run(["zstd", "-cq"], input=data, capture_output=True, check=True).stdout,
    ],
    ids=["plain", "gzip", "xz", "zstd"],
)
def test_an_initramfs_is_read_with_what_lies_before_it(pack: Callable[[bytes], bytes]) -> None:
    microcode = archive({"kernel/x86/microcode/GenuineIntel.bin": b"\1\2\3"})
    main = archive({"etc/modprobe.d/vfio.conf": b"options vfio-pci ids=10de:2204\n", "./conf/modules": b"vfio_pci\n"})
    files = boot.unpack(microcode + pack(main))
    assert files["kernel/x86/microcode/GenuineIntel.bin"] == b"\1\2\3"
    assert files["etc/modprobe.d/vfio.conf"] == b"options vfio-pci ids=10de:2204\n"
    assert files["conf/modules"] == b"vfio_pci\n"


def test_the_next_kernel_is_the_pinned_or_the_newest(tmp_path: Path) -> None:
    (tmp_path / "boot").mkdir()
    (tmp_path / "etc/kernel").mkdir(parents=True)
    assert boot.next_kernel(tmp_path) is None
    for release in ("6.8.12-9-pve", "6.8.12-11-pve", "6.5.13-6-pve"):
        (tmp_path / "boot" / f"vmlinuz-{release}").touch()
    assert boot.next_kernel(tmp_path) == "6.8.12-11-pve"
    (tmp_path / "etc/kernel/proxmox-boot-pin").write_text("6.8.12-9-pve\n")
    (tmp_path / "etc/kernel/next-boot-pin").write_text("6.5.13-6-pve\n")
    assert [boot.next_kernel(tmp_path) for _ in range(2)] == ["6.5.13-6-pve", "6.8.12-9-pve"]
