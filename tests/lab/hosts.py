"""The machines of the lab: what is plugged into them and what runs on them at first.

A description is what ``kernel.py`` is given as ``hosts.json``, with two keys more: ``platform`` and ``address``
(the last number of the host's address).
"""

from __future__ import annotations

import copy
import uuid
from typing import Any

Description = dict[str, Any]

PVE_KERNEL = "6.8.12-9-pve"
DEBIAN_KERNEL = "6.1.0-38-amd64"
DRIVER = {"version": "580.126.09", "flavour": "proprietary"}

# What a model is, by name: the PCI ids, the memory in MiB and the compute capability. All cards of one chip share
# the id of its audio function (10de:1aef of GA102 is in RTX 3090 and RTX A6000 alike).
MODELS: dict[str, dict[str, Any]] = {
    "NVIDIA RTX A6000": {"device": "2230", "audio": "1aef", "memory_mib": 49140, "compute_cap": "8.6"},
    "NVIDIA GeForce RTX 3090": {"device": "2204", "audio": "1aef", "memory_mib": 24576, "compute_cap": "8.6"},
    "NVIDIA GeForce RTX 4090": {"device": "2684", "audio": "22ba", "memory_mib": 24564, "compute_cap": "8.9"},
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": {
        "device": "2bb5",
        "audio": "22e8",
        "memory_mib": 97887,
        "compute_cap": "12.0",
    },
}


def card(slot: str, name: str, iommu_group: int, driver: str | None) -> Description:
    """Describe a card in a slot (``4f:00``) with its audio function beside it."""
    model = MODELS[name]
    return {
        "pci": f"0000:{slot}.0",
        "vendor": "10de",
        "device": model["device"],
        "class": "030000",
        "name": name,
        "uuid": f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'{slot} {name}')}",
        "memory_mib": model["memory_mib"],
        "compute_cap": model["compute_cap"],
        "iommu_group": iommu_group,
        "driver": driver,
        "companions": [
            {
                "pci": f"0000:{slot}.1",
                "vendor": "10de",
                "device": model["audio"],
                "class": "040300",
                "iommu_group": iommu_group,
                "driver": "vfio-pci" if driver == "vfio-pci" else None,
            }
        ],
    }


def _proxmox(address: int, cards: list[Description], driver: Description | None) -> Description:
    return {
        "platform": "proxmox",
        "address": address,
        "kernel": PVE_KERNEL,
        "cards": cards,
        "driver": driver,
        "majors": {"nvidia": 195, "nvidia-uvm": 509, "nvidia-caps": 234},
    }


def _linux(address: int, cards: list[Description]) -> Description:
    return {
        "platform": "linux",
        "address": address,
        "kernel": DEBIAN_KERNEL,
        "cards": cards,
        "driver": DRIVER,
        "majors": {"nvidia": 195, "nvidia-uvm": 510, "nvidia-caps": 235},
    }


def _kpro5(a6000: str, driver: Description | None) -> Description:
    return _proxmox(
        5,
        [
            card("17:00", "NVIDIA GeForce RTX 3090", 21, "vfio-pci"),
            card("31:00", "NVIDIA GeForce RTX 3090", 27, "vfio-pci"),
            card("4f:00", "NVIDIA RTX A6000", 31, a6000),
            card("b1:00", "NVIDIA GeForce RTX 3090", 44, "vfio-pci"),
            card("ce:00", "NVIDIA RTX A6000", 52, a6000),
        ],
        driver,
    )


_REST = {
    "kpro4": _proxmox(4, [], None),
    "kpro6": _proxmox(
        6,
        [
            card(f"{bus}:00", "NVIDIA RTX PRO 6000 Blackwell Server Edition", group, "nvidia")
            for bus, group in (("01", 15), ("41", 33), ("81", 48), ("c1", 60))
        ],
        {"version": "580.126.09", "flavour": "open"},  # Blackwell has no other
    ),
    "box1": _linux(
        11,
        [
            card("01:00", "NVIDIA GeForce RTX 4090", 14, "nvidia"),
            card("02:00", "NVIDIA GeForce RTX 4090", 16, "nvidia"),
        ],
    ),
    "box2": _linux(12, [card("01:00", "NVIDIA GeForce RTX 3090", 14, "nvidia")]),
}

# The driver is there, and the cards are with whom they belong to.
DEFAULT: dict[str, Description] = {**_REST, "kpro5": _kpro5("nvidia", DRIVER)}

# kpro5 as it is when the story begins: no driver, every card on vfio-pci.
STORY: dict[str, Description] = {**_REST, "kpro5": _kpro5("vfio-pci", None)}


def default() -> dict[str, Description]:
    """Return a copy of the default, to be changed at will."""
    return copy.deepcopy(DEFAULT)


def story() -> dict[str, Description]:
    """Return a copy of the story's first state, to be changed at will."""
    return copy.deepcopy(STORY)
