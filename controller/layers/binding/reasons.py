"""Why a card is not on the driver that its owner needs, or cannot be put there."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The closed list of reasons of ``host.gpu-binding``."""

    # What is put right by a step.
    NOT_ON_NVIDIA = "not-on-nvidia"
    """A card of containers, or of the host, is not on nvidia and not kept free for it."""
    NOT_ON_VFIO = "not-on-vfio"
    """A card of virtual machines that none claims is not on vfio-pci."""
    NOT_GUARDED = "not-guarded"
    """A card that a VM claims has no driver, and nothing keeps nvidia from taking it when it is loaded."""

    # What is not.
    CLAIMED_BY_VM = "claimed-by-vm"
    """A VM's config, template or pending change, or a running VM, claims a card that the spec gives to others."""
    SHARED_GROUP = "shared-iommu-group"
    """The card is in one IOMMU group with a device of a VM, whose start takes the whole group."""
    VM_CARD_TAKEN = "vm-card-taken"
    """Another driver has a card that a VM claims."""
    IN_USE = "gpu-in-use"
    """A process has the card open; to unbind it would wait for ever."""
    NO_IOMMU = "no-iommu"
    """The machine's IOMMU is off: vfio-pci cannot take the card."""
