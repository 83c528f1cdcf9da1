"""Whose card is whose: a listed card as it is found on the bus, and what shares its IOMMU group."""

from __future__ import annotations

from controller.layers.gpu_health.facts import Function, GpuFacts
from controller.layers.shared.assignment import model_of
from controller.layers.shared.boards import same_model
from controller.spec.model import Gpu


def itself(gpus: GpuFacts, gpu: Gpu) -> Function | None:
    """The function at a listed address if it is a GPU, of the model that the spec says, and answers; else None."""
    function = gpus.function(gpu.pci)
    if function is None or not function.is_gpu or not function.answers:
        return None
    found = model_of(gpus, gpu.pci)
    return function if not (gpu.model and found) or same_model(gpu.model, found) else None


def slot(pci: str) -> str:
    """An address without its function: all functions of a card share it."""
    return pci.rpartition(".")[0]


def strangers(function: Function) -> tuple[str, ...]:
    """The addresses in a function's IOMMU group that belong to other cards."""
    return tuple(mate for mate in function.mates if slot(mate) != slot(function.pci))
