"""host.gpu-binding: each card of containers on nvidia, each of virtual machines on vfio-pci, now, card by card.

A card is known by its address, and has to be what the spec says. What a VM claims is never taken from its driver, and
a card that no spec lists is never touched. Drivers are chosen by ``driver_override``, never by vendor and device: that
would take every card of a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from controller.core.package import script, text
from controller.core.view import View
from controller.core.words import Block, Disruption, Drift, InSync, Layer, NotKnown, Skipped, Step, Verdict
from controller.facts.words import FleetFacts, Known, Later
from controller.layers.binding.facts import BindingFacts, parse
from controller.layers.binding.reasons import Reason
from controller.layers.devices.facts import GuestFacts
from controller.layers.gpu_health.facts import Function, GpuFacts
from controller.layers.gpu_health.facts import Gpu as Card
from controller.layers.shared.cards import itself, slot, strangers
from controller.layers.shared.claims import Claim, claimant, claims, digest
from controller.spec.model import Gpu, GpuOwner, Host, Lifecycle, Platform
from controller.spec.policy import Permission
from controller.spec.ref import Ref

NAME = "host.gpu-binding"
BIND = script("controller.layers.binding", "bind-gpu.sh")
NVIDIA, VFIO = "nvidia", "vfio-pci"


@dataclasses.dataclass(frozen=True)
class _Seen:
    """What the cards of one host are judged by."""

    host: Host
    gpus: GpuFacts
    binding: BindingFacts
    guests: GuestFacts | None
    claims: tuple[Claim, ...]

    def claimant(self, pcis: Sequence[str]) -> str:
        """Which VM claims one of these addresses."""
        return claimant(pcis, self.claims)

    def functions_of(self, pci: str) -> tuple[str, ...]:
        """All functions of the card at an address."""
        return tuple(f.pci for f in self.gpus.functions if slot(f.pci) == slot(pci))


def check(view: View, host: Host) -> Verdict:
    """Whether each listed card is on the driver that its owner needs."""
    if not host.gpus:
        return Skipped("no GPUs in the spec")
    if host.lifecycle is not Lifecycle.ACTIVE:
        return Skipped(str(host.lifecycle))
    gpus = view.fact(host.name, "host.gpu-health", GpuFacts)
    binding = view.fact(host.name, NAME, BindingFacts)
    guests = view.fact(host.name, "container.devices", GuestFacts) if host.platform is Platform.PROXMOX else None
    seen = _Seen(host, gpus, binding, guests, claims(guests) if guests is not None else ())
    drifts: list[Drift] = []
    for gpu in sorted(host.gpus, key=lambda gpu: gpu.pci):
        function = itself(gpus, gpu)  # what is not the described card is host.gpu-health's, and is not touched
        if function is not None and (drift := _card(seen, gpu, function)) is not None:
            drifts.append(drift)
    if not drifts:
        return InSync()
    # One card that cannot be helped keeps no other from being put right.
    first = next((drift for drift in drifts if isinstance(drift.remedy, Step)), drifts[0])
    others = {f"{n + 1}. {d.reason}": d.message for n, d in enumerate(d for d in drifts if d is not first)}
    return dataclasses.replace(first, evidence={**first.evidence, **others})


def _card(seen: _Seen, gpu: Gpu, function: Function) -> Drift | None:
    return _of_vms(seen, function) if gpu.owner is GpuOwner.VMS else _of_others(seen, gpu, function)


def _of_others(seen: _Seen, gpu: Gpu, function: Function) -> Drift | None:
    """A card of containers, or of the host itself."""
    name = f"the card at {function.pci} of {seen.host.name}"
    if (shared := _shared_with(seen, function)) is not None:
        return _blocked(
            Reason.SHARED_GROUP,
            f"{name} is in IOMMU group {function.group} with {shared}: the VM's start takes the whole group",
            "put one of the two into another slot, or give both to the same owner",
        )
    if is_right(seen.gpus, function):
        return None
    if by := seen.claimant(seen.functions_of(function.pci)):
        return _blocked(
            Reason.CLAIMED_BY_VM,
            f"{name} is on {function.driver or 'no driver'}, and {by} claims it; the spec gives it to {gpu.owner}",
            "take it out of the VM (`qm set ID --delete hostpciN`) and stop the VM, or change `owner` in the spec",
        )
    if (used := _in_use(seen, function)) is not None:
        return used
    message = f"{name} is on {function.driver or 'no driver'}, not on {NVIDIA}"
    return Drift(Reason.NOT_ON_NVIDIA, message, _bind(seen, function, NVIDIA, Reason.NOT_ON_NVIDIA))


def is_right(gpus: GpuFacts, function: Function) -> bool:
    """Whether a card is nvidia's, or, while that is not loaded, is kept for it."""
    if function.driver == NVIDIA:
        return True
    return not function.driver and function.override == NVIDIA and gpus.module is None


def _of_vms(seen: _Seen, function: Function) -> Drift | None:
    if function.driver == VFIO:
        return None
    name = f"the card at {function.pci} of {seen.host.name}"
    on = function.driver or "no driver"
    by = seen.claimant((*seen.functions_of(function.pci), *strangers(function)))
    if by and function.driver:
        return _blocked(
            Reason.VM_CARD_TAKEN,
            f"{name} is on {on}, and {by} claims it: what a VM claims is not taken from its driver",
            "stop what uses it; the VM's next start binds it to vfio-pci, and so does the host's next boot",
        )
    if by and function.override == VFIO:
        return None
    if by:
        message = f"{name}, which {by} claims, is on no driver: nvidia would take it when it is loaded"
        return Drift(Reason.NOT_GUARDED, message, _guard(seen, function))
    if not function.group:
        return _blocked(
            Reason.NO_IOMMU,
            f"{name} is in no IOMMU group, and vfio-pci needs one",
            "turn VT-d or AMD-Vi on in the firmware, and boot with intel_iommu=on where the kernel wants that",
        )
    if (used := _in_use(seen, function)) is not None:
        return used
    return Drift(
        Reason.NOT_ON_VFIO, f"{name} is on {on}, not on {VFIO}", _bind(seen, function, VFIO, Reason.NOT_ON_VFIO)
    )


def _shared_with(seen: _Seen, function: Function) -> str | None:
    """What of a VM's is in the IOMMU group of a card that is not: another card's function that one claims or may."""
    of_vms = {slot(gpu.pci) for gpu in seen.host.gpus if gpu.owner is GpuOwner.VMS}
    for mate in strangers(function):
        if by := seen.claimant((mate,)):
            return f"{mate}, which {by} claims"
        if slot(mate) in of_vms:
            return f"{mate}, a card of virtual machines"
    return None


def _in_use(seen: _Seen, function: Function) -> Drift | None:
    """Why a card cannot be unbound: who has it open. Raises NotKnown when that could not be told."""
    if not function.driver:
        return None
    if seen.binding.unknown is not None:
        raise NotKnown(seen.binding.unknown.reason, f"{seen.host.name}: {seen.binding.unknown.message}")
    card = seen.gpus.gpu(function.pci)
    users = seen.binding.of((f"/dev/vfio/{function.group}", f"/dev/nvidia{card.minor}" if card else ""))
    if not users:
        return None
    return _blocked(
        Reason.IN_USE,
        f"the card at {function.pci} of {seen.host.name} is on {function.driver} and in use by "
        f"{', '.join(user.who for user in users)}: unbinding would wait for ever",
        "stop what uses it",
    )


# Steps


def _bind(seen: _Seen, function: Function, driver: str, reason: Reason) -> Step:
    step = _step(
        seen, "bind-gpu", "bind", function, driver, reason, f"bind {function.pci} of {seen.host.name} to {driver}"
    )
    minor = Later(step.id)

    def after(facts: GpuFacts) -> GpuFacts:
        takes = driver == VFIO or facts.module is not None
        changed = dataclasses.replace(function, driver=driver if takes else "", override=driver)
        gpus = tuple(card for card in facts.gpus if card.pci != function.pci)
        if driver == NVIDIA and takes:
            gpus = (*gpus, Card(function.pci, minor, "", function.model))
        return _with(dataclasses.replace(facts, gpus=gpus), changed)

    return dataclasses.replace(step, effect=lambda facts: _predicted(facts, seen.host.name, after))


def _guard(seen: _Seen, function: Function) -> Step:
    summary = f"keep nvidia from {function.pci} of {seen.host.name} (driver_override)"
    step = _step(seen, "guard-gpu", "guard", function, VFIO, Reason.NOT_GUARDED, summary)

    def after(facts: GpuFacts) -> GpuFacts:
        return _with(facts, dataclasses.replace(function, override=VFIO))

    return dataclasses.replace(step, effect=lambda facts: _predicted(facts, seen.host.name, after))


def _step(seen: _Seen, action: str, what: str, function: Function, driver: str, reason: Reason, summary: str) -> Step:
    ref = Ref("Host", seen.host.name)
    return Step(
        action=action,
        object=ref,
        layer=NAME,
        reason=reason,
        summary=summary,
        hosts=(seen.host.name,),
        script=BIND,
        args=(what, function.pci, driver, function.driver, digest(seen.guests)),
        disrupts=(Disruption(ref, Permission.REBIND_GPU),),
        timeout=60.0,
    )


def _with(facts: GpuFacts, changed: Function) -> GpuFacts:
    functions = tuple(changed if function.pci == changed.pci else function for function in facts.functions)
    return dataclasses.replace(facts, functions=functions)


def _predicted(facts: FleetFacts, host: str, after: Callable[[GpuFacts], GpuFacts]) -> FleetFacts:
    found = facts[host].section("host.gpu-health")
    if not isinstance(found, Known) or not isinstance(found.value, GpuFacts):
        return facts
    return {**facts, host: facts[host].with_section("host.gpu-health", after(found.value))}


def _blocked(reason: Reason, message: str, needs: str) -> Drift:
    return Drift(reason, message, Block(reason, message, needs))


LAYER = Layer(
    name=NAME,
    kind="Host",
    reasons=Reason,
    check=check,
    probe=text("controller.layers.binding", "probe.sh"),
    parse=parse,
)
