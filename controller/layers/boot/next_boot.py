"""What would be wrong after a reboot now: the next boot of a host, played on what is known of it.

In the order in which a machine does it: the initramfs (``conf/modules``, then modules that it holds for devices), our
unit, modules loaded by name, modules that udev loads for devices. A pure function of facts; nothing is asked of a host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from controller.core.view import View
from controller.core.words import NotKnown
from controller.layers.boot import is_set_up
from controller.layers.boot.facts import BootFacts
from controller.layers.boot.reasons import NextBoot
from controller.layers.driver.facts import DriverFacts
from controller.layers.gpu_health.facts import Function, GpuFacts
from controller.layers.kernel.facts import KernelFacts, keeps_off
from controller.layers.shared.cards import itself, slot
from controller.layers.shared.vfio_ids import vfio_ids
from controller.spec.model import GpuOwner, Host

NVIDIA, NOUVEAU, VFIO = "nvidia", "nouveau", "vfio_pci"


@dataclass(frozen=True, slots=True)
class Wrong:
    """One thing that would be wrong, whose layer puts it right, and what to do where no step does."""

    layer: str
    reason: NextBoot
    message: str
    needs: str


def next_boot(view: View, host: Host) -> tuple[Wrong, ...]:
    """Everything that would be wrong on a host after a reboot now. Raises NotKnown for what has to be known for it."""
    kernel = view.fact(host.name, "host.kernel", KernelFacts)
    driver = view.fact(host.name, "host.driver", DriverFacts)
    gpus = view.fact(host.name, "host.gpu-health", GpuFacts)
    boot = view.fact(host.name, "host.boot", BootFacts)
    release = kernel.next
    image = kernel.of(release)
    if image is not None and image.unread is not None:
        raise NotKnown(image.unread.reason, f"{host.name}: {image.unread.message}")
    module = driver.module(release)
    bus = _Bus({f.pci: f for f in gpus.functions if f.is_gpu}, has_module=module is not None)
    if image is not None:
        held = {name for name in (NVIDIA, NOUVEAU, VFIO) if image.has_module(name)}
        by_name = [line for path, text in image.files if path.endswith("conf/modules") for line in _names(text)]
        bus.start(by_name, held, image.modprobe)
    unit = is_set_up(boot, host.name)
    if unit:
        bus.unit(boot)
    texts = [text for _, text in kernel.modprobe]
    bus.start(boot.modules, {NVIDIA, NOUVEAU, VFIO}, texts)
    return (
        *_modules(host, release, driver),
        *_cards(host, gpus, bus, module is not None),
        *_unlisted(host, bus),
        *_nodes(host, gpus, boot, bus, unit=unit),
    )


def _names(text: str) -> list[str]:
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return [words[0].replace("-", "_") for words in lines if words]


@dataclass
class _Bus:
    """The GPUs of a machine while it boots: which driver has which, and which are kept for one."""

    cards: Mapping[str, Function]
    has_module: bool
    driver: dict[str, str] = field(default_factory=dict)
    override: dict[str, str] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    ids: tuple[str, ...] = ()

    def start(self, by_name: Iterable[str], there: set[str], modprobe: Sequence[str]) -> None:
        """Modules by name, then for devices, out of those that are there."""
        for name in by_name:
            self.load(name, there, modprobe)
        for name in (NOUVEAU, NVIDIA):
            if not keeps_off(name, modprobe):
                self.load(name, there, modprobe)

    def load(self, name: str, there: set[str], modprobe: Sequence[str]) -> None:
        """A module with what has to be loaded before it."""
        name = NVIDIA if name.startswith("nvidia_") else name
        if name in self.loaded or name not in there or (name == NVIDIA and not self.has_module):
            return
        for before in _before(name, modprobe):
            self.load(before, there, modprobe)
        self.loaded.add(name)
        if name == VFIO:
            self.ids = vfio_ids(modprobe)
        for pci in sorted(self.cards):
            self._offer(pci, name)
        if name == NVIDIA and NVIDIA not in self.driver.values():
            self.loaded.discard(NVIDIA)  # it does not stay without a card (nv.c: No NVIDIA devices probed)

    def _offer(self, pci: str, name: str) -> None:
        if pci in self.driver:
            return
        wanted = self.override.get(pci)
        if wanted is not None:
            takes = wanted.replace("-", "_") == name
        else:
            takes = name in (NVIDIA, NOUVEAU) or (name == VFIO and self.cards[pci].device in self.ids)
        if takes:
            self.driver[pci] = name

    def unit(self, boot: BootFacts) -> None:
        """What our unit does."""
        recorded = [c for c in boot.cards if c.pci in self.cards and self.cards[c.pci].device == c.device]
        for card in recorded:
            self.override[card.pci] = card.driver
            if self.driver.get(card.pci, "") != card.driver.replace("-", "_"):
                self.driver.pop(card.pci, None)
        for name in (VFIO, NVIDIA):
            self.loaded.discard(name)
            self.load(name, {VFIO, NVIDIA}, ())


def _before(name: str, modprobe: Iterable[str]) -> list[str]:
    """The modules that a softdep has loaded before this one."""
    found: list[str] = []
    for text in modprobe:
        for line in text.split("\n"):
            if match := re.match(rf"\s*softdep\s+{name}\s+pre:\s*(.*?)(?:\s+post:.*)?$", line.replace("-", "_")):
                found += match[1].split()
    return found


def _modules(host: Host, release: str, driver: DriverFacts) -> list[Wrong]:
    """Whether the kernel that boots next has the module, of the version that is wanted."""
    wish = host.nvidia.driver if host.nvidia else None
    if all(gpu.owner is GpuOwner.VMS for gpu in host.gpus):
        return []
    module = driver.module(release)
    if module is None:
        message = f"kernel {release} boots next on {host.name} and has no nvidia module"
    elif wish is not None and module.version != wish.version:
        message = (
            f"kernel {release} boots next on {host.name} and would load driver {module.version}, not {wish.version}"
        )
    else:
        return []
    return [Wrong("host.driver", NextBoot.NO_MODULE, message, f"headers of {release}, and the driver built for it")]


def _cards(host: Host, gpus: GpuFacts, bus: _Bus, has_module: bool) -> list[Wrong]:
    wrong: list[Wrong] = []
    for gpu in sorted(host.gpus, key=lambda gpu: gpu.pci):
        if itself(gpus, gpu) is None:
            continue  # host.gpu-health says so, boot or not
        on = bus.driver.get(gpu.pci, "")
        name = f"the card at {gpu.pci} of {host.name}"
        if gpu.owner is GpuOwner.VMS:
            if on == NVIDIA:
                message = f"{name}, of virtual machines, would be taken by nvidia"
                wrong.append(Wrong("host.boot", NextBoot.ON_NVIDIA, message, "host.boot keeps it for vfio-pci"))
            elif on == NOUVEAU:
                message = f"{name}, of virtual machines, would be taken by nouveau"
                wrong.append(Wrong("host.kernel", NextBoot.ON_NOUVEAU, message, "host.kernel keeps nouveau off"))
        elif on == VFIO:
            message = f"{name} would be on vfio-pci"
            wrong.append(Wrong("host.boot", NextBoot.ON_VFIO, message, "host.boot binds it to nvidia"))
        elif on == NOUVEAU:
            message = f"{name} would be taken by nouveau"
            wrong.append(Wrong("host.kernel", NextBoot.ON_NOUVEAU, message, "host.kernel keeps nouveau off"))
        elif not on and has_module:
            message = f"{name} would have no driver: nothing loads nvidia"
            wrong.append(Wrong("host.boot", NextBoot.NO_DRIVER, message, "host.boot loads nvidia at boot"))
    return wrong


def _unlisted(host: Host, bus: _Bus) -> list[Wrong]:
    listed = {slot(gpu.pci) for gpu in host.gpus}
    return [
        Wrong(
            "host.driver",
            NextBoot.UNLISTED,
            f"nvidia would take the card at {pci} of {host.name}, which no spec lists",
            "list it under nvidia.gpus of the host with its owner",
        )
        for pci, on in sorted(bus.driver.items())
        if on == NVIDIA and slot(pci) not in listed
    ]


def _nodes(host: Host, gpus: GpuFacts, boot: BootFacts, bus: _Bus, *, unit: bool) -> list[Wrong]:
    """Whether the cards of containers would have their nodes, under the numbers that they have now."""
    own = [g.pci for g in host.gpus if g.owner is not GpuOwner.VMS and bus.driver.get(g.pci) == NVIDIA]
    if own and not unit:
        message = f"nothing of ours makes the device nodes of {host.name} before its guests start"
        return [Wrong("host.boot", NextBoot.NO_NODES, message, "host.boot makes them")]
    wrong: list[Wrong] = []
    # Minors are given in the order of probing, the first free one each (nv.c): at boot, that of the addresses.
    taken = sorted(pci for pci, on in bus.driver.items() if on == NVIDIA)
    for pci in sorted(own):
        recorded, minor = boot.card(pci), taken.index(pci)
        if recorded is not None and recorded.minor != minor:
            message = (
                f"the card at {pci} of {host.name} would have minor {minor}, recorded is {recorded.minor}: no node"
            )
            wrong.append(Wrong("host.boot", NextBoot.OTHER_MINORS, message, "run `reconcile --once` after the reboot"))
    return wrong
