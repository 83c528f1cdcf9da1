"""The NVIDIA cards of a host: on the bus, in the loaded module, as device nodes, and as nvidia-smi tells of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from controller.facts.words import Later, ParseError, Section, Unknown
from controller.layers.shared.boards import BOARDS

GPU_CLASSES = ("0300", "0302")  # VGA and 3D controllers; a card's audio (0403) and USB functions are not GPUs
_ALL_ONES = 63  # the width field of a link status register that reads 0xffff


@dataclass(frozen=True, slots=True)
class Function:
    """A PCI function made by NVIDIA. ``driver`` is "" when none has it; ``group`` its IOMMU group, "" without IOMMU.

    ``mates`` are the addresses of all functions in that group, itself included. ``numa_node`` is None when the
    machine does not say. Link widths are in lanes, 0 when not told.
    """

    pci: str
    device: str  # vendor:device
    pci_class: str
    driver: str
    override: str
    group: str
    mates: tuple[str, ...]
    numa_node: int | None
    link_width: int
    link_width_max: int

    @property
    def answers(self) -> bool:
        """Whether it is on the bus: what fell off reads as all ones, which is a link of 63 lanes (pci-sysfs.c)."""
        return self.link_width != _ALL_ONES

    @property
    def is_gpu(self) -> bool:
        """Whether the nvidia module would take it (open-gpu-kernel-modules nv-pci-table.c: VGA and 3D class)."""
        return self.pci_class[:4] in GPU_CLASSES

    @property
    def model(self) -> str:
        """The board's name by its id, "" for a board that is not known."""
        board = BOARDS.get(self.device)
        return board.name if board else ""


@dataclass(frozen=True, slots=True)
class Module:
    """The loaded nvidia module: its version, and ``open`` or ``proprietary``."""

    version: str
    flavour: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """A card that the nvidia module has. ``uuid`` is "" until the card was first used."""

    pci: str
    minor: int | Later
    uuid: str
    model: str


@dataclass(frozen=True, slots=True)
class Node:
    """A path under /dev. ``kind`` as stat words it; numbers are those of a device, 0 for what is none."""

    path: str
    kind: str
    major: int | Later
    minor: int | Later
    mode: str

    @property
    def is_device(self) -> bool:
        """A character device, not the plain file that ``optional,create=file`` leaves behind."""
        return self.kind == "character special file"


@dataclass(frozen=True, slots=True)
class Smi:
    """A row of nvidia-smi; memory in bytes. ``uncorrected`` are memory errors since the driver was loaded, or None."""

    index: int
    uuid: str
    pci: str
    name: str
    driver_version: str
    compute_capability: str
    memory_total: int
    memory_used: int
    uncorrected: int | None = None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """All of it. ``smi_failure`` says why nvidia-smi has no rows; None when it was not asked (no module loaded).

    ``kernel_said`` are the last lines of the kernel's log about lost cards and errors (Xid); read in trouble only.
    """

    functions: tuple[Function, ...]
    module: Module | None
    gpus: tuple[Gpu, ...]
    majors: tuple[tuple[str, int | Later], ...]
    nodes: tuple[Node, ...]
    smi: tuple[Smi, ...]
    smi_failure: Unknown | None = None
    kernel_said: tuple[str, ...] = ()

    def xid(self, pci: str) -> str:
        """What the kernel says is wrong with a card: its last error with a number, else the last line about it."""
        at = pci.rpartition(".")[0]
        lines = [line for line in reversed(self.kernel_said) if at in line]
        return next((line for line in lines if "Xid" in line), next(iter(lines), ""))

    def function(self, pci: str) -> Function | None:
        """The function at an address like 0000:4f:00.0."""
        return next((f for f in self.functions if f.pci == pci), None)

    def gpu(self, pci: str) -> Gpu | None:
        """The module's card at an address, None when the module does not have it."""
        return next((g for g in self.gpus if g.pci == pci), None)

    def major(self, name: str) -> int | Later | None:
        """The major number registered under exactly this name in /proc/devices."""
        return next((number for known, number in self.majors if known == name), None)

    def node(self, path: str) -> Node | None:
        """The node at a path like /dev/nvidia0."""
        return next((n for n in self.nodes if n.path == path), None)

    def row(self, pci: str) -> Smi | None:
        """nvidia-smi's row for an address."""
        return next((s for s in self.smi if s.pci == pci), None)


_MODULE = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+\.\d+(?:\.\d+)?)")
_EXIT = re.compile(r"exit (\d+)")
_UUID = re.compile(r"GPU-[0-9A-Za-z-]+")  # it is recorded for the boot in a line of words


def normal_pci(address: str) -> str:
    """An address as sysfs writes it: nvidia-smi prints an 8-digit domain in upper case (00000000:4F:00.0)."""
    domain, rest = address.lower().split(":", 1)
    return f"{domain[-4:]}:{rest}"


def parse(section: Section) -> GpuFacts:
    """Read the section's text. Raises ParseError."""
    said = tuple(line for line in section.out.split("\n") if line.startswith("kernel|"))
    rest = "\n".join(line for line in section.out.split("\n") if not line.startswith("kernel|"))
    plain, mark, smi = rest.partition("smi|")
    functions: list[Function] = []
    information: dict[str, dict[str, str]] = {}
    majors: list[tuple[str, int | Later]] = []
    nodes: list[Node] = []
    module: Module | None = None
    for line in plain.splitlines():
        kind, _, rest = line.partition("|")
        try:
            match kind:
                case "pci":
                    functions.append(_function(rest))
                case "module":
                    module = _module(rest)
                case "gpu":
                    pci, _, field = rest.partition("|")
                    key, _, value = field.partition(":")
                    information.setdefault(pci, {})[key.strip()] = value.strip()
                case "major":
                    name, _, number = rest.partition("|")
                    majors.append((name, int(number)))
                case "node":
                    path, what, major, minor, mode = rest.rsplit("|", 4)
                    nodes.append(Node(path, what, int(major, 16), int(minor, 16), mode))
                case _:
                    raise ValueError("no such line")
        except (ValueError, KeyError) as error:
            raise ParseError("garbage", f"cannot read {line[:100]!r}: {error}") from None
    gpus = tuple(_gpu(pci, fields) for pci, fields in information.items())
    rows, failure = _smi(smi) if mark else ((), None)
    return GpuFacts(
        tuple(functions), module, gpus, tuple(dict(majors).items()), tuple(nodes), rows, failure, _said(said)
    )


def _said(lines: Iterable[str]) -> tuple[str, ...]:
    """Lines of the kernel's log without their times."""
    texts = (line.partition("|")[2] for line in lines)
    return tuple(text.partition("] ")[2] if text.startswith("[") else text for text in texts)


def _function(text: str) -> Function:
    pci, device, pci_class, driver, override, group, mates, numa, width, width_max = text.split("|")
    if re.fullmatch(r"0x[0-9a-f]{4}", device) is None:
        raise ValueError("no device id in it")
    return Function(
        pci=pci,
        device=f"10de:{device.removeprefix('0x')}",
        pci_class=pci_class.removeprefix("0x"),
        driver=driver,
        override="" if override == "(null)" else override,
        group=group,
        mates=tuple(mates.split()),
        numa_node=int(numa) if numa not in ("", "-1") else None,
        link_width=int(width) if width.isdigit() else 0,
        link_width_max=int(width_max) if width_max.isdigit() else 0,
    )


def _module(line: str) -> Module:
    match = _MODULE.search(line)
    if match is None:
        raise ValueError("no version of the nvidia module in it")
    return Module(match[1], "open" if "Open Kernel Module" in line else "proprietary")


def _gpu(pci: str, fields: dict[str, str]) -> Gpu:
    minor = fields.get("Device Minor", "")
    if not minor.isdigit():
        raise ParseError("garbage", f"/proc/driver/nvidia/gpus/{pci}/information gives no Device Minor")
    uuid = fields.get("GPU UUID", "")
    return Gpu(pci, int(minor), uuid if _UUID.fullmatch(uuid) else "", fields.get("Model", ""))


def _smi(text: str) -> tuple[tuple[Smi, ...], Unknown | None]:
    first, _, body = text.partition("\n")
    if first == "none":
        return (), Unknown("no-nvidia-smi", "nvidia-smi is not installed on the host")
    if first.startswith("hung"):
        return (), Unknown("nvidia-smi-hangs", "nvidia-smi does not come back; look at `dmesg` for NVRM and Xid lines")
    match = _EXIT.fullmatch(first)
    if match is None:
        raise ParseError("garbage", f"cannot read nvidia-smi's exit code from {first[:60]!r}")
    if match[1] != "0":
        said = " ".join(body.split())[:200]
        return (), Unknown("nvidia-smi-failed", f"nvidia-smi exited {match[1]}: {said}")
    try:
        return tuple(_row(line) for line in body.splitlines() if line.strip()), None
    except ValueError:
        return (), Unknown("nvidia-smi-failed", f"nvidia-smi answered {' '.join(body.split())[:200]!r}")


def _row(line: str) -> Smi:
    index, uuid, pci, name, version, capability, total, used, errors = (part.strip() for part in line.split(","))
    memory = _mib(total), _mib(used)
    uncorrected = int(errors) if errors.isdigit() else None  # [N/A] where the card has no ECC, or it is off
    return Smi(
        int(index),
        uuid if _UUID.fullmatch(uuid) else "",
        normal_pci(pci),
        name,
        version,
        capability,
        *memory,
        uncorrected,
    )


def _mib(text: str) -> int:
    """nvidia-smi's MiB in bytes; unified memory (GB10) answers [N/A], which is 0 here: not known."""
    return 0 if text.startswith("[") else int(text) * 1024 * 1024
