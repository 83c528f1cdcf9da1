"""What works and will disappoint: how a server's cards are wired, what its place lacks. Told, not held against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

from controller.core.view import View
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.shared.place import place_of
from controller.layers.shared.server_gpus import Card
from controller.spec.model import ModelServer

SHM_FOR_A_GPU = 1 << 30
"""Bytes of /dev/shm for each card: containers that have 64 MiB of it fail in NCCL (vllm#1710, nccl#342, nccl#290)."""
UNIFIED = ("GB10",)
"""Machines whose processor and GPU share one memory, by the card's name."""


class Advice(StrEnum):
    """The closed list of what is told."""

    TWO_NUMA_NODES = "two-numa-nodes"
    """The cards of one tensor parallel group are on several NUMA nodes."""
    NARROW_LINK = "narrow-link"
    """A card's PCIe link has fewer lanes than card and slot could have."""
    SMALL_SHM = "small-shm"
    """The place's shared memory is smaller than what NCCL and the engine's processes need of it."""
    UNIFIED_MEMORY = "unified-memory"
    """The engine's default takes memory that the system needs."""
    NO_TOOLKIT = "no-toolkit"
    """There is no CUDA toolkit for what the engine compiles at start."""


def advice(
    view: View, server: ModelServer, cards: Sequence[Card], shm: int | None, cuda_home: str | None
) -> tuple[str, ...]:
    """Each piece, with its code in front. ``shm`` in bytes and ``cuda_home`` are None when they are not known."""
    return tuple(f"{code}: {text}" for code, text in _all(view, server, cards, shm, cuda_home))


def _all(
    view: View, server: ModelServer, cards: Sequence[Card], shm: int | None, cuda_home: str | None
) -> Iterator[tuple[Advice, str]]:
    nodes = {card.numa_node for card in cards if card.numa_node is not None and card.numa_node >= 0}
    if len(nodes) > 1:
        told = ", ".join(f"{card.pci} on node {card.numa_node}" for card in cards)
        yield Advice.TWO_NUMA_NODES, f"its GPUs are on {len(nodes)} NUMA nodes ({told}); choose GPUs of one by address"
    gpus = view.fact(place_of(view.specs, server).host, "host.gpu-health", GpuFacts)
    for card in cards:
        function = gpus.function(card.pci)
        if function is not None and 0 < function.link_width < function.link_width_max:
            lanes = f"{function.link_width} of {function.link_width_max} lanes"
            yield Advice.NARROW_LINK, f"the PCIe link of {card.pci} has {lanes}; look at its slot and riser"
    if len(cards) > 1 and shm is not None and shm < SHM_FOR_A_GPU * len(cards):
        has, needs = f"{shm / 2**20:,.0f} MiB", f"{SHM_FOR_A_GPU * len(cards) / 2**20:,.0f} MiB"
        yield (
            Advice.SMALL_SHM,
            f"the shared memory has {has}, {len(cards)} GPUs may need {needs}; mount a larger /dev/shm",
        )
    unified = any(name in card.model for card in cards for name in UNIFIED)
    if unified and server.engine.name == "vllm" and "gpu-memory-utilization" not in server.serve.flags:
        # vllm-project/recipes#632
        yield Advice.UNIFIED_MEMORY, "processor and GPU share one memory; write gpu-memory-utilization: 0.85"
    if cards and cuda_home == "" and server.engine.name in ("sglang", "vllm"):
        yield Advice.NO_TOOLKIT, "no CUDA toolkit fits its PyTorch; kernels that it compiles at start need nvcc"
