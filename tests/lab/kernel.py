"""The kernels of a lab's hosts, as files: one FUSE file system, a folder for each host.

``python -m tests.lab.kernel --state STATE`` reads the hosts' descriptions (``hosts.py``) from its standard input,
mounts ``STATE/kernel`` and answers at ``STATE/control/kernel.sock``. What a folder holds, and where a host sees it:

| below ``STATE/kernel/HOST`` | in the host |
| --- | --- |
| ``bus-pci/`` | ``/sys/bus/pci`` |
| ``iommu_groups/`` | ``/sys/kernel/iommu_groups`` |
| ``module/`` | ``/sys/module`` |
| ``proc-driver/`` | ``/proc/driver`` |
| ``proc-devices`` | ``/proc/devices`` |
| ``proc-modules`` | ``/proc/modules``, where the machine's kernel has one |
| ``firmware/`` | ``/sys/firmware`` |
| ``proc-version``, ``proc-osrelease`` | ``/proc/version``, ``/proc/sys/kernel/osrelease`` |
| ``control/`` | ``/run/lab-kernel``: for the stand-ins alone |

A container of the host sees all of the same kernel, ``/run/lab-kernel`` and ``/sys/bus/pci`` excepted: bind the
host's ``/proc/driver``, ``/proc/devices``, ``/proc/modules`` (if there), ``/sys/module``, ``/proc/version`` and
``/proc/sys/kernel/osrelease`` over its own.

Device nodes are made with the real mknod and have no driver behind them: who may open one gets ENXIO, who may not
gets EPERM.
What a driver would do behind a node is asked through ``/proc/driver/nvidia/.lab/`` (it is not listed):
``cards`` is what NVML would tell, and holding ``open/nvidia0`` open is to hold ``/dev/nvidia0``.

What a test may ask and change, at the control socket (``control.py``) or with ``Lab.kernel(OP, HOST, …)``:

| op | arguments | does |
| --- | --- | --- |
| ``power`` | ``on`` | switches the kernel on (a boot) or off; the host's own start and stop do it |
| ``state`` | | returns the hidden truth: drivers, overrides, modules, majors, who has what open, the cards |
| ``links`` | | returns every change of a driver link: ``time``, ``address``, ``before``, ``after``, ``cause`` |
| ``dmesg`` | | returns the kernel's log; ``print`` with ``lines`` adds to it |
| ``plug``, ``unplug``, ``move`` | ``card``; ``pci``; ``pci``, ``slot`` | changes what is in the slots |
| ``set`` | ``pci``, ``values`` | changes fields of ``machine.Gpu`` or ``machine.Function`` |
| ``xid`` | ``pci``, ``xid``, ``text`` | reports an error of a card; 79 also takes it off the bus |
| ``users`` | ``pci``, ``users`` | says who else has it open (``pid``, ``name``, ``memory_mib``) |
| ``next-majors`` | ``majors`` | majors from the next boot on, by name; others as the kernel chooses |
| ``secure-boot`` | ``on``, ``keys`` | refuses modules signed by others than the distribution or ``keys`` |
| ``refuse-drivers`` | ``versions`` | NVIDIA's module of these versions fails to initialise any card |
| ``hang`` | ``on`` | lets nvidia-smi hang in the kernel, or what hangs go |
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mfusepy

from tests.lab import boot, control
from tests.lab.machine import Caller, Driver, Function, Gpu, LoadedModule, Machine, machine_devices, refuse

PAGE = 4096


@dataclass
class File:
    """A file: what reading gives, what writing does, and what holding it open means."""

    read: Callable[[], bytes | str] | None = None
    write: Callable[[bytes, Caller], None] | None = None
    hold: Callable[[Caller], int] | None = None
    mode: int = 0o444
    size: int = PAGE

    @classmethod
    def of(cls, text: str, mode: int = 0o444) -> File:
        """Make a file that only says this."""
        return cls(lambda: text, mode=mode)


@dataclass
class Link:
    """A symbolic link."""

    target: str


@dataclass
class Folder:
    """A folder, its entries made when they are looked at."""

    entries: Callable[[], Mapping[str, Node]]
    hidden: Callable[[], Mapping[str, Node]] = dict


Node = File | Link | Folder


def write_only(write: Callable[[str, Caller], None]) -> File:
    """Make a sysfs file that takes a line from root."""
    return File(write=lambda data, caller: write(data.decode(errors="replace"), caller), mode=0o200)


class Host:
    """One machine as files."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def root(self) -> Folder:
        """Return the host's folder."""
        return Folder(
            lambda: {
                "bus-pci": Folder(self._bus),
                "iommu_groups": Folder(self._iommu_groups),
                "module": Folder(self._modules),
                "proc-driver": Folder(self._proc_driver),
                "proc-devices": File(self._devices, size=0),
                "proc-modules": File(self._proc_modules, size=0),
                "proc-version": File(lambda: f"{self._machine.banner}\n", size=0),
                "proc-osrelease": File(lambda: f"{self._machine.release}\n", size=0),
                "firmware": Folder(self._firmware),
                "control": Folder(self._control),
            }
        )

    # /sys/firmware

    def _firmware(self) -> dict[str, Node]:
        """Return what an EFI firmware shows; a variable's content comes after four bytes of attributes."""
        machine = self._machine
        secure_boot = File(lambda: b"\6\0\0\0" + bytes([machine.secure_boot]), size=5)
        variables: dict[str, Node] = {"SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c": secure_boot}
        efi: dict[str, Node] = {"efivars": Folder(lambda: variables), "fw_platform_size": File.of("64\n")}
        return {"efi": Folder(lambda: efi)}

    # /sys/bus/pci

    def _bus(self) -> dict[str, Node]:
        machine = self._machine
        return {
            "devices": Folder(lambda: {name: self._device(each) for name, each in machine.functions.items()}),
            "drivers": Folder(lambda: {name: self._driver(each) for name, each in machine.drivers.items()}),
            "drivers_autoprobe": File.of("1\n", 0o644),
            "drivers_probe": write_only(machine.drivers_probe),
            "slots": Folder(dict),
        }

    def _driver(self, driver: Driver) -> Folder:
        machine = self._machine

        def entries() -> dict[str, Node]:
            bound = [each for each in machine.functions.values() if each.linked and each.driver is driver]
            links = {each.address: Link(f"../../devices/{each.address}") for each in bound}
            module = {"module": Link(f"../../../../module/{driver.module}")} if driver.module else {}
            return {
                **links,
                **module,
                "bind": write_only(lambda text, caller: machine.bind(driver, text, caller)),
                "unbind": write_only(lambda text, caller: machine.unbind(driver, text, caller)),
                "new_id": write_only(lambda text, _caller: machine.new_id(driver, text)),
                "remove_id": write_only(lambda text, _caller: machine.remove_id(driver, text)),
                "uevent": File(mode=0o200),
            }

        return Folder(entries)

    def _device(self, function: Function) -> Folder:
        machine = self._machine
        is_lost = function.gpu is not None and function.gpu.lost

        def entries() -> dict[str, Node]:
            files: dict[str, Node] = {
                "class": File.of(f"0x{function.kind:06x}\n"),
                "config": File(lambda: configuration(function), mode=0o644),
                "current_link_speed": File.of("Unknown\n" if is_lost else f"{function.link_speed}\n"),
                "current_link_width": File.of("63\n" if is_lost else f"{function.link_width}\n"),
                "device": File.of(f"0x{function.device:04x}\n"),
                "driver_override": File(
                    lambda: f"{function.override or '(null)'}\n",
                    lambda data, caller: machine.set_override(function, data.decode(errors="replace"), caller),
                    mode=0o644,
                ),
                "enable": File.of(f"{int(function.driver is not None)}\n", 0o644),
                "iommu_group": Link(f"../../../../kernel/iommu_groups/{function.iommu_group}"),
                "irq": File.of(f"{irq(function)}\n"),
                "local_cpulist": File.of("0-31\n"),
                "max_link_speed": File.of(f"{function.link_speed}\n"),
                "max_link_width": File.of(f"{function.max_link_width}\n"),
                "modalias": File.of(f"{function.modalias}\n"),
                "numa_node": File.of(f"{function.numa_node}\n", 0o644),
                "power_state": File.of("D0\n"),
                "resource": File.of("0x0000000000000000 0x0000000000000000 0x0000000000000000\n" * 7),
                "revision": File.of(f"0x{function.revision:02x}\n"),
                "subsystem": Link("../../../../bus/pci"),
                "subsystem_device": File.of(f"0x{function.subdevice:04x}\n"),
                "subsystem_vendor": File.of(f"0x{function.subvendor:04x}\n"),
                "uevent": File(lambda: uevent(function), mode=0o644),
                "vendor": File.of(f"0x{function.vendor:04x}\n"),
            }
            if function.linked and function.driver:
                files["driver"] = Link(f"../../../../bus/pci/drivers/{function.driver.name}")
            if function.kind >> 16 == 0x03:
                files["boot_vga"] = File.of("0\n")
            return {**files, **self._device_links(function)}

        return Folder(entries)

    def _device_links(self, function: Function) -> dict[str, Node]:
        """Return the links between a GPU and its companions (the audio function is a consumer of the GPU's power)."""
        slot, _, number = function.address.rpartition(".")
        links: dict[str, Node] = {}
        for other in self._machine.functions.values():
            if other is function or not other.address.startswith(f"{slot}."):
                continue
            if number == "0":
                pair, name = f"pci:{function.address}--pci:{other.address}", f"consumer:pci:{other.address}"
            elif other.address.endswith(".0"):
                pair, name = f"pci:{other.address}--pci:{function.address}", f"supplier:pci:{other.address}"
            else:
                continue
            links[name] = Link(f"../../../virtual/devlink/{pair}")
        return links

    def _iommu_groups(self) -> dict[str, Node]:
        groups: dict[int, list[str]] = {}
        for function in self._machine.functions.values():
            groups.setdefault(function.iommu_group, []).append(function.address)

        def group(members: list[str]) -> Folder:
            links = {each: Link(f"../../../../bus/pci/devices/{each}") for each in members}
            return Folder(
                lambda: {
                    "devices": Folder(lambda: links),
                    "reserved_regions": File.of("0x00000000fee00000 0x00000000feefffff msi\n"),
                    "type": File.of("DMA\n", 0o644),
                }
            )

        return {str(number): group(members) for number, members in sorted(groups.items())}

    # Modules

    def _modules(self) -> dict[str, Node]:
        return {name: self._module(each) for name, each in self._machine.modules.items()}

    def _module(self, module: LoadedModule) -> Folder:
        machine = self._machine
        names = machine.holders(module.name)
        drivers = [each.name for each in machine.drivers.values() if each.module == module.name]
        files: dict[str, Node] = {
            "coresize": File.of(f"{module.size}\n"),
            "drivers": Folder(lambda: {f"pci:{each}": Link(f"../../../bus/pci/drivers/{each}") for each in drivers}),
            "holders": Folder(lambda: {each: Link(f"../../{each}") for each in names}),
            "initsize": File.of("0\n"),
            "initstate": File.of("live\n"),
            "refcnt": File(lambda: f"{machine.references(module.name)}\n"),
            "srcversion": File.of(f"{module.srcversion}\n"),
            "taint": File.of(f"{module.taint}\n"),
            "uevent": File(mode=0o200),
        }
        if module.version:
            files["version"] = File.of(f"{module.version}\n")
        return Folder(lambda: files)

    def _proc_modules(self) -> str:
        machine, lines = self._machine, []
        for module in reversed(machine.modules.values()):
            holders = "".join(f"{each}," for each in machine.holders(module.name)) or "-"
            taint = f" ({module.taint})" if module.taint else ""
            references = machine.references(module.name)
            lines.append(f"{module.name} {module.size} {references} {holders} Live 0x0000000000000000{taint}\n")
        return "".join(lines)

    def _devices(self) -> str:
        """Return /proc/devices: what the machine has, and what this host's kernel has besides."""
        with open("/proc/devices") as file:
            blocks = file.read().partition("\n\n")[2]
        known = [(major, 0, name) for major, name in machine_devices()]
        lines = sorted((*known, *self._machine.character_devices), key=lambda each: each[:2])
        return "Character devices:\n" + "".join(f"{major:3} {name}\n" for major, _, name in lines) + "\n" + blocks

    # NVIDIA

    def _proc_driver(self) -> dict[str, Node]:
        if "nvidia" not in self._machine.modules:
            return {}
        capability = "DeviceFileMinor: {}\nDeviceFileMode: {}\nDeviceFileModify: 1\n"
        empty = {"permissions": File.of(capability.format(0, 438))}
        return {
            "nvidia": Folder(self._nvidia, lambda: {".lab": Folder(self._nvidia_lab)}),
            "nvidia-caps": Folder(lambda: {"mig-minors": File.of("config 1\nmonitor 2\n", 0o444)}),
            "nvidia-nvlink": Folder(lambda: empty),
            "nvidia-nvswitch": Folder(lambda: empty),
        }

    def _nvidia(self) -> dict[str, Node]:
        machine = self._machine
        module = machine.modules.get("nvidia")
        if module is None:
            return {}
        capability = "DeviceFileMinor: {}\nDeviceFileMode: {}\nDeviceFileModify: 1\n"
        compiler = "gcc version 12.2.0 (Debian 12.2.0-14+deb12u1) "
        mig = {"config": File.of(capability.format(1, 0o400)), "monitor": File.of(capability.format(2, 0o444))}
        parameters = "".join(f"{name}: {value}\n" for name, value in machine.nvidia_parameters().items())
        return {
            "capabilities": Folder(lambda: {"mig": Folder(lambda: mig)}),
            "gpus": Folder(lambda: {each.address: Folder(self._gpu(each, module)) for each in machine.cards()}),
            "params": File.of(parameters),
            "registry": File.of('Binary: ""\n', 0o644),
            "version": File.of(f"NVRM version: {machine.nvidia_identity(module)}\nGCC version:  {compiler}\n"),
        }

    def _gpu(self, function: Function, module: LoadedModule) -> Callable[[], dict[str, Node]]:
        gpu = function.gpu
        assert gpu is not None

        def information() -> str:
            firmware = module.version if module.is_open else "N/A"
            rows = [
                ("Model:", f"\t {gpu.name}"),
                ("IRQ:  ", f"\t {irq(function)}"),
                *([("GPU UUID:", f" {gpu.uuid}")] if gpu.initialised else []),
                ("Video BIOS:", f" {gpu.vbios.lower() if gpu.initialised else '??.??.??.??.??'}"),
                ("Bus Type:", f" {'PCI' if gpu.lost else 'PCIe'}"),
                ("DMA Size:", " 47 bits"),
                ("DMA Mask:", " 0x7fffffffffff"),
                ("Bus Location:", f" {function.address}"),
                ("Device Minor:", f" {gpu.minor}"),
                ("GPU Firmware:", f" {firmware}"),
            ]
            return "".join(f"{key} \t{value}\n" for key, value in rows) + "GPU Excluded:\t No\n"

        return lambda: {
            "information": File(information),
            "registry": File.of('Binary: ""\n', 0o644),
            "power": File.of("Runtime D3 status:          Disabled by default\nVideo Memory:               Active\n"),
        }

    def _nvidia_lab(self) -> dict[str, Node]:
        """Return what the driver's stand-ins ask. They have asked the nodes' own rules before."""
        return {
            "cards": File(lambda: json.dumps(self._cards())),
            "hang": File(self._hang),
            "log": File(write=lambda data, _caller: self._machine.print(*data.decode().splitlines()), mode=0o666),
            "persistence": File(write=self._set_persistence, mode=0o666),
            "open": Folder(self._nodes),
        }

    def _nodes(self) -> dict[str, Node]:
        machine = self._machine
        names = ["nvidiactl", "nvidia-uvm", *(f"nvidia{each.gpu.minor}" for each in machine.cards() if each.gpu)]
        return {name: self._held(name) for name in names}

    def _held(self, node: str) -> File:
        machine = self._machine
        return File(
            read=lambda: "",
            write=lambda _data, _caller: None,
            hold=lambda caller: machine.open_node(node, caller.pid_in_host(), command(caller.pid)),
            mode=0o666,
        )

    def _cards(self) -> dict[str, Any]:
        machine = self._machine
        module = machine.modules["nvidia"]

        def card(function: Function, gpu: Gpu) -> dict[str, Any]:
            users = [asdict(each) for each in machine.users(function)]
            memory = gpu.memory_used_mib + sum(each["memory_mib"] for each in users)
            identity = (
                f"{function.device:04X}{function.vendor:04X}",
                f"{function.subdevice:04X}{function.subvendor:04X}",
            )
            return {
                **asdict(gpu),
                "address": function.address,
                "class": f"{function.kind:06x}",
                "pci_id": identity[0],
                "pci_subsystem_id": identity[1],
                "link_width": function.link_width,
                "max_link_width": function.max_link_width,
                "link_speed": function.link_speed,
                "users": users,
                "memory_used_mib": memory,
            }

        cards = [card(each, each.gpu) for each in machine.cards() if each.gpu]
        return {"version": module.version, "open": module.is_open, "hung": machine.hung, "cards": cards}

    def _hang(self) -> str:
        """Answer only when the fault is taken back or the power cut: not even SIGKILL ends who waits here."""
        machine = self._machine
        with machine.changed:
            epoch, machine.hung = machine.epoch, True
            machine.changed.wait_for(lambda: machine.epoch is not epoch or not machine.hung)
        raise refuse(errno.EIO)

    def _set_persistence(self, data: bytes, _caller: Caller) -> None:
        address, _, on = data.decode().strip().partition(" ")
        with self._machine.changed:
            gpu = self._machine.function(address).gpu
            if gpu is None:
                raise refuse(errno.ENODEV)
            gpu.persistence = on == "1"

    # For the stand-ins of kmod, dmesg and QEMU

    def _control(self) -> dict[str, Node]:
        machine = self._machine
        vfio = [each.address for each in machine.functions.values() if each.driver and each.driver.name == "vfio-pci"]
        return {
            "release": File(lambda: f"{machine.release}\n", size=0),
            "modules": File(self._proc_modules, size=0),
            "keys": File(lambda: "".join(f"{key}\n" for key in sorted(machine.enrolled_keys)), size=0),
            "kmsg": File(machine.log_text, size=0),
            "insmod": File(write=self._insert, mode=0o200),
            "rmmod": File(write=lambda data, caller: machine.remove(data.decode(), caller), mode=0o200),
            "open": Folder(lambda: {f"vfio-{each}": self._held(f"vfio-{each}") for each in vfio}),
        }

    def _insert(self, data: bytes, caller: Caller) -> None:
        """Load a module: its arguments, a zero byte, and its image."""
        arguments, _, image = data.partition(b"\0")
        self._machine.insert(image, arguments.decode(), caller)


def command(pid: int) -> str:
    """Return the name that a process goes by."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def irq(function: Function) -> int:
    """Return an interrupt's number: any will do, but always the same."""
    return 32 + int(function.address.split(":")[1], 16)


def uevent(function: Function) -> str:
    """Return what a device says of itself to udev."""
    driver = f"DRIVER={function.driver.name}\n" if function.linked and function.driver else ""
    return (
        f"{driver}PCI_CLASS={function.kind:X}\nPCI_ID={function.vendor:04X}:{function.device:04X}\n"
        f"PCI_SUBSYS_ID={function.subvendor:04X}:{function.subdevice:04X}\n"
        f"PCI_SLOT_NAME={function.address}\nMODALIAS={function.modalias}\n"
    )


def configuration(function: Function) -> bytes:
    """Return the head of the configuration space; a card that fell off the bus answers all ones."""
    if function.gpu and function.gpu.lost:
        return b"\xff" * 256
    space = bytearray(256)
    space[0:2] = function.vendor.to_bytes(2, "little")
    space[2:4] = function.device.to_bytes(2, "little")
    space[4:6] = (0x0407 if function.driver else 0x0000).to_bytes(2, "little")
    space[8] = function.revision
    space[9:12] = function.kind.to_bytes(3, "little")
    space[14] = 0x80 if function.gpu else 0
    space[0x2C:0x2E] = function.subvendor.to_bytes(2, "little")
    space[0x2E:0x30] = function.subdevice.to_bytes(2, "little")
    return bytes(space)


@dataclass
class Opened:
    """An open file: what was read when its reading began, and what is held with it."""

    node: File
    content: bytes | None = None
    held: tuple[Machine, int] | None = None


@dataclass
class Kernels(mfusepy.Operations):  # type: ignore[misc]
    """The file system of a lab."""

    machines: Mapping[str, Machine]
    use_ns: bool = True
    _opened: dict[int, Opened] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self._root = Folder(lambda: {name: Host(machine).root() for name, machine in self.machines.items()})
        self._started = time.time_ns()

    def _find(self, path: str) -> Node:
        parts = [part for part in path.split("/") if part]
        node: Node = self._root
        machine = self.machines.get(parts[0]) if parts else None
        with machine.changed if machine else threading.Lock():
            if machine and not machine.on and len(parts) > 2:
                raise refuse(errno.ENOENT)
            for part in parts:
                if not isinstance(node, Folder):
                    raise refuse(errno.ENOTDIR)
                found = node.entries().get(part) or node.hidden().get(part)
                if found is None:
                    raise refuse(errno.ENOENT)
                node = found
        return node

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        """Return a node's attributes: all is root's."""
        match self._find(path):
            case Folder():
                mode, size = stat.S_IFDIR | 0o755, 0
            case Link(target):
                mode, size = stat.S_IFLNK | 0o777, len(target)
            case File() as file:
                mode, size = stat.S_IFREG | file.mode, file.size
        times = dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), self._started)
        return {"st_mode": mode, "st_size": size, "st_nlink": 1, "st_uid": 0, "st_gid": 0, **times}

    def readdir(self, path: str, fh: int) -> list[str]:
        """List a folder."""
        folder = self._find(path)
        if not isinstance(folder, Folder):
            raise refuse(errno.ENOTDIR)
        parts = [part for part in path.split("/") if part]
        if len(parts) == 2 and not self.machines[parts[0]].on:
            return [".", ".."]  # without power there is nothing but what a bind mount needs to be bound
        return [".", "..", *folder.entries()]

    def readlink(self, path: str) -> str:
        """Return a link's target."""
        link = self._find(path)
        if not isinstance(link, Link):
            raise refuse(errno.EINVAL)
        return link.target

    def open(self, path: str, flags: int) -> int:
        """Open a file."""
        file = self._find(path)
        if not isinstance(file, File):
            raise refuse(errno.EISDIR)
        opened = Opened(file)
        if file.hold:
            machine = self.machines[path.split("/")[1]]
            opened.held = machine, file.hold(Caller(mfusepy.fuse_get_context()[2]))
        number = next(self._numbers)
        self._opened[number] = opened
        return number

    def release(self, path: str, fh: int) -> int:
        """Close a file."""
        opened = self._opened.pop(fh)
        if opened.held:
            machine, handle = opened.held
            machine.close_node(handle)
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Read: the content is made anew when a reading begins."""
        opened = self._opened[fh]
        if opened.content is None or offset == 0:
            if opened.node.read is None:
                raise refuse(errno.EIO)
            content = opened.node.read()
            opened.content = content.encode() if isinstance(content, str) else content
        return opened.content[offset : offset + size]

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        """Write: each write is one command, wherever it goes."""
        write = self._opened[fh].node.write
        if write is None:
            raise refuse(errno.EIO)
        write(data, Caller(mfusepy.fuse_get_context()[2]))
        return len(data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        """Accept what a shell's ``>`` does first."""
        return 0

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        """Refuse: nobody makes files here."""
        raise refuse(errno.EACCES)

    def mkdir(self, path: str, mode: int) -> int:
        """Refuse, like sysfs."""
        raise refuse(errno.EPERM)

    def unlink(self, path: str) -> int:
        """Refuse, like sysfs."""
        raise refuse(errno.EPERM)

    rmdir = unlink


def answer(machines: Mapping[str, Machine], state: Path, request: control.Request) -> Any:
    """Do what a line on the control socket asks: see above."""
    machine = machines[request["host"]]
    match request["op"]:
        case "power":
            _power(machine, state, on=request["on"])
        case "state":
            return _state(machine)
        case "links":
            return [asdict(each) for each in machine.link_changes]
        case "dmesg":
            return machine.log_text()
        case "print":
            machine.print(*request["lines"])
        case "plug":
            machine.plug(request["card"])
        case "unplug":
            machine.unplug(request["pci"])
        case "move":
            machine.move(request["pci"], request["slot"])
        case "xid":
            machine.xid(request["pci"], request["xid"], request["text"])
        case "set":
            _set(machine, request)
        case "users":
            machine.set_users(request["pci"], request["users"])
        case "next-majors":
            machine.next_majors = request["majors"]
        case "secure-boot":
            machine.secure_boot = request["on"]
            machine.trusted_keys |= set(request.get("keys", []))
        case "refuse-drivers":
            machine.refused_drivers = set(request["versions"])
        case "hang":
            with machine.changed:
                machine.hung = request["on"]
                machine.changed.notify_all()
        case other:
            raise ValueError(f"no such operation: {other}")
    return None


def _power(machine: Machine, state: Path, *, on: bool) -> None:
    if not on:
        machine.power_off()
        return
    root = state / "hosts" / machine.name / "rootfs"
    if machine.boots == 0:
        machine.power_on_first()
    else:
        boot.boot(machine, root)


def _set(machine: Machine, request: control.Request) -> None:
    """Change what a card is or what is measured on it."""
    with machine.changed:
        function = machine.function(request["pci"])
        for name, value in request["values"].items():
            owner = function.gpu if function.gpu and hasattr(function.gpu, name) else function
            if not hasattr(owner, name):
                raise ValueError(f"a card has no {name}")
            setattr(owner, name, value)
        machine.changed.notify_all()


def _state(machine: Machine) -> dict[str, Any]:
    """Return the hidden truth."""
    with machine.changed:
        return {
            "on": machine.on,
            "release": machine.release,
            "modules": {name: asdict(each) for name, each in machine.modules.items()},
            "majors": {name: major for major, _, name in machine.character_devices},
            "hung": machine.hung,
            "opens": [asdict(each) for each in machine.opens.values()],
            "functions": {
                address: {
                    "driver": each.driver.name if each.driver else None,
                    "linked": each.linked,
                    "override": each.override,
                    "removing": each.removing,
                    "gpu": asdict(each.gpu) if each.gpu else None,
                }
                for address, each in machine.functions.items()
            },
        }


def main() -> None:
    """Serve the kernels of the hosts that JSON on standard input describes, by name."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--state", type=Path, required=True, help="the lab's state directory")
    arguments = parser.parse_args()
    descriptions = json.load(sys.stdin)
    machines = {name: Machine(name, description) for name, description in descriptions.items()}
    mountpoint = arguments.state / "kernel"
    mountpoint.mkdir(parents=True, exist_ok=True)
    socket = arguments.state / "control/kernel.sock"
    socket.parent.mkdir(exist_ok=True)
    control.serve(socket, lambda request: answer(machines, arguments.state, request))
    mfusepy.FUSE(
        Kernels(machines),
        str(mountpoint),
        foreground=True,
        allow_other=True,
        default_permissions=True,
        direct_io=True,
        big_writes=True,
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
        fsname="lab-kernel",
    )


if __name__ == "__main__":
    main()
