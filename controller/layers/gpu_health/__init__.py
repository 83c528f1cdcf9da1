"""host.gpu-health: every listed GPU is there and is the card the spec says, and nvidia-smi answers. Only reported."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from controller.core.package import text
from controller.core.view import View
from controller.core.words import Block, Drift, Gate, InSync, Layer, NotKnown, Skipped, Verdict
from controller.facts.words import Known
from controller.layers.boot.facts import DATA, BootFacts
from controller.layers.driver.facts import DriverFacts
from controller.layers.gpu_health.facts import GpuFacts, parse
from controller.layers.shared.boards import same_model
from controller.spec.model import Gpu, Host


class Reason(StrEnum):
    """What can be wrong with a host's GPUs."""

    GPU_MISSING = "gpu-missing"
    GPU_MOVED = "gpu-moved"
    OTHER_CARD = "other-card"
    OTHER_MODEL = "other-model"
    OFF_THE_BUS = "off-the-bus"
    UNCORRECTED_ERRORS = "uncorrected-errors"
    NO_NVIDIA_SMI = "no-nvidia-smi"
    NVIDIA_SMI_FAILED = "nvidia-smi-failed"


_SMI_NEEDS = {
    Reason.NO_NVIDIA_SMI: "install the driver's userland on the host, of exactly the module's version",
    Reason.NVIDIA_SMI_FAILED: "look at nvidia-smi's text and at `dmesg` for NVRM and Xid lines",
}


def check(view: View, host: Host) -> Verdict:
    """Whether the cards that the spec lists are there and well. A lost GPU is never replaced by another."""
    if host.nvidia is None:
        return Skipped("no GPUs in the spec")
    if host.lifecycle == "decommissioned":
        return Skipped("decommissioned")
    facts = view.fact(host.name, "host.gpu-health", GpuFacts)
    if facts.smi_failure is not None and facts.smi_failure.reason == "nvidia-smi-hangs":
        raise NotKnown(facts.smi_failure.reason, f"{host.name}: {facts.smi_failure.message}")
    problems = [p for gpu in host.nvidia.gpus if (p := problem_of(view, host, gpu)) is not None]
    if facts.smi_failure is not None and not _is_the_drivers(view, host, facts):
        reason = Reason(facts.smi_failure.reason)
        problems.append((reason, f"{host.name}: {facts.smi_failure.message}", _SMI_NEEDS[reason]))
    if not problems:
        return InSync()
    reason, message, needs = problems[0]
    evidence = {str(r): m for r, m, _ in problems[1:]}
    return Drift(reason, message, Block(reason, message, needs), evidence)


def problem_of(view: View, host: Host, gpu: Gpu) -> tuple[Reason, str, str] | None:
    """What is wrong with one card that the spec lists: the reason, a message, what to do. Raises NotKnown."""
    return _problem(host, view.fact(host.name, "host.gpu-health", GpuFacts), gpu, _recorded(view, host))


def _is_the_drivers(view: View, host: Host, facts: GpuFacts) -> bool:
    """Whether nvidia-smi fails for what host.driver sees and puts right: a library that is not the module's.

    It is so for a while in every change of the driver, which would wait for itself here.
    """
    if host.nvidia is None or host.nvidia.driver is None or facts.smi_failure is None or facts.module is None:
        return False
    found = view.facts[host.name].section("host.driver")
    if not isinstance(found, Known) or not isinstance(found.value, DriverFacts):
        return False
    return found.value.libraries != (facts.module.version,)


def _recorded(view: View, host: Host) -> dict[str, str]:
    """The UUIDs that cards had when they were recorded for boot, by address: how a card is known that was moved."""
    found = view.facts[host.name].section("host.boot")
    if not isinstance(found, Known) or not isinstance(found.value, BootFacts):
        return {}
    return {card.pci: card.uuid for card in found.value.cards if card.uuid}


def _problem(host: Host, facts: GpuFacts, gpu: Gpu, recorded: Mapping[str, str]) -> tuple[Reason, str, str] | None:
    function = facts.function(gpu.pci)
    uuid, now = recorded.get(gpu.pci, ""), _uuid(facts, gpu.pci)
    elsewhere = next((f.pci for f in facts.functions if uuid and f.pci != gpu.pci and _uuid(facts, f.pci) == uuid), "")
    if elsewhere and now != uuid:
        return (
            Reason.GPU_MOVED,
            f"the card that was at {gpu.pci} on {host.name} ({uuid}) is at {elsewhere} now",
            f"write {elsewhere} in the spec if it was moved on purpose; whoever had it keeps it only then",
        )
    if function is None or not function.is_gpu:
        there = ", ".join(f.pci for f in facts.functions if f.is_gpu) or "none"
        return (
            Reason.GPU_MISSING,
            f"{host.name} has no NVIDIA GPU at {gpu.pci} (there: {there})",
            "look at the card, its power and `dmesg`; correct `pci` in the spec if the card was moved",
        )
    if not function.answers:
        said = facts.xid(gpu.pci)
        return (
            Reason.OFF_THE_BUS,
            f"the card at {gpu.pci} on {host.name} has fallen off the bus{f': {said}' if said else ''}",
            "look at its power, heat and seat; it comes back with a reboot, or not at all",
        )
    module_gpu, row = facts.gpu(gpu.pci), facts.row(gpu.pci)
    found = (row.name if row else "") or (module_gpu.model if module_gpu else "") or function.model
    if gpu.model and found and not same_model(gpu.model, found):
        return (
            Reason.OTHER_MODEL,
            f"the card at {gpu.pci} on {host.name} is a {found}, the spec says {gpu.model}",
            "correct `model` or `pci` in the spec; nothing is done with a card that is not the one described",
        )
    if uuid and now and now != uuid:
        return (
            Reason.OTHER_CARD,
            f"another card is at {gpu.pci} on {host.name}: {now}, it was {uuid}",
            f"if it was replaced on purpose, remove {DATA} there: it is recorded anew",
        )
    if row is not None and row.uncorrected:
        return (
            Reason.UNCORRECTED_ERRORS,
            f"the memory of the card at {gpu.pci} on {host.name} had {row.uncorrected} uncorrected errors",
            "look at `nvidia-smi -q -d ECC,ROW_REMAPPER` there; a reset or a reboot clears the count, not the cause",
        )
    return None


def _uuid(facts: GpuFacts, pci: str) -> str:
    """What a card says its UUID is, "" while no driver of NVIDIA's has it."""
    card, row = facts.gpu(pci), facts.row(pci)
    return (row.uuid if row else "") or (card.uuid if card else "")


LAYER = Layer(
    name="host.gpu-health",
    kind="Host",
    reasons=Reason,
    check=check,
    probe=text("controller.layers.gpu_health", "probe.sh"),
    parse=parse,
    gates=Gate.NOTHING,
)
