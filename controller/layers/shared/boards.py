"""What is known of a board by its PCI device id alone, for cards that no NVIDIA driver has been asked about.

Ids and names: README.md of NVIDIA/open-gpu-kernel-modules ("Compatible GPUs"). Memory as the products' data sheets
give it, in GiB. Compute capability: developer.nvidia.com/cuda-gpus. A card that is not here is simply not known
before its driver answers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Board:
    """A board's product name, memory in GiB and CUDA compute capability."""

    name: str
    memory_gib: int
    compute_capability: str


BOARDS: dict[str, Board] = {
    "10de:1eb8": Board("Tesla T4", 16, "7.5"),
    "10de:20b0": Board("NVIDIA A100-SXM4-40GB", 40, "8.0"),
    "10de:20b2": Board("NVIDIA A100-SXM4-80GB", 80, "8.0"),
    "10de:20b5": Board("NVIDIA A100-PCIE-80GB", 80, "8.0"),
    "10de:2204": Board("NVIDIA GeForce RTX 3090", 24, "8.6"),
    "10de:2203": Board("NVIDIA GeForce RTX 3090 Ti", 24, "8.6"),
    "10de:2230": Board("NVIDIA RTX A6000", 48, "8.6"),
    "10de:2231": Board("NVIDIA RTX A5000", 24, "8.6"),
    "10de:2235": Board("NVIDIA A40", 48, "8.6"),
    "10de:2236": Board("NVIDIA A10", 24, "8.6"),
    "10de:2237": Board("NVIDIA A10G", 24, "8.6"),
    "10de:2330": Board("NVIDIA H100 80GB HBM3", 80, "9.0"),
    "10de:2331": Board("NVIDIA H100 PCIe", 80, "9.0"),
    "10de:2335": Board("NVIDIA H200", 141, "9.0"),
    "10de:2684": Board("NVIDIA GeForce RTX 4090", 24, "8.9"),
    "10de:26b1": Board("NVIDIA RTX 6000 Ada Generation", 48, "8.9"),
    "10de:26b5": Board("NVIDIA L40", 48, "8.9"),
    "10de:26b9": Board("NVIDIA L40S", 48, "8.9"),
    "10de:27b8": Board("NVIDIA L4", 24, "8.9"),
    "10de:2b85": Board("NVIDIA GeForce RTX 5090", 32, "12.0"),
    "10de:2bb1": Board("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 96, "12.0"),
    "10de:2bb5": Board("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96, "12.0"),
}

_NOISE = frozenset({"nvidia", "geforce", "tesla", "quadro", "generation", "edition"})


def same_model(wanted: str, found: str) -> bool:
    """Whether a spec's model name ("RTX A6000") means the board that calls itself ``found`` ("NVIDIA RTX A6000").

    Maker's and family's words do not count; every other word of the wanted name has to be there, and no word that
    tells a different board from it ("Ti", "SUPER", "Ada").
    """
    want, have = _words(wanted), _words(found)
    telling = {"ti", "super", "ada", "laptop", "max-q", "d"}
    return want <= have and (have & telling) == (want & telling)


def _words(name: str) -> set[str]:
    return set(name.lower().replace("(tm)", "").replace("™", "").split()) - _NOISE
