"""The kernel of one host of the lab: its PCI bus, its modules, NVIDIA's driver in it, and its log.

Written from the kernel's driver core (drivers/base/{bus,dd}.c, drivers/pci/pci-driver.c, fs/char_dev.c of 6.8) and
NVIDIA's open modules (nv.c, nv-pci.c, nv-procfs.c); what the driver says was compared with a 580.159.04.
It has no files: ``kernel.py`` shows it as sysfs and procfs. Every refusal is an OSError with the kernel's errno.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.lab import kmodules

ANY = 0xFFFFFFFF
NVIDIA = 0x10DE
NVIDIA_MAJOR = 195
CONTROL_MINOR, MODESET_MINOR = 255, 254
REGULAR_MINORS = 248  # nv-chardev-numbers.h: 0..247
SIZES = {
    "nvidia": 104071168,
    "nvidia_uvm": 1978368,
    "nvidia_modeset": 1630208,
    "nvidia_drm": 135168,
    "nouveau": 3096576,
}

# What every host has besides its cards: (address, vendor, device, class, driver).
CHIPSET = (
    ("0000:00:00.0", "8086", "09a2", "060000", None),
    ("0000:00:17.0", "8086", "a182", "010601", "ahci"),
    ("0000:00:1f.6", "8086", "15b7", "020000", "e1000e"),
)


def refuse(number: int) -> OSError:
    """Return the error of a system call that fails with this errno."""
    return OSError(number, os.strerror(number))


@dataclass(frozen=True)
class PciId:
    """An entry of a driver's table (struct pci_device_id)."""

    vendor: int
    device: int = ANY
    subvendor: int = ANY
    subdevice: int = ANY
    kind: int = 0
    mask: int = 0

    def matches(self, function: Function) -> bool:
        """Tell whether a function is meant (pci_match_one_device)."""
        return (
            self.vendor in (ANY, function.vendor)
            and self.device in (ANY, function.device)
            and self.subvendor in (ANY, function.subvendor)
            and self.subdevice in (ANY, function.subdevice)
            and not (self.kind ^ function.kind) & self.mask
        )


@dataclass
class Driver:
    """A PCI driver that is registered with the bus."""

    name: str
    module: str | None = None  # None: built in
    table: tuple[PciId, ...] = ()
    dynamic: list[PciId] = field(default_factory=list)

    def matches(self, function: Function) -> bool:
        """Tell whether this driver would take the function (pci_match_device)."""
        if function.override is not None:
            return function.override == self.name
        return any(entry.matches(function) for entry in (*self.dynamic, *self.table))


@dataclass
class Gpu:
    """What makes a function an NVIDIA GPU: what its driver and nvidia-smi know of it."""

    name: str
    uuid: str
    memory_mib: int
    compute_cap: str
    memory_used_mib: int = 1
    temperature: int = 34
    power_draw: float = 22.0
    power_limit: float = 300.0
    ecc: str = "[N/A]"
    ecc_uncorrected: str = "[N/A]"
    mig: str = "[N/A]"
    serial: str = "[N/A]"
    vbios: str = "94.02.5C.00.02"
    persistence: bool = False
    lost: bool = False  # fell off the bus
    minor: int | None = None
    initialised: bool = False  # somebody opened it since the driver took it


@dataclass
class Open:
    """Somebody who holds a device open."""

    node: str  # nvidia0, nvidiactl, nvidia-uvm, vfio
    address: str | None  # of the card, when it is a card's own node
    pid: int
    name: str
    memory_mib: int = 0


@dataclass
class Function:
    """A PCI function."""

    address: str
    vendor: int
    device: int
    kind: int  # class, 24 bits
    iommu_group: int
    subvendor: int
    subdevice: int
    revision: int = 0xA1
    numa_node: int = 0
    link_width: int = 16
    link_speed: str = "16.0 GT/s PCIe"
    max_link_width: int = 16
    gpu: Gpu | None = None
    driver: Driver | None = None
    linked: bool = False  # the ``driver`` link is gone as soon as a removal begins, before it is over
    override: str | None = None
    removing: bool = False

    @property
    def is_nvidia_display(self) -> bool:
        """Tell what NVIDIA's driver takes: VGA and 3D controllers."""
        return self.vendor == NVIDIA and self.kind in (0x030000, 0x030200)

    @property
    def modalias(self) -> str:
        """Return the text that ``modules.alias`` is searched with."""
        base, sub, interface = self.kind >> 16, self.kind >> 8 & 0xFF, self.kind & 0xFF
        return (
            f"pci:v{self.vendor:08X}d{self.device:08X}sv{self.subvendor:08X}sd{self.subdevice:08X}"
            f"bc{base:02X}sc{sub:02X}i{interface:02X}"
        )


@dataclass
class LoadedModule:
    """A module in the kernel."""

    name: str
    version: str
    srcversion: str
    size: int
    depends: tuple[str, ...]
    options: dict[str, str]
    taint: str = ""
    is_open: bool = False  # NVIDIA's open flavour


@dataclass(frozen=True)
class LinkChange:
    """A change of a function's driver link."""

    time: float  # seconds since the epoch
    address: str
    before: str | None
    after: str | None
    cause: str


@dataclass(frozen=True)
class Caller:
    """The process on whose behalf something is done."""

    pid: int = 0

    def is_killed(self) -> bool:
        """Tell whether it was sent SIGKILL or is gone: what waits for it then need not wait on."""
        if not self.pid:
            return False
        try:
            with open(f"/proc/{self.pid}/status") as file:
                text = file.read()
        except OSError:
            return True
        pending = re.findall(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)", text, re.M)
        return any(int(mask, 16) & 1 << 8 for mask in pending)

    def may_change_modules(self) -> bool:
        """Tell whether it has CAP_SYS_MODULE where it counts: containers have not."""
        if not self.pid:
            return True
        try:
            with open(f"/proc/{self.pid}/status") as file:
                effective = re.search(r"^CapEff:\s*([0-9a-f]+)", file.read(), re.M)
            is_outside = os.readlink(f"/proc/{self.pid}/ns/user") == os.readlink("/proc/self/ns/user")
        except OSError:
            return False
        return is_outside and effective is not None and bool(int(effective[1], 16) & 1 << 16)

    def pid_in_host(self) -> int:
        """Return the process's id as its host counts, not the machine that the lab runs on."""
        try:
            with open(f"/proc/{self.pid}/status") as file:
                found = re.search(r"^NSpid:\s*(.*)", file.read(), re.M)
        except OSError:
            return self.pid
        numbers = found[1].split() if found else []
        return int(numbers[1]) if len(numbers) > 1 else self.pid


# nv-reg.h and its defaults, as a 580.159.04 shows them in /proc/driver/nvidia/params.
PARAMETERS: dict[str, str] = {
    "ResmanDebugLevel": "4294967295",
    "RmLogonRC": "1",
    "ModifyDeviceFiles": "1",
    "DeviceFileUID": "0",
    "DeviceFileGID": "0",
    "DeviceFileMode": "438",
    "InitializeSystemMemoryAllocations": "1",
    "UsePageAttributeTable": "4294967295",
    "EnableMSI": "1",
    "EnablePCIeGen3": "0",
    "MemoryPoolSize": "0",
    "KMallocHeapMaxSize": "0",
    "VMallocHeapMaxSize": "0",
    "IgnoreMMIOCheck": "0",
    "EnableStreamMemOPs": "0",
    "EnableUserNUMAManagement": "1",
    "NvLinkDisable": "0",
    "RmProfilingAdminOnly": "1",
    "PreserveVideoMemoryAllocations": "0",
    "EnableS0ixPowerManagement": "0",
    "S0ixPowerManagementVideoMemoryThreshold": "256",
    "DynamicPowerManagement": "3",
    "DynamicPowerManagementVideoMemoryThreshold": "200",
    "RegisterPCIDriver": "1",
    "EnablePCIERelaxedOrderingMode": "0",
    "EnableResizableBar": "0",
    "EnableGpuFirmware": "18",
    "EnableGpuFirmwareLogs": "2",
    "RmNvlinkBandwidthLinkCount": "0",
    "EnableDbgBreakpoint": "0",
    "OpenRmEnableUnsupportedGpus": "1",
    "DmaRemapPeerMmio": "1",
    "ImexChannelCount": "2048",
    "CreateImexChannel0": "0",
    "GrdmaPciTopoCheckOverride": "0",
    "CoherentGPUMemoryMode": '""',
    "RegistryDwords": '""',
    "RegistryDwordsPerDevice": '""',
    "RmMsg": '""',
    "GpuBlacklist": '""',
    "TemporaryFilePath": '""',
    "ExcludedGpus": '""',
}


class Machine:
    """One host. All public methods take its lock themselves; a waiting one lets it go meanwhile."""

    def __init__(self, name: str, description: Mapping[str, Any]) -> None:
        self.name = name
        self.changed = threading.Condition(threading.RLock())
        self.description = description
        self.release: str = description["kernel"]
        self.next_majors: dict[str, int] = dict(description.get("majors", {}))
        self.secure_boot: bool = description.get("secure_boot", False)
        self.trusted_keys: set[str] = {kmodules.PROXMOX_KEY, kmodules.DEBIAN_KEY, *description.get("mok", [])}
        self.refused_drivers: set[str] = set()  # versions that initialise no card of this machine
        self.link_changes: list[LinkChange] = []
        self.boots = 0
        self.functions: dict[str, Function] = {}
        for address, vendor, device, kind, _ in CHIPSET:
            entry = {
                "pci": address,
                "vendor": vendor,
                "device": device,
                "class": kind,
                "iommu_group": len(self.functions),
            }
            self._plug(entry)
        for card in description["cards"]:
            self.plug(card)
        self._switch_off()

    # Power

    def _switch_off(self) -> None:
        """Forget all that lives in memory."""
        self.on = False
        self.epoch = object()  # what waits in the kernel of an earlier boot ends with it
        self.drivers: dict[str, Driver] = {}
        self.modules: dict[str, LoadedModule] = {}
        self.opens: dict[int, Open] = {}
        self.character_devices: list[tuple[int, int, str]] = []
        self.log: list[tuple[float, str]] = []
        self.taints: set[str] = set()
        self.hung = False
        self.autoprobe = True
        for function in self.functions.values():
            function.driver, function.linked, function.override, function.removing = None, False, None, False
            if function.gpu:
                function.gpu.minor, function.gpu.initialised, function.gpu.persistence = None, False, False
                function.gpu.memory_used_mib = 1

    def power_off(self) -> None:
        """Cut the power: everything that waits in this kernel comes back with EIO."""
        with self.changed:
            for function in self.functions.values():
                if function.linked and function.driver:
                    self._record(function, function.driver.name, None, "power off")
            self._switch_off()
            self.changed.notify_all()

    def power_on(self, release: str | None = None) -> None:
        """Start the kernel: built-in drivers take their devices, and no module is loaded yet."""
        with self.changed:
            self._switch_off()
            self.on = True
            self.release = release or self.release
            self.boots += 1
            self.boot_time = time.monotonic()
            self.majors = dict(self.next_majors)
            self._print(self.banner)
            self._print("DMAR: IOMMU enabled")
            if self.secure_boot:
                self._print("secureboot: Secure boot enabled")
                self._print("Kernel is locked down from EFI Secure Boot mode; see man kernel_lockdown.7")
            for address, vendor, device, _, name in CHIPSET:
                if name:
                    driver = Driver(name, table=(PciId(int(vendor, 16), int(device, 16)),))
                    self.drivers[name] = driver
                    self._attach(driver, self.functions[address], "boot")
            self.changed.notify_all()

    def power_on_first(self) -> None:
        """Start as the description has it: what it says of drivers now holds, whatever the host's files would give."""
        self.power_on()
        wanted = [entry for card in self.description["cards"] for entry in (card, *card.get("companions", []))]
        with self.changed:
            for entry in wanted:
                function = self.functions[entry["pci"]]
                function.override = entry.get("driver") or ("nothing" if function.is_nvidia_display else None)
            modules = kmodules.kernel_modules(self.release).values()
            options = {"vfio_pci": f"ids={','.join(kmodules.vfio_ids(self.description))}"}
            if any(entry.get("driver") == "vfio-pci" for entry in wanted):
                for module in modules:
                    if module.name.startswith(("vfio", "irq")):
                        self.insert(module.image(), options.get(module.name, ""), Caller())
            if driver := self.description["driver"]:
                signer = driver.get("signer", "")
                ours = kmodules.driver_modules(self.release, driver["version"], driver["flavour"], signer)
                for name in ("nvidia.ko", "nvidia-uvm.ko"):
                    with contextlib.suppress(OSError):  # a host without a card that the driver may have
                        self.insert(ours[name].image(), "", Caller())
            for entry in wanted:
                self.functions[entry["pci"]].override = None

    @property
    def enrolled_keys(self) -> set[str]:
        """Return the machine owner keys: those that a person enrolled at the console."""
        return self.trusted_keys - {kmodules.PROXMOX_KEY, kmodules.DEBIAN_KEY}

    @property
    def banner(self) -> str:
        """Return what ``/proc/version`` says; ``uname -v`` is what begins with ``#``."""
        kind = "PMX" if self.release.endswith("-pve") else "Debian"
        build = f"#1 SMP PREEMPT_DYNAMIC {kind} {self.release} (2025-03-16T19:18Z)"
        return f"Linux version {self.release} (build@lab) {build}"

    @property
    def uptime(self) -> float:
        """Return the seconds since this boot."""
        return time.monotonic() - self.boot_time

    # The log

    def _print(self, *lines: str) -> None:
        now = self.uptime
        self.log.extend((now, line) for line in lines)

    def print(self, *lines: str) -> None:
        """Write lines into the kernel's log."""
        with self.changed:
            self._print(*lines)

    def log_text(self) -> str:
        """Return the log as dmesg shows it."""
        with self.changed:
            return "".join(f"[{at:12.6f}] {line}\n" for at, line in self.log)

    def _record(self, function: Function, before: str | None, after: str | None, cause: str) -> None:
        self.link_changes.append(LinkChange(time.time(), function.address, before, after, cause))

    # What is plugged in

    def plug(self, card: Mapping[str, Any]) -> None:
        """Put a card with its companions into a slot; in a running machine it is offered to the drivers."""
        with self.changed:
            for entry in (card, *card.get("companions", [])):
                function = self._plug({"subsystem": card.get("subsystem", "10de:1459"), **entry})
                if getattr(self, "on", False):
                    self._probe(function, "plugged in")

    def _plug(self, entry: Mapping[str, Any]) -> Function:
        subvendor, _, subdevice = entry.get("subsystem", f"{entry['vendor']}:0000").partition(":")
        known = {key: entry[key] for key in ("numa_node", "link_width", "link_speed", "max_link_width") if key in entry}
        gpu_fields = Gpu.__dataclass_fields__
        gpu = Gpu(**{key: entry[key] for key in gpu_fields if key in entry}) if "uuid" in entry else None
        function = Function(
            address=entry["pci"],
            vendor=int(entry["vendor"], 16),
            device=int(entry["device"], 16),
            kind=int(entry["class"], 16),
            iommu_group=entry["iommu_group"],
            subvendor=int(subvendor, 16),
            subdevice=int(subdevice, 16),
            gpu=gpu,
            **known,
        )
        if function.address in self.functions:
            raise ValueError(f"{self.name} has something at {function.address} already")
        self.functions[function.address] = function
        self.functions = dict(sorted(self.functions.items()))
        return function

    def unplug(self, address: str) -> None:
        """Take a card out with its companions, as on a machine that is off."""
        with self.changed:
            slot = address.rpartition(".")[0]
            for function in [each for each in self.functions.values() if each.address.startswith(f"{slot}.")]:
                if function.linked and function.driver:
                    self._record(function, function.driver.name, None, "unplugged")
                del self.functions[function.address]

    def move(self, address: str, slot: str) -> None:
        """Give a card another address (``0000:50:00``), as a board does that numbers its buses anew."""
        with self.changed:
            old = address.rpartition(".")[0]
            for function in [each for each in self.functions.values() if each.address.startswith(f"{old}.")]:
                del self.functions[function.address]
                function.address = f"{slot}.{function.address.rpartition('.')[2]}"
                self.functions[function.address] = function
            self.functions = dict(sorted(self.functions.items()))

    def function(self, address: str) -> Function:
        """Find a function by its full address; a trailing newline is as in sysfs. Raises ENODEV."""
        found = self.functions.get(address.removesuffix("\n"))
        if found is None:
            raise refuse(errno.ENODEV)
        return found

    # The driver core

    def bind(self, driver: Driver, text: str, caller: Caller) -> None:
        """Do what a write to a driver's ``bind`` does (bind_store)."""
        with self.changed:
            function = self.function(text)
            if not driver.matches(function):
                raise refuse(errno.ENODEV)
            self._wait_for(function, caller)
            if function.driver:
                raise refuse(errno.EBUSY)
            self._attach(driver, function, "bind")

    def unbind(self, driver: Driver, text: str, caller: Caller) -> None:
        """Do what a write to a driver's ``unbind`` does (unbind_store)."""
        with self.changed:
            function = self.function(text)
            self._wait_for(function, caller)
            if function.driver is not driver:
                raise refuse(errno.ENODEV)
            self._release(function, "unbind", caller)

    def drivers_probe(self, text: str, caller: Caller) -> None:
        """Do what a write to the bus's ``drivers_probe`` does: no fitting driver, or one that fails, is no error."""
        with self.changed:
            function = self.function(text)
            self._wait_for(function, caller)
            if not function.driver:
                self._probe(function, "drivers_probe")

    def new_id(self, driver: Driver, text: str) -> None:
        """Do what a write to a driver's ``new_id`` does: whatever fits and is driverless is taken, now and later."""
        with self.changed:
            entry = PciId(**dict(zip(_ID_FIELDS, _hexadecimal(text, 2), strict=False)))
            for known in (*driver.dynamic, *driver.table):
                fits = known.vendor in (ANY, entry.vendor) and known.device in (ANY, entry.device)
                if fits and not (known.kind ^ entry.kind) & known.mask:
                    raise refuse(errno.EEXIST)
            driver.dynamic.append(entry)
            self._attach_all(driver, "new_id")

    def remove_id(self, driver: Driver, text: str) -> None:
        """Do what a write to a driver's ``remove_id`` does; what is bound stays bound."""
        with self.changed:
            vendor, device = _hexadecimal(text, 2)[:2]
            for entry in driver.dynamic:
                if (entry.vendor, entry.device) == (vendor, device):
                    driver.dynamic.remove(entry)
                    return
            raise refuse(errno.ENODEV)

    def set_override(self, function: Function, text: str, caller: Caller) -> None:
        """Do what a write to ``driver_override`` does: an empty line clears it, and nothing is bound or unbound."""
        with self.changed:
            if len(text) >= 4095:
                raise refuse(errno.EINVAL)
            self._wait_for(function, caller)
            function.override = text.partition("\n")[0] or None

    def _probe(self, function: Function, cause: str) -> None:
        """Offer a driverless function to every driver in the order of registration (device_attach)."""
        for driver in list(self.drivers.values()):
            if driver.matches(function):
                with contextlib.suppress(OSError):
                    self._attach(driver, function, cause)
                    return

    def _attach_all(self, driver: Driver, cause: str) -> None:
        """Offer every driverless function to a driver (driver_attach)."""
        for function in list(self.functions.values()):
            if not function.driver and driver.matches(function):
                with contextlib.suppress(OSError):
                    self._attach(driver, function, cause)

    def _attach(self, driver: Driver, function: Function, cause: str) -> None:
        """Call the driver's probe. Raises its error."""
        if driver.name == "nvidia":
            self._nvidia_probe(function)
        elif driver.name == "vfio-pci" and function.kind >> 16 == 0x06:
            raise refuse(errno.EINVAL)
        function.driver, function.linked = driver, True
        self._record(function, None, driver.name, cause)
        self.changed.notify_all()

    def _release(self, function: Function, cause: str, caller: Caller) -> None:
        """Take a function from its driver: waits for as long as somebody uses it, and goes on if the caller dies.

        The link is gone at once (driver_sysfs_remove comes before the driver's remove).
        """
        driver = function.driver
        assert driver is not None
        function.linked = False
        self._record(function, driver.name, None, cause)
        if self.users(function):
            if driver.name == "nvidia":
                self._print(f"NVRM: Attempting to remove device {function.address} with non-zero usage count!")
            function.removing = True
            epoch = self.epoch
            try:
                self._wait(lambda: not self.users(function), caller)
            except InterruptedError:
                threading.Thread(target=self._finish_release, args=(function, epoch), daemon=True).start()
                raise
        self._released(function)

    def _finish_release(self, function: Function, epoch: object) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.epoch is not epoch or not self.users(function))
            if self.epoch is epoch:
                self._released(function)

    def _released(self, function: Function) -> None:
        if function.gpu:
            function.gpu.minor, function.gpu.initialised, function.gpu.persistence = None, False, False
        function.driver, function.removing = None, False
        self.changed.notify_all()

    def _wait_for(self, function: Function, caller: Caller) -> None:
        """Wait for a function's lock: it is held while its driver removes it."""
        self._wait(lambda: not function.removing, caller)

    def _wait(self, is_over: Callable[[], bool], caller: Caller) -> None:
        """Wait as the kernel does, not to be interrupted but by a kill (there not even by that) or the power's end."""
        epoch = self.epoch
        while not is_over():
            self.changed.wait(0.2)
            if self.epoch is not epoch:
                raise refuse(errno.EIO)
            if caller.is_killed():
                raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))

    # Users of devices

    def users(self, function: Function) -> list[Open]:
        """Return who holds a card open."""
        return [each for each in self.opens.values() if each.address == function.address]

    def open_node(self, node: str, pid: int, name: str, memory_mib: int = 0) -> int:
        """Open a node as a process does; returns what to close. Raises ENODEV or EIO as the driver does."""
        with self.changed:
            address = None
            if match := re.fullmatch(r"nvidia(\d+)", node):
                function = self._card(int(match[1]))
                assert function.gpu is not None
                if function.removing:
                    raise refuse(errno.ENODEV)
                if function.gpu.lost:
                    raise refuse(errno.EIO)
                function.gpu.initialised, address = True, function.address
            elif node.startswith("vfio-"):
                function = self.function(node.removeprefix("vfio-"))
                if function.removing or function.driver is None or function.driver.name != "vfio-pci":
                    raise refuse(errno.ENODEV)
                node, address = "vfio", function.address
            elif _MODULE_OF[node] not in self.modules:
                raise refuse(errno.ENXIO)
            handle = next(_handles)
            self.opens[handle] = Open(node, address, pid, name, memory_mib)
            return handle

    def close_node(self, handle: int) -> None:
        """Close what was opened; what waits for the card to be free goes on."""
        with self.changed:
            self.opens.pop(handle, None)
            self.changed.notify_all()

    def set_users(self, address: str, users: list[Mapping[str, Any]]) -> None:
        """Say who uses a card, besides processes that opened it themselves (pid, name, memory_mib)."""
        with self.changed:
            function = self.function(address)
            for handle in [key for key, each in self.opens.items() if each.address == address and key < 0]:
                del self.opens[handle]
            for user in users:
                node = f"nvidia{function.gpu.minor}" if function.gpu and function.gpu.minor is not None else "vfio"
                known = Open(node, address, user.get("pid", 0), user.get("name", "python3"), user.get("memory_mib", 0))
                self.opens[-next(_handles)] = known
                if function.gpu:
                    function.gpu.initialised = True
            self.changed.notify_all()

    def _card(self, minor: int) -> Function:
        for function in self.functions.values():
            if function.gpu and function.gpu.minor == minor:
                return function
        raise refuse(errno.ENXIO)

    # Modules

    def insert(self, image: bytes, arguments: str, caller: Caller) -> None:
        """Load a module (finit_module). Raises EPERM, ENOEXEC, EKEYREJECTED, EEXIST, ENOENT or what its init gives."""
        if not caller.may_change_modules():
            raise refuse(errno.EPERM)
        with self.changed:
            module = self._checked(image, arguments)
            self.modules[module.name] = module
            try:
                if start := _INIT.get(module.name):
                    start(self, module)
            except OSError:
                del self.modules[module.name]
                raise
            self.changed.notify_all()

    def _checked(self, image: bytes, arguments: str) -> LoadedModule:
        try:
            info = kmodules.modinfo(image)
            name = info["name"][0]
        except (ValueError, KeyError) as error:
            raise refuse(errno.ENOEXEC) from error
        signer = info.get("signer", [None])[0]
        if self.secure_boot and signer not in self.trusted_keys:
            what = "module with unavailable key" if signer else "unsigned module"
            self._print(f"Loading of {what} is rejected")
            raise refuse(errno.EKEYREJECTED)
        if info["vermagic"][0] != kmodules.vermagic(self.release):
            ours = kmodules.vermagic(self.release)
            self._print(f"{name}: version magic '{info['vermagic'][0]}' should be '{ours}'")
            raise refuse(errno.ENOEXEC)
        if name in self.modules:
            raise refuse(errno.EEXIST)
        depends = tuple(each.replace("-", "_") for each in info["depends"][0].split(",") if each)
        for each in depends:
            if each not in self.modules:
                self._print(f"{name}: Unknown symbol {each}_interface (err -2)")
                raise refuse(errno.ENOENT)
        taint = ""
        if info["license"][0] == "NVIDIA":
            taint += self._taint("P", f"{name}: module license 'NVIDIA' taints kernel.")
        if "intree" not in info:
            taint += self._taint("O", f"{name}: loading out-of-tree module taints kernel.")
        if signer not in self.trusted_keys:
            what = "module verification failed: signature and/or required key missing - tainting kernel"
            taint += self._taint("E", f"{name}: {what}")
        options = dict(pair.partition("=")[::2] for pair in arguments.split())
        return LoadedModule(
            name=name,
            version=info.get("version", [""])[0],
            srcversion=info["srcversion"][0],
            size=SIZES.get(name, 16384 + len(image) // 4096 * 4096),
            depends=depends,
            options=options,
            taint=taint,
            is_open=name == "nvidia" and info["license"][0] != "NVIDIA",
        )

    def _taint(self, letter: str, line: str) -> str:
        """Mark the kernel, and say so the first time."""
        if letter not in self.taints:
            self.taints.add(letter)
            self._print(line)
        return letter

    def remove(self, name: str, caller: Caller) -> None:
        """Unload a module (delete_module). Raises EPERM, ENOENT, or EWOULDBLOCK while it is in use."""
        if not caller.may_change_modules():
            raise refuse(errno.EPERM)
        with self.changed:
            name = name.strip().replace("-", "_")
            if name not in self.modules:
                raise refuse(errno.ENOENT)
            if self.references(name):
                raise refuse(errno.EWOULDBLOCK)
            for driver in [each for each in self.drivers.values() if each.module == name]:
                for function in [each for each in self.functions.values() if each.driver is driver]:
                    self._wait_for(function, caller)
                    if function.driver is driver:
                        self._release(function, f"rmmod {name}", caller)
                del self.drivers[driver.name]
            if name == "nvidia":
                major = next(major for major, _, device in self.character_devices if device == "nvidia-nvlink")
                self._print(f"nvidia-nvlink: Unregistered Nvlink Core, major device number {major}")
            for device in _DEVICES_OF.get(name, ()):
                self._unregister_device(device)
            if name == "nvidia_uvm":
                self._print("nvidia-uvm: Unloaded the UVM driver.")
            del self.modules[name]
            self.changed.notify_all()

    def holders(self, name: str) -> list[str]:
        """Return the loaded modules that use a module, newest first as ``/proc/modules`` has them."""
        return [each.name for each in reversed(self.modules.values()) if name in each.depends]

    def references(self, name: str) -> int:
        """Return a module's use count: modules that need it and nodes of it that are open."""
        held = {"nvidia": r"nvidia(ctl|-modeset|\d+)", "nvidia_uvm": r"nvidia-uvm.*", "vfio_pci": "vfio"}.get(name, "")
        return len(self.holders(name)) + sum(bool(re.fullmatch(held, each.node)) for each in self.opens.values())

    # Character devices

    def used_majors(self) -> set[int]:
        """Return the majors that are taken, on the machine that the lab runs on too: its drivers answer there."""
        return {major for major, _ in machine_devices()} | {major for major, _, _ in self.character_devices}

    def _register_device(self, name: str) -> int:
        """Give a name a major of its own (alloc_chrdev_region), or the one that was set for this boot."""
        major = self.majors.get(name) or dynamic_major(self.used_majors())
        self.character_devices.append((major, 0, name))
        return major

    def _unregister_device(self, name: str) -> None:
        self.character_devices = [each for each in self.character_devices if each[2] != name]

    # NVIDIA

    def _nvidia_probe(self, function: Function) -> None:
        """Take a card: the lowest free minor is its (nv.c: nv_linux_add_device). Raises EPERM for a dead one."""
        if not function.is_nvidia_display or function.gpu is None:
            raise refuse(errno.ENODEV)
        self._probed += 1
        if function.gpu.lost:
            self._print(
                f"NVRM: The NVIDIA GPU {function.address}",
                f"NVRM: (PCI ID: {function.vendor:04x}:{function.device:04x}) installed in this system has",
                "NVRM: fallen off the bus and is not responding to commands.",
                f"nvidia: probe of {function.address} failed with error -1",
            )
            raise refuse(errno.EPERM)
        taken = {each.gpu.minor for each in self.functions.values() if each.gpu}
        function.gpu.minor = next(minor for minor in range(REGULAR_MINORS) if minor not in taken)
        if "nvidia" in self.drivers:
            self._print(f"nvidia {function.address}: enabling device (0000 -> 0003)")

    def _init_nvidia(self, module: LoadedModule) -> None:
        """Start the driver: every driverless NVIDIA display card is taken; with none it is ENODEV (nv.c)."""
        for name in ("nvidia-caps-imex-channels", "nvidia-caps", "nvidia-nvlink", "nvidia-nvswitch"):
            major = self._register_device(name)
            if name == "nvidia-nvlink":
                self._print(f"nvidia-nvlink: Nvlink Core is being initialized, major device number {major}")
        count = sum(each.is_nvidia_display for each in self.functions.values())
        self._probed = 0
        table = (PciId(NVIDIA, kind=0x030000, mask=ANY), PciId(NVIDIA, kind=0x030200, mask=ANY))
        driver = Driver("nvidia", "nvidia", table)
        if module.version in self.refused_drivers:
            self._print(
                "NVRM: RmInitAdapter failed! (0x62:0xffff:2477)", "NVRM: None of the NVIDIA devices were initialized."
            )
            for name in _DEVICES_OF["nvidia"]:
                self._unregister_device(name)
            raise refuse(errno.EIO)
        if count:
            self.drivers["nvidia"] = driver
            self._attach_all(driver, "modprobe nvidia")
        taken = [each for each in self.functions.values() if each.driver is driver]
        if not count:
            self._print("NVRM: No NVIDIA GPU found.")
        elif self._probed != count:
            self._print(
                f"NVRM: The NVIDIA probe routine was not called for {count - self._probed} device(s).",
                "NVRM: This can occur when another driver was loaded and ",
                "NVRM: obtained ownership of the NVIDIA device(s).",
                "NVRM: Try unloading the conflicting kernel module (and/or",
                "NVRM: reconfigure your kernel without the conflicting",
                "NVRM: driver(s)), then try loading the NVIDIA kernel module",
                "NVRM: again.",
            )
        if count and not self._probed:
            self._print("NVRM: No NVIDIA devices probed.")
        elif self._probed != len(taken):
            self._print(f"NVRM: The NVIDIA probe routine failed for {self._probed - len(taken)} device(s).")
            if not taken:
                self._print("NVRM: None of the NVIDIA devices were initialized.")
        if not taken:
            self.drivers.pop("nvidia", None)
            for name in _DEVICES_OF["nvidia"]:
                self._unregister_device(name)
            raise refuse(errno.ENODEV)
        self._print(f"NVRM: loading {self.nvidia_identity(module)}")
        self.character_devices += [(NVIDIA_MAJOR, 0, "nvidia"), (NVIDIA_MAJOR, CONTROL_MINOR, "nvidiactl")]

    def _init_uvm(self, _module: LoadedModule) -> None:
        major = self._register_device("nvidia-uvm")
        self._print(f"nvidia-uvm: Loaded the UVM driver, major device number {major}.")

    def _init_modeset(self, module: LoadedModule) -> None:
        self.character_devices.append((NVIDIA_MAJOR, MODESET_MINOR, "nvidia-modeset"))
        self._print(f"nvidia-modeset: Loading NVIDIA Kernel Mode Setting Driver for UNIX platforms  {module.version}")

    def _init_drm(self, _module: LoadedModule) -> None:
        for function in self.functions.values():
            if function.driver and function.driver.name == "nvidia":
                bus = function.address.split(":")[1]
                self._print(f"[drm] [nvidia-drm] [GPU ID 0x0000{bus}00] Loading driver")

    def _init_vfio_pci(self, module: LoadedModule) -> None:
        """Register vfio-pci, and add its ``ids=`` one by one (vfio_pci_fill_ids)."""
        driver = self.drivers["vfio-pci"] = Driver("vfio-pci", "vfio_pci")
        self._print("VFIO - User Level meta-driver version: 0.3")
        for text in filter(None, module.options.get("ids", "").split(",")):
            try:
                values = [int(part, 16) for part in text.split(":")]
                entry = PciId(**dict(zip(_ID_FIELDS, values, strict=False)))
                if len(values) < 2:
                    raise ValueError("vendor and device are needed")
            except (ValueError, TypeError):
                self._print(f'vfio_pci: invalid id string "{text}"')
                continue
            driver.dynamic.append(entry)
            subsystem = f"{entry.subvendor:08x}:{entry.subdevice:08x}"
            added = f"[{entry.vendor:04x}:{entry.device:04x}[{subsystem}]]"
            self._print(f"vfio_pci: add {added} class 0x{entry.kind:06x}/{entry.mask:08x}")
            self._attach_all(driver, "modprobe vfio-pci")
        self._attach_all(driver, "modprobe vfio-pci")

    def _init_nouveau(self, _module: LoadedModule) -> None:
        driver = self.drivers["nouveau"] = Driver("nouveau", "nouveau", (PciId(NVIDIA, kind=0x030000, mask=0xFF0000),))
        self._attach_all(driver, "modprobe nouveau")

    def _init_audio(self, _module: LoadedModule) -> None:
        table = (PciId(NVIDIA, kind=0x040300, mask=0xFFFFFF),)
        driver = self.drivers["snd_hda_intel"] = Driver("snd_hda_intel", "snd_hda_intel", table)
        self._attach_all(driver, "modprobe snd_hda_intel")

    def nvidia_identity(self, module: LoadedModule) -> str:
        """Return the driver's name of itself (pNVRM_ID)."""
        if module.is_open:
            name = f"Open Kernel Module for {os.uname().machine}  {module.version}  Release Build  (root@{self.name})"
        else:
            name = f"{os.uname().machine} Kernel Module  {module.version}"
        return f"NVIDIA UNIX {name}  Tue Feb 17 19:12:04 UTC 2026"

    def nvidia_parameters(self) -> dict[str, str]:
        """Return the driver's parameters, with its module's options applied."""
        values = dict(PARAMETERS)
        for option, text in self.modules["nvidia"].options.items():
            name = option.removeprefix("NVreg_")
            if name in values:
                values[name] = str(_number(text)) if values[name].isdigit() else f'"{text}"'
        return values

    def cards(self) -> list[Function]:
        """Return the cards that NVIDIA's driver has, by address."""
        return [each for each in self.functions.values() if each.gpu and each.gpu.minor is not None]

    def xid(self, address: str, number: int, text: str) -> None:
        """Report an error of a card as the driver does; 79 is the loss of the card."""
        with self.changed:
            function = self.function(address)
            gpu = function.gpu
            assert gpu is not None
            at = address.rpartition(".")[0]
            self._print(f"NVRM: GPU at PCI:{at}: {gpu.uuid}", f"NVRM: Xid (PCI:{at}): {number}, {text}")
            if number == 79:
                gpu.lost = True
                self._print(f"NVRM: GPU {address}: GPU has fallen off the bus.")


_ID_FIELDS = ("vendor", "device", "subvendor", "subdevice", "kind", "mask")  # in the order of new_id and ids=
_handles: Iterator[int] = itertools.count(1)

_INIT: dict[str, Callable[[Machine, LoadedModule], None]] = {
    "nvidia": Machine._init_nvidia,
    "nvidia_uvm": Machine._init_uvm,
    "nvidia_modeset": Machine._init_modeset,
    "nvidia_drm": Machine._init_drm,
    "vfio_pci": Machine._init_vfio_pci,
    "nouveau": Machine._init_nouveau,
    "snd_hda_intel": Machine._init_audio,
}
_MODULE_OF = {"nvidiactl": "nvidia", "nvidia-uvm": "nvidia_uvm", "nvidia-uvm-tools": "nvidia_uvm"}
_DEVICES_OF = {
    "nvidia": ("nvidia", "nvidiactl", "nvidia-nvswitch", "nvidia-nvlink", "nvidia-caps", "nvidia-caps-imex-channels"),
    "nvidia_uvm": ("nvidia-uvm",),
    "nvidia_modeset": ("nvidia-modeset",),
}


def dynamic_major(used: set[int]) -> int:
    """Choose a major as the kernel does (fs/char_dev.c: find_dynamic_major): 254 to 234, then 511 to 384.

    The first range goes by slots of a table of 255, so 511 keeps 256 - 255 = 1, and so on, from being free.
    """
    for major in range(254, 233, -1):
        if all(each % 255 != major for each in used):
            return major
    for major in range(511, 383, -1):
        if major not in used:
            return major
    raise refuse(errno.EBUSY)


def machine_devices() -> list[tuple[int, str]]:
    """Return the character devices of the machine that the lab runs on, without NVIDIA's."""
    with open("/proc/devices") as file:
        text = file.read().partition("\n\n")[0]
    lines = [line.split(None, 1) for line in text.splitlines()[1:]]
    return [(int(major), name) for major, name in lines if not name.startswith("nvidia")]


def _hexadecimal(text: str, least: int) -> list[int]:
    """Read numbers as sscanf's ``%x %x …`` does. Raises EINVAL for fewer than ``least``."""
    values = []
    for word in text.split():
        match = re.match(r"(?:0[xX])?[0-9a-fA-F]{1,8}", word)
        if not match:
            break
        values.append(int(match[0], 16))
        if match[0] != word:
            break
    if len(values) < least:
        raise refuse(errno.EINVAL)
    return values[:6]


def _number(text: str) -> int:
    """Read a module parameter of type uint: a leading 0 is octal, 0x hexadecimal (kstrtouint with base 0)."""
    if re.fullmatch(r"0[0-7]+", text):
        return int(text, 8)
    return int(text, 0)
