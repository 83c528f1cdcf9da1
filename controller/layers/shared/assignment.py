"""Which of a host's cards each of its containers gets: the same answer for the same specs and facts, every time.

A container asks for certain cards or for a number of a sort. Those who name theirs come first; then each keeps what
its config passes already as long as that is valid; then the lowest free addresses, in order of the containers' ids.
A card that is gone is never replaced by another without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from controller.facts.words import Later
from controller.layers.devices.facts import GuestFacts
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.shared import boards
from controller.layers.shared.claims import claimant, claims
from controller.layers.shared.lxc_devices import passed
from controller.layers.shared.pve_conf import parse
from controller.spec.model import Container, Gpu, GpuOwner, GpuSelector, Host, Specs


class NoGpu(StrEnum):
    """Why a container cannot have the cards that it asks for."""

    NOT_LISTED = "gpu-not-listed"
    OWNED_BY_VMS = "gpu-owned-by-vm"
    CLAIMED = "gpu-claimed-by-vm"
    MISSING = "gpu-missing"
    OTHER_MODEL = "gpu-other-model"
    IN_USE = "gpu-in-use"
    NOT_ENOUGH = "not-enough-gpus"


@dataclass(frozen=True, slots=True)
class Assigned:
    """The cards of one container by PCI address, in the order that it counts them."""

    pcis: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unassigned:
    """Why there is no assignment, and what would have to change."""

    reason: NoGpu
    message: str
    needs: str


Assignment = Assigned | Unassigned


def assign(specs: Specs, host: Host, gpus: GpuFacts, guests: GuestFacts) -> dict[str, Assignment]:
    """The assignment of every container that the specs want on this host and that asks for cards, by its name."""
    return _Assigning(specs, host, gpus, guests).all()


def is_known_later(specs: Specs, host: Host, gpus: GpuFacts, guests: GuestFacts) -> bool:
    """Whether an assignment may come out otherwise once minors are known: a config that no spec wants passes some."""
    if not any(isinstance(gpu.minor, Later) for gpu in gpus.gpus):
        return False
    wanted = {container.id for container in specs.containers.values() if container.host == host.name}
    return any(passed(parse(guest.text).main).cards for guest in guests.here("lxc") if guest.id not in wanted)


def memory_of(gpus: GpuFacts, pci: str) -> int | None:
    """A card's memory in bytes, None when nobody knows.

    A board that is known by its id has its nominal memory, so that the answer is the same before and after a driver
    has the card (nvidia-smi tells a little less than the data sheet).
    """
    function, row = gpus.function(pci), gpus.row(pci)
    board = boards.BOARDS.get(function.device) if function else None
    if board is not None:
        return board.memory_gib * 1024**3
    return row.memory_total or None if row else None


def capability_of(gpus: GpuFacts, pci: str) -> tuple[int, int] | None:
    """A card's CUDA compute capability, None when nobody knows."""
    function, row = gpus.function(pci), gpus.row(pci)
    board = boards.BOARDS.get(function.device) if function else None
    major, _, minor = (board.compute_capability if board else row.compute_capability if row else "").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def model_of(gpus: GpuFacts, pci: str) -> str:
    """What a card calls itself, "" when nobody knows."""
    function, row, card = gpus.function(pci), gpus.row(pci), gpus.gpu(pci)
    return (row.name if row else "") or (card.model if card else "") or (function.model if function else "")


class _Assigning:
    """One run: ``taken`` maps an address to the containers that have it, by name."""

    def __init__(self, specs: Specs, host: Host, gpus: GpuFacts, guests: GuestFacts) -> None:
        self.host, self.gpus = host, gpus
        self.listed = {gpu.pci: gpu for gpu in host.gpus}
        self.claims = claims(guests)
        self.wanted = sorted(
            (c for c in specs.containers.values() if c.host == host.name and c.gpus is not None), key=lambda c: c.id
        )
        ids = {c.id for c in self.wanted}
        passing = {g.id: _passing(g.text, gpus) for g in guests.here("lxc")}
        self.has: Mapping[int, tuple[str, ...]] = {vmid: pcis for vmid, pcis in passing.items() if vmid in ids}
        self.others: dict[str, str] = {
            pci: f"CT {vmid}" for vmid, pcis in sorted(passing.items()) if vmid not in ids for pci in pcis
        }
        self.taken: dict[str, dict[str, Container]] = {}
        self.found: dict[str, Assignment] = {}

    def all(self) -> dict[str, Assignment]:
        counted = []
        for container in self.wanted:
            selector = _selector(container)
            if selector.devices is not None:
                self._take(container, self._named(container, selector.devices))
            else:
                counted.append(container)
        kept = {c.name: self._keep(c) for c in counted}
        for container in counted:
            self._take(container, self._counted(container, kept[container.name]))
        return self.found

    def _take(self, container: Container, assignment: Assignment) -> None:
        self.found[container.name] = assignment
        if isinstance(assignment, Assigned):
            for pci in assignment.pcis:
                self.taken.setdefault(pci, {})[container.name] = container

    def _named(self, container: Container, devices: Iterable[str]) -> Assignment:
        pcis: list[str] = []
        for device in devices:
            pci = self._address(device)
            if pci is None:
                return Unassigned(
                    NoGpu.MISSING,
                    f"no card on {self.host.name} says that it is {device}",
                    "look at `nvidia-smi -L` there; a card that no NVIDIA driver has cannot tell its UUID",
                )
            refusal = self._refusal(pci) or self._refusal_as_taken(container, pci)
            if refusal is not None:
                return refusal
            pcis.append(pci)
        return Assigned(tuple(pcis))

    def _keep(self, container: Container) -> tuple[str, ...]:
        """What the container has and may keep; taken at once, so that no other gets it."""
        selector = _selector(container)
        kept = [
            pci
            for pci in sorted(self.has.get(container.id, ()))
            if self._refusal(pci) is None and self._fits(selector, pci) and self._is_free(container, pci)
        ][: selector.number]
        self._take(container, Assigned(tuple(kept)))
        return tuple(kept)

    def _counted(self, container: Container, kept: tuple[str, ...]) -> Assignment:
        selector = _selector(container)
        lacking = selector.number - len(kept)
        if lacking == 0:
            return Assigned(kept)
        gone = [gpu for gpu in self.listed.values() if self._is_gone(gpu)]
        if gone:
            refusal = self._refusal(gone[0].pci)
            if refusal is not None:
                return Unassigned(
                    refusal.reason,
                    f"{refusal.message}; it is not replaced by another card for {container.name}",
                    refusal.needs,
                )
        fitting = [pci for pci in sorted(self.listed) if self._refusal(pci) is None and self._fits(selector, pci)]
        free = [pci for pci in fitting if pci not in kept and pci not in self.others and self._is_free(container, pci)]
        if len(free) < lacking:
            return self._not_enough(container, selector, fitting, kept)
        return Assigned(tuple(sorted((*kept, *free[:lacking]))))

    def _not_enough(
        self, container: Container, selector: GpuSelector, fitting: Sequence[str], kept: Sequence[str]
    ) -> Unassigned:
        told: list[str] = []
        for pci in sorted(self.listed):
            refusal = self._refusal(pci)
            holders = [name for name in self.taken.get(pci, ()) if name != container.name]
            if pci in kept:
                continue
            if refusal is not None:
                told.append(refusal.message)
            elif pci not in fitting:
                told.append(f"{pci} ({model_of(self.gpus, pci) or 'not known'}) does not fit {_described(selector)}")
            elif holders:
                told.append(f"{pci} is {holders[0]}'s")
            elif pci in self.others:
                told.append(f"{pci} is passed to {self.others[pci]}, which no spec wants here")
        return Unassigned(
            NoGpu.NOT_ENOUGH,
            f"{container.name} wants {selector.number} of {self.host.name}'s cards and {len(kept)} can be had"
            + (": " + "; ".join(told) if told else ""),
            "list more cards with `owner: containers` on the host, ask for fewer, or free one",
        )

    def _is_gone(self, gpu: Gpu) -> bool:
        """A containers' card of the spec that is not there, or is another."""
        refusal = self._refusal(gpu.pci) if gpu.owner is GpuOwner.CONTAINERS else None
        return refusal is not None and refusal.reason in (NoGpu.MISSING, NoGpu.OTHER_MODEL)

    def _refusal(self, pci: str) -> Unassigned | None:
        """Why no container may have this card at all."""
        name, gpu, function = self.host.name, self.listed.get(pci), self.gpus.function(pci)
        if gpu is None:
            return Unassigned(
                NoGpu.NOT_LISTED,
                f"the card at {pci} is not listed in the spec of {name}",
                "list it there with `owner: containers`; a card that is not listed is never touched",
            )
        if gpu.owner is not GpuOwner.CONTAINERS:
            return Unassigned(
                NoGpu.OWNED_BY_VMS,
                f"the card at {pci} of {name} is for virtual machines, as its spec says",
                "write `owner: containers` for it in the host's spec",
            )
        if function is None or not function.is_gpu:
            return Unassigned(
                NoGpu.MISSING,
                f"{name} has no card at {pci}",
                "look at the card and its power, or correct the spec",
            )
        found = model_of(self.gpus, pci)
        if found and not boards.same_model(gpu.model, found):
            return Unassigned(
                NoGpu.OTHER_MODEL,
                f"the card at {pci} of {name} is a {found}, its spec says {gpu.model}",
                "correct `model` or `pci` in the host's spec",
            )
        if by := claimant((pci,), self.claims):
            return Unassigned(
                NoGpu.CLAIMED, f"{by} claims the card at {pci} of {name}", "take it from the VM's config first"
            )
        if by := claimant(function.mates, self.claims):
            return Unassigned(
                NoGpu.CLAIMED,
                f"{by} claims a device in the IOMMU group of the card at {pci} of {name}, and takes it all",
                "take that device from the VM, or put the card into another slot",
            )
        return None

    def _refusal_as_taken(self, container: Container, pci: str) -> Unassigned | None:
        if self._is_free(container, pci):
            return None
        other = next(name for name in self.taken[pci] if name != container.name)
        return Unassigned(
            NoGpu.IN_USE,
            f"{container.name} and {other} both want the card at {pci} of {self.host.name}",
            "give one of them another card, or write `shared: true` for both",
        )

    def _is_free(self, container: Container, pci: str) -> bool:
        others = [other for name, other in self.taken.get(pci, {}).items() if name != container.name]
        return all(_selector(c).shared for c in (container, *others)) if others else True

    def _fits(self, selector: GpuSelector, pci: str) -> bool:
        """Whether a card is of the sort that is asked for; what is not known of it does not fit."""
        if selector.memory is not None and (memory_of(self.gpus, pci) or 0) < selector.memory:
            return False
        if selector.model is not None and not boards.same_model(
            selector.model, model_of(self.gpus, pci) or self.listed[pci].model
        ):
            return False
        if selector.compute_capability is not None:
            capability = capability_of(self.gpus, pci)
            return capability is not None and selector.compute_capability.admits(*capability)
        return True

    def _address(self, device: str) -> str | None:
        if not device.startswith("GPU-"):
            return device
        for gpu in self.gpus.gpus:
            if gpu.uuid.lower() == device.lower():
                return gpu.pci
        return next((row.pci for row in self.gpus.smi if row.uuid.lower() == device.lower()), None)


def _selector(container: Container) -> GpuSelector:
    if container.gpus is None:
        raise AssertionError(f"{container.name} asks for no cards")
    return container.gpus


def _passing(text: str, gpus: GpuFacts) -> tuple[str, ...]:
    """The addresses of the cards whose nodes a config passes, by the minors that they have now."""
    minors = passed(parse(text).main).cards
    return tuple(g.pci for g in gpus.gpus if not isinstance(g.minor, Later) and g.minor in minors)


def _described(selector: GpuSelector) -> str:
    wanted = [
        f"model {selector.model}" if selector.model else "",
        f"memory >={selector.memory / 1024**3:g}GiB" if selector.memory else "",
        f"compute capability {selector.compute_capability}" if selector.compute_capability else "",
    ]
    return ", ".join(part for part in wanted if part) or "what is asked for"
