"""Fleets for tests, built as people write them."""

from __future__ import annotations

from pathlib import Path

from controller.layers.shared.truth import Fleet, Host, Work
from controller.world.sim import file as simfile

DEMO = Path(__file__).parents[2] / "specs" / "demo" / "fleet.sim.yaml"


def demo() -> Fleet:
    """The demo's first world."""
    return simfile.load(DEMO.read_text(), str(DEMO))


def fleet(text: str) -> Fleet:
    """The fleet of a file's text, without its first line."""
    return simfile.load(f"simulated_fleet: 1\n{text}", "test.sim.yaml")


def box(cards: str = "", more: str = "") -> tuple[Fleet, Host]:
    """A node alone in its cluster, with NVIDIA's driver loaded when it has cards on it."""
    nvidia = "nvidia: {version: 580.126.09}" if "driver: nvidia" in cards else ""
    given = f"cards: [{cards}]" if cards else ""
    lines = "\n".join(f"    {line}" for line in (nvidia, given, *more.splitlines()) if line)
    made = fleet(f"hosts:\n  box:\n    cluster: one\n{lines}\n")
    return made, made.hosts["box"]


def two_a6000() -> tuple[Fleet, Host]:
    """A node with two A6000 on nvidia."""
    return box(
        '{pci: "4f:00.0", model: RTX A6000, driver: nvidia, iommu_group: 41},'
        '{pci: "ce:00.0", model: RTX A6000, driver: nvidia, iommu_group: 67}'
    )


def work(layer: str, action: str, *args: str, stdin: str = "") -> Work:
    """What a unit of this action does."""
    return Work(f"{action}-test", layer, action, "Container/ct129", list(args), stdin)
