"""What works and will disappoint is told."""

from __future__ import annotations

import dataclasses

import pytest

from controller.core.view import View
from controller.facts.words import Known
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.shared.advice import Advice, advice
from controller.layers.shared.server_gpus import Card, cards_of
from tests.layers.servers import Rig, document


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig()


def told(rig: Rig, shm: int | None = 1 << 40, cuda_home: str | None = "/usr/local/cuda", **card: object) -> list[str]:
    """The codes that are told of a server whose first card is changed like this."""
    view = rig.look()
    cards = cards_of(view, view.specs.servers["qwen"])
    assert isinstance(cards, tuple)
    first = dataclasses.replace(cards[0], **{"numa_node": 0, **card})  # type: ignore[arg-type]
    others = [dataclasses.replace(each, numa_node=0) for each in cards[1:]]
    server = view.specs.servers["qwen"]
    return [each.partition(":")[0] for each in advice(view, server, (first, *others), shm, cuda_home)]


def test_nothing_is_told_of_what_is_as_it_should_be(rig: Rig) -> None:
    assert told(rig) == []
    assert told(rig, None, None) == []


def test_two_numa_nodes(rig: Rig) -> None:
    assert told(rig, numa_node=1) == [Advice.TWO_NUMA_NODES]


def test_small_shm(rig: Rig) -> None:
    assert told(rig, 64 << 20) == [Advice.SMALL_SHM]


def test_no_toolkit(rig: Rig) -> None:
    assert told(rig, cuda_home="") == [Advice.NO_TOOLKIT]


def test_a_narrow_link(rig: Rig) -> None:
    view = rig.look()
    known = view.facts["kpro5"].section("host.gpu-health")
    assert isinstance(known, Known)
    assert isinstance(known.value, GpuFacts)
    narrow = tuple(dataclasses.replace(each, link_width=4) for each in known.value.functions)
    facts = view.facts["kpro5"].with_section("host.gpu-health", dataclasses.replace(known.value, functions=narrow))
    other = View(view.specs, {**view.facts, "kpro5": facts})
    cards = cards_of(other, view.specs.servers["qwen"])
    assert isinstance(cards, tuple)
    found = advice(other, view.specs.servers["qwen"], cards[:1], 1 << 40, "/x")
    assert [each.partition(":")[0] for each in found] == [Advice.NARROW_LINK]
    assert "4 of 16 lanes" in found[0]


def test_unified_memory() -> None:
    rig = Rig(document(engine="{name: vllm, version: 0.33.0}", serve="{port: 30000}"))
    view = rig.look()
    card = Card("0000:01:00.0", "GPU-1", "NVIDIA GB10", (12, 1), 1 << 37)
    found = advice(view, view.specs.servers["qwen"], (card,), None, None)
    assert [each.partition(":")[0] for each in found] == [Advice.UNIFIED_MEMORY]
