"""host.gpu-health in the simulated fleet: sysfs, the driver's own files, device nodes, and nvidia-smi."""

from __future__ import annotations

from collections.abc import Iterator

from controller.facts.words import Section
from controller.layers.shared import kernel_physics
from controller.layers.shared.truth import Fleet, Function, Gpu, Host, Module, Node

_ALL_ONES = 63  # the link of a card that is off the bus: its register reads 0xffff
_COMMUNICATE = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running."
)


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host. nvidia-smi makes device nodes, after they were looked at."""
    lines = [
        *(_pci(host, address, f) for address, f in sorted(host.functions.items()) if f.vendor == "10de"),
        *_module(host),
        *(f"major|{name}|{major}" for major, name in kernel_physics.proc_devices(host) if name.startswith("nvidia")),
        *(_node(path, node) for path, node in _nodes(host)),
    ]
    out = "".join(f"{line}\n" for line in lines)
    if "nvidia" in host.loaded:
        out += f"smi|{_smi(fleet, host)}"
    out += "".join(f"kernel|[    0.000000] {line}\n" for line in _kernel_log(host))
    return Section(0, out)


def _pci(host: Host, address: str, function: Function) -> str:
    group, mates = "", ""
    if function.iommu_group is not None:
        group = str(function.iommu_group)
        mates = " ".join(sorted(a for a, f in host.functions.items() if f.iommu_group == function.iommu_group))
    return "|".join(
        (
            f"pci|{address}|0x{function.device}|0x{function.pci_class}|{function.driver or ''}",
            f"{function.override or '(null)'}|{group}|{mates}|{function.numa_node}",
            f"{_ALL_ONES if function.gpu and function.gpu.lost else function.link_width}|{function.link_width_max}",
        )
    )


def _kernel_log(host: Host) -> Iterator[str]:
    """What NVIDIA's driver says of a card that it lost (Xid 79)."""
    for address, function in sorted(host.functions.items()):
        if function.gpu is not None and function.gpu.lost:
            yield f"NVRM: Xid (PCI:{address.rpartition('.')[0]}): 79, GPU has fallen off the bus."


def _module(host: Host) -> Iterator[str]:
    module = host.loaded.get("nvidia")
    if module is None:
        return
    yield f"module|{module_line(host, module)}"
    for address, function in sorted(host.functions.items()):
        if function.driver == "nvidia" and function.gpu is not None:
            for line in information(address, function.gpu):
                yield f"gpu|{address}|{line}"


def module_line(host: Host, module: Module) -> str:
    """The first line of ``/proc/driver/nvidia/version`` (nv-procfs.c)."""
    if module.flavour == "open":
        kind = f"Open Kernel Module for {host.arch}  {module.version}  Release Build  (dvs-builder@U22-I3)"
    else:
        kind = f"{host.arch} Kernel Module  {module.version}"
    return f"NVRM version: NVIDIA UNIX {kind}  Tue Sep 23 09:55:41 UTC 2025"


def information(address: str, gpu: Gpu) -> Iterator[str]:
    """``/proc/driver/nvidia/gpus/ADDRESS/information`` (nv-procfs.c)."""
    yield f"Model: \t\t {gpu.model}"
    yield "IRQ:   \t\t 41"
    if gpu.initialised:
        yield f"GPU UUID: \t {gpu.uuid}"
    yield "Video BIOS: \t 94.02.5c.00.02"
    yield "Bus Type: \t PCIe"
    yield "DMA Size: \t 47 bits"
    yield "DMA Mask: \t 0x7fffffffffff"
    yield f"Bus Location: \t {address}"
    yield f"Device Minor: \t {gpu.minor}"
    yield "GPU Excluded:\t No"


def _nodes(host: Host) -> Iterator[tuple[str, Node]]:
    """In the order of the shell's two patterns."""
    flat = sorted(path for path in host.dev if path.startswith("/dev/nvidia") and path.count("/") == 2)
    caps = sorted(path for path in host.dev if path.startswith("/dev/nvidia-caps/"))
    if caps:
        flat = sorted([*flat, "/dev/nvidia-caps"])
    for path in (*flat, *caps):
        yield path, host.dev.get(path, _DIRECTORY)


_DIRECTORY = Node(mode=-1)


def _node(path: str, node: Node) -> str:
    if node is _DIRECTORY:
        return f"node|{path}|directory|0|0|755"
    if node.plain:
        return f"node|{path}|regular empty file|0|0|{node.mode:o}"
    return f"node|{path}|character special file|{node.major:x}|{node.minor:x}|{node.mode:o}"


def _smi(fleet: Fleet, host: Host) -> str:
    if not host.userspace:
        return "none\n"
    if host.smi_hangs:
        if host.smi_hung_since is None:
            host.smi_hung_since = fleet.uptime(host)
        return f"hung {int(host.smi_hung_since)}\n"
    if host.userspace != host.loaded["nvidia"].version:
        return "exit 18\nFailed to initialize NVML: Driver/library version mismatch\n"
    if host.smi_says:
        return host.smi_says
    kernel_physics.make_gpu_nodes(fleet, host, uvm=False)
    kernel_physics.initialise(fleet, host)
    cards = [(address, f.gpu) for address, f in sorted(host.functions.items()) if f.driver == "nvidia" and f.gpu]
    for address, gpu in cards:
        if gpu.lost:
            return f"exit 255\nUnable to determine the device handle for GPU {address.upper()}: Unknown Error\n"
    if not cards:
        return "exit 6\nNo devices were found\n"
    version = host.userspace
    rows = [
        f"{index}, {gpu.uuid}, 0000{address.upper()}, {gpu.model}, {version}, {gpu.compute_capability}, "
        f"{gpu.memory_mib}, {gpu.memory_used_mib}, [N/A]\n"
        for index, (address, gpu) in enumerate(cards)
    ]
    return "exit 0\n" + "".join(rows)
