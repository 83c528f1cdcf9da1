"""Why a host would not come back from a boot as it is wanted, as far as it is this layer's to see to."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The closed list of reasons of ``host.boot``."""

    NOT_SET_UP = "not-set-up"
    """Nothing of ours binds the cards at boot."""
    TAKEN_BY_IDS = "taken-by-ids"
    """The same, and ``options vfio-pci ids=`` gives a card of containers to vfio-pci at boot."""
    NOT_ENABLED = "not-enabled"
    """The unit is there, and would not be started."""
    CHANGED_BY_HAND = "changed-by-hand"
    """The unit or its script is not what was written."""
    OTHER_CARDS = "other-cards"
    """What is recorded for boot names other cards, or gives one to another driver."""
    OTHER_MINORS = "other-minors"
    """A card has another minor now than is recorded: at boot it would be left without its node."""
    MISSING_NODES = "missing-nodes"
    """Device nodes of cards of containers are not there now."""
    NOT_OURS = "not-ours"
    """A file that somebody else wrote is where ours has to be."""


class NextBoot(StrEnum):
    """What ``plan --next-boot`` finds wrong with the state that a host would boot into."""

    NO_MODULE = "no-module"
    """The kernel that boots next has no nvidia module of the wanted version."""
    ON_VFIO = "gpu-on-vfio"
    """A card of containers would be on vfio-pci."""
    ON_NOUVEAU = "gpu-on-nouveau"
    """nouveau would take a card."""
    ON_NVIDIA = "vm-gpu-on-nvidia"
    """nvidia would take a card of virtual machines."""
    NO_DRIVER = "gpu-on-no-driver"
    """A card would have no driver."""
    UNLISTED = "unlisted-gpu"
    """nvidia would take a card that no spec lists."""
    NO_NODES = "no-nodes"
    """Nothing would make the device nodes before guests start."""
    OTHER_MINORS = "other-minors"
    """A card would have another minor than the one that is recorded, and no node."""
