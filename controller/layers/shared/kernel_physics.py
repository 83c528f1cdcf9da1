"""How a simulated machine's kernel behaves: modules and their majors, PCI drivers, device nodes, power.

Written from how Linux and NVIDIA's driver do it (docs/simulated-fleet.md names each source), never from what the
controller's actions hope for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from controller.layers.shared.truth import NVIDIA_MAJOR, File, Fleet, Function, Host, Module, Node, Session

# Majors seen for NVIDIA's dynamic devices in the wild; alloc_chrdev_region gives any that is free
_DYNAMIC_MAJORS = (234, 235, 238, 239, 240, 241, 242, 243, 504, 505, 506, 507, 508, 509, 510, 511)
_REGISTERS = {
    "nvidia": ("nvidia", "nvidiactl", "nvidia-caps", "nvidia-nvlink", "nvidia-nvswitch"),
    "nvidia-uvm": ("nvidia-uvm",),
    "nvidia-modeset": ("nvidia-modeset",),
}
_FIXED = ("nvidia", "nvidiactl", "nvidia-modeset")  # of NVIDIA_MAJOR
_CTL_MINOR, _MODESET_MINOR = 255, 254
_GPU_CLASSES = ("0300", "0302")


class Hang(Exception):  # noqa: N818 - what the process does
    """The call never comes back: the process waits in the kernel."""


# --- files -----------------------------------------------------------------------------------------------------------


def write(fleet: Fleet, host: Host, path: str, text: str, mode: int = 0o644) -> str:
    """Write a file of the host's own (not of its cluster). Returns the error's text, empty when it is written."""
    if host.disk_full and not path.startswith("/run/"):
        return "No space left on device"
    host.files[path] = File(text, mode, int(fleet.now))
    fleet.touch(host)
    return ""


def is_directory(host: Host, path: str) -> bool:
    """Whether a directory is there: named itself, or implied by something in it."""
    below = path.rstrip("/") + "/"
    known = (host.files, host.dev, host.directories)
    return path in host.directories or any(one.startswith(below) for names in known for one in names)


def _lines(host: Host, folder: str) -> Iterator[str]:
    """The lines of a configuration folder's ``*.conf`` files, in order of their names, comments left out."""
    for path in sorted(host.files):
        if path.startswith(folder + "/") and path.endswith(".conf"):
            for line in host.files[path].text.splitlines():
                if line.strip() and not line.lstrip().startswith(("#", ";")):
                    yield line.strip()


# --- modules ---------------------------------------------------------------------------------------------------------


def load_module(fleet: Fleet, host: Host, name: str) -> str:
    """``modprobe NAME``. Returns what it says on failure, empty when the module is loaded.

    nvidia takes every driverless NVIDIA GPU whose override does not name another driver, and fails when there is
    none for it (open-gpu-kernel-modules nv.c: ENODEV, "No NVIDIA devices probed").
    """
    if name in host.loaded:
        return ""
    installed = host.modules.get(host.kernel, {}).get(name)
    if installed is None and name != "vfio-pci":
        return f"modprobe: FATAL: Module {name} not found in directory /lib/modules/{host.kernel}"
    if installed is not None and name.startswith("nvidia"):
        if host.secure_boot and installed.signer not in host.enrolled_keys:
            return f"modprobe: ERROR: could not insert '{name}': Key was rejected by service"
        if failure := host.module_failures.get(f"{installed.version} {installed.flavour}"):
            return f"modprobe: ERROR: could not insert '{name}': {failure}"
    if name == "nvidia":
        for line in _lines(host, "/etc/modprobe.d"):
            if re.match(r"softdep\s+nvidia\s+pre:.*\bvfio-pci\b", line):
                load_module(fleet, host, "vfio-pci")
    if name == "nvidia-uvm":
        failed = load_module(fleet, host, "nvidia")
        if failed:
            return failed
    host.loaded[name] = installed or Module()
    fleet.touch(host)
    if name.startswith("nvidia"):
        _register_majors(fleet, host, name)
    for address in list(host.functions):
        _probe_with(host, address, name)
    if name == "nvidia" and not any(f.driver == "nvidia" for f in host.functions.values()):
        unload_module(fleet, host, "nvidia")
        return f"modprobe: ERROR: could not insert '{name}': No such device"
    return ""


def unload_module(fleet: Fleet, host: Host, name: str) -> str:
    """``rmmod NAME``. Returns what it says on failure."""
    if name not in host.loaded:
        return f"rmmod: ERROR: Module {name} is not currently loaded"
    users = [module for module in host.loaded if name == "nvidia" and module.startswith("nvidia-")]
    if users:
        return f"rmmod: ERROR: Module nvidia is in use by: {' '.join(users).replace('-', '_')}"
    held = [f for f in host.functions.values() if f.driver == name]
    if any(f.gpu is not None and f.gpu.used_by for f in held):
        return f"rmmod: ERROR: Module {name} is in use"
    for function in held:
        _release(function)
    del host.loaded[name]
    for registered in [known for known in host.majors if _registers(name, known)]:
        del host.majors[registered]
    if name == "nvidia":
        host.smi_says = ""
    fleet.touch(host)
    return ""


def _registers(module: str, name: str) -> bool:
    """Whether a character device is the module's: what is not another NVIDIA module's is nvidia's."""
    own = next((m for m in ("nvidia-uvm", "nvidia-modeset") if name.startswith(m)), "nvidia")
    return module == own


def _register_majors(fleet: Fleet, host: Host, module: str) -> None:
    """Give the module's character devices their majors: 195 is fixed, the others are whatever is free."""
    for name in _REGISTERS.get(module, ()):
        if name in _FIXED:
            host.majors[name] = NVIDIA_MAJOR
            continue
        taken = {*host.majors.values(), *(int(line.split()[0]) for line in host.character_devices)}
        free = [major for major in _DYNAMIC_MAJORS if major not in taken and major != host.last_majors.get(name)]
        host.majors[name] = host.last_majors[name] = fleet.draw(host, free)


def ticks(host: Host, when: float) -> int:
    """A time in the kernel's clock ticks, hundredths of a second since boot."""
    return round((when - host.booted) * 100)


def initialise(fleet: Fleet, host: Host) -> None:
    """What the first user of the cards brings about: they tell their UUIDs from then on."""
    for function in host.functions.values():
        if function.gpu is not None and function.driver == "nvidia" and not function.gpu.initialised:
            function.gpu.initialised = True
            fleet.touch(host)


def proc_devices(host: Host) -> list[tuple[int, str]]:
    """The character devices of ``/proc/devices``, in its order."""
    others = [(int(major), name) for major, name in (line.split(" ", 1) for line in host.character_devices)]
    return sorted([*others, *((major, name) for name, major in host.majors.items())], key=lambda device: device[0])


# --- PCI -------------------------------------------------------------------------------------------------------------


def _matches(host: Host, function: Function, driver: str) -> bool:
    """Whether the driver would take the function when it is asked to probe it."""
    if function.override is not None:
        return function.override == driver
    if driver in ("nvidia", "nouveau"):
        return function.vendor == "10de" and function.pci_class[:4] in _GPU_CLASSES
    if driver == "vfio-pci":
        return f"{function.vendor}:{function.device}" in {*_vfio_ids(host), *host.new_ids}
    if driver == "snd_hda_intel":
        return function.pci_class[:4] == "0403"
    return False


def _vfio_ids(host: Host) -> list[str]:
    """``options vfio-pci ids=``: of several such lines the last one counts."""
    ids: list[str] = []
    for line in _lines(host, "/etc/modprobe.d"):
        match = re.match(r"options\s+vfio[-_]pci\s.*\bids=(\S+)", line)
        if match:
            ids = match[1].lower().split(",")
    return ids


def _probe_with(host: Host, address: str, driver: str) -> None:
    """Let a loaded driver look at a function that has none."""
    function = host.functions[address]
    if function.driver is not None or driver not in host.loaded or not _matches(host, function, driver):
        return
    if driver == "nvidia" and function.gpu is not None:
        if function.gpu.lost:
            return  # "fallen off the bus and is not responding to commands": the probe routine fails
        function.gpu.minor = _first_free_minor(host)
    function.driver = driver


def _first_free_minor(host: Host) -> int:
    """Minors are handed out in the order of probing, the first free one each (open-gpu-kernel-modules nv.c)."""
    taken = {f.gpu.minor for f in host.functions.values() if f.gpu is not None}
    return next(minor for minor in range(248) if minor not in taken)


def probe(fleet: Fleet, host: Host, address: str) -> None:
    """``echo ADDRESS > /sys/bus/pci/drivers_probe``."""
    for driver in list(host.loaded):
        _probe_with(host, address, driver)
    fleet.touch(host)


def unbind(fleet: Fleet, host: Host, address: str) -> None:
    """``echo ADDRESS > .../driver/unbind``. Raises Hang while nvidia has the card in use (nv-pci.c waits in a loop)."""
    function = host.functions[address]
    if function.driver == "nvidia" and function.gpu is not None and function.gpu.used_by:
        raise Hang(f"NVRM: Attempting to remove device {address} with non-zero usage count!")
    _release(function)
    fleet.touch(host)


def _release(function: Function) -> None:
    function.driver = None
    if function.gpu is not None:
        function.gpu.minor, function.gpu.initialised = None, False


def lose_card(fleet: Fleet, host: Host, address: str) -> None:
    """The GPU falls off the bus (Xid 79): it stays bound and answers nobody."""
    gpu = host.functions[address].gpu
    if gpu is None:
        raise ValueError(f"{address} is no GPU")
    gpu.lost = True
    fleet.touch(host)


# --- device nodes ----------------------------------------------------------------------------------------------------


def make_gpu_nodes(fleet: Fleet, host: Host, *, uvm: bool) -> None:
    """What nvidia-modprobe does for nvidia-smi and CUDA: nodes are made by userspace, udev makes none.

    A node of the wrong type or number is removed and made anew. ``uvm`` is ``nvidia-modprobe -u``, which loads
    nvidia-uvm too; without it no ``/dev/nvidia-uvm`` appears.
    """
    if "nvidia" not in host.loaded:
        return
    wanted = {"/dev/nvidiactl": Node(NVIDIA_MAJOR, _CTL_MINOR)}
    if "nvidia-modeset" in host.loaded:
        wanted["/dev/nvidia-modeset"] = Node(NVIDIA_MAJOR, _MODESET_MINOR)
    for function in host.functions.values():
        if function.gpu is not None and function.gpu.minor is not None:
            wanted[f"/dev/nvidia{function.gpu.minor}"] = Node(NVIDIA_MAJOR, function.gpu.minor)
    wanted["/dev/nvidia-caps/nvidia-cap1"] = Node(host.majors["nvidia-caps"], 1, 0o400)
    wanted["/dev/nvidia-caps/nvidia-cap2"] = Node(host.majors["nvidia-caps"], 2, 0o444)
    if uvm and not load_module(fleet, host, "nvidia-uvm"):
        wanted["/dev/nvidia-uvm"] = Node(host.majors["nvidia-uvm"], 0)
        wanted["/dev/nvidia-uvm-tools"] = Node(host.majors["nvidia-uvm"], 1)
    if any(host.dev.get(path) != node for path, node in wanted.items()):
        host.dev.update(wanted)
        fleet.touch(host)


def serves(host: Host, node: Node) -> bool:
    """Whether a driver answers behind a device node; if not, opening it gives ``No such device or address``."""
    if node.major == NVIDIA_MAJOR:
        if node.minor == _CTL_MINOR:
            return "nvidia" in host.loaded
        return any(f.gpu is not None and f.gpu.minor == node.minor for f in host.functions.values())
    return node.major in {major for name, major in host.majors.items() if major != NVIDIA_MAJOR}


# --- power -----------------------------------------------------------------------------------------------------------


def power_off(fleet: Fleet, host: Host) -> None:
    """Cut the power: what is not on a disk is gone. The caller tells the cluster."""
    host.powered = False
    host.loaded.clear()
    host.majors.clear()
    host.containers.clear()
    host.machines.clear()
    host.session = Session()
    host.dev.clear()
    host.new_ids.clear()
    host.lease = None
    host.smi_hung_since, host.smi_says = None, ""
    for path in [path for path in host.files if path.startswith(("/run/", "/proc/", "/sys/"))]:
        del host.files[path]
    for function in host.functions.values():
        _release(function)
        function.override = None
        if function.gpu is not None:
            function.gpu.used_by.clear()
    for unit in filter(None, (host.step, *host.jobs.values())):
        if unit.runs:
            unit.how = "interrupted"
    fleet.touch(host)


def boot(fleet: Fleet, host: Host) -> None:
    """Start the kernel and what loads before any guest. Guests are started by whoever knows of them.

    Modules named in ``modules-load.d`` or ``/etc/modules`` load first; then udev loads, for each card's alias, nvidia
    or else nouveau where it is installed and no blacklist names it. nvidia-uvm is loaded by its name or on demand only.
    """
    host.powered = True
    host.boots += 1
    host.boot_id = fleet.draw_id(host)
    host.booted = fleet.now
    host.kernel = next_kernel(host)
    _run_initramfs(fleet, host)
    if "/etc/systemd/system/sysinit.target.wants/reconcile-gpus.service" in host.files:
        _gpu_unit(fleet, host)
    early = list(_lines(host, "/etc/modules-load.d"))
    if "/etc/modules" in host.files:
        early += [line.strip() for line in host.files["/etc/modules"].text.splitlines() if line.strip()]
    for name in early:
        if not name.startswith("#"):
            load_module(fleet, host, name.replace("_", "-"))
    blacklisted = {line.split()[1] for line in _lines(host, "/etc/modprobe.d") if line.startswith("blacklist ")}
    for name in ("nvidia", "nouveau"):
        if name not in blacklisted and _has_gpu(host):
            load_module(fleet, host, name)
    if host.persistenced and host.userspace:
        make_gpu_nodes(fleet, host, uvm="nvidia-uvm" in host.loaded)
    fleet.touch(host)


def next_kernel(host: Host) -> str:
    """The kernel that would boot: pinned for once or for good, the one that is said to be next, else the newest."""
    known = installed_kernels(host)
    for name in ("next-boot-pin", "proxmox-boot-pin"):
        pin = host.files.get(f"/etc/kernel/{name}")
        if pin is not None and pin.text.strip() in known:
            return pin.text.strip()
    return host.next_kernel or max(known, key=lambda kernel: [int(n) for n in re.findall(r"\d+", kernel)])


def installed_kernels(host: Host) -> list[str]:
    """The kernels that lie in /boot."""
    return sorted({host.kernel, *host.kernels, *([host.next_kernel] if host.next_kernel else [])})


def _run_initramfs(fleet: Fleet, host: Host) -> None:
    """Before there is a root file system, nouveau loads for a card if it is in the initramfs and not kept off there."""
    image = host.initramfs.get(host.kernel)
    if image is None or "nouveau" not in image.modules or not _has_gpu(host):
        return
    lines = [line.split() for text in image.modprobe.values() for line in text.splitlines()]
    if ["blacklist", "nouveau"] not in lines:
        load_module(fleet, host, "nouveau")


def _has_gpu(host: Host) -> bool:
    return any(f.vendor == "10de" and f.pci_class[:4] in _GPU_CLASSES for f in host.functions.values())


# --- a unit that binds cards before modules are loaded by name and by udev -----------------------------------------


def _gpu_unit(fleet: Fleet, host: Host) -> None:
    """The unit that reads ``/etc/reconcile/gpus``: overrides, drivers by address, modules, nodes."""
    load, cards = _gpu_data(host)
    for address, driver, _ in cards:
        for each in _card_functions(host, address, driver):
            host.functions[each].override = driver
    for address, driver, _ in cards:
        if driver == "vfio-pci":
            load_module(fleet, host, driver)
        for each in _card_functions(host, address, driver):
            if host.functions[each].driver not in (None, driver):
                unbind(fleet, host, each)
            if driver == "vfio-pci":
                probe(fleet, host, each)
    for module in load:
        load_module(fleet, host, module)
    for address, _, _ in cards:
        probe(fleet, host, address)
    gpu_unit_nodes(fleet, host)


def gpu_unit_nodes(fleet: Fleet, host: Host) -> str:
    """The nodes that the unit's script makes. Returns what it complains of: a card of another minor gets no node."""
    wrong: list[str] = []
    right: list[int] = []
    for address, driver, recorded in _gpu_data(host)[1]:
        gpu = host.functions[address].gpu
        if driver != "nvidia" or gpu is None or gpu.minor is None:
            continue
        if str(gpu.minor) == recorded:
            right.append(gpu.minor)
            continue
        host.dev.pop(f"/dev/nvidia{gpu.minor}", None)
        wrong.append(f"{address} has minor {gpu.minor}, not {recorded} as recorded: it gets no node")
    if right:
        host.dev.update({f"/dev/nvidia{minor}": Node(NVIDIA_MAJOR, minor) for minor in right})
        host.dev["/dev/nvidiactl"] = Node(NVIDIA_MAJOR, _CTL_MINOR)
        if failed := load_module(fleet, host, "nvidia-uvm"):
            wrong.append(failed)
        else:
            host.dev["/dev/nvidia-uvm"] = Node(host.majors["nvidia-uvm"], 0)
            host.dev["/dev/nvidia-uvm-tools"] = Node(host.majors["nvidia-uvm"], 1)
    fleet.touch(host)
    return "\n".join(wrong)


def _gpu_data(host: Host) -> tuple[list[str], list[tuple[str, str, str]]]:
    """The modules to load, and of each recorded card that is there its address, driver and minor."""
    file = host.files.get("/etc/reconcile/gpus")
    lines = [line.split() for line in file.text.splitlines()] if file is not None else []
    load = [words[1].replace("_", "-") for words in lines if words[:1] == ["load"]]
    cards = []
    for words in lines:
        if words[:1] == ["card"] and words[1] in host.functions:
            function = host.functions[words[1]]
            if f"{function.vendor}:{function.device}" == words[2]:
                cards.append((words[1], words[3], words[4]))
    return load, cards


def _card_functions(host: Host, address: str, driver: str) -> list[str]:
    """A card's own function, or all of the card where it is a virtual machine's."""
    card = address.rpartition(".")[0]
    others = driver == "vfio-pci"
    return [each for each in host.functions if each == address or (others and each.startswith(f"{card}."))]
