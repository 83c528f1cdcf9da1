"""Why a container's config does not pass what the spec wants, or cannot be made to."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The closed list of reasons of ``container.devices``."""

    # What is put right by an edit.
    WRONG_CARDS = "wrong-cards"
    """Cards are passed that are not assigned, and assigned ones are not."""
    TOO_MANY_CARDS = "too-many-cards"
    """Cards are passed, or may be opened, that are not assigned."""
    TOO_FEW_CARDS = "too-few-cards"
    """Not all assigned cards are passed."""
    NODE_NOT_PASSED = "node-not-passed"
    """A node that every user of a card needs (nvidiactl, nvidia-uvm) is not passed."""
    STALE_MAJOR = "stale-major"
    """A rule is for a major number that was NVIDIA's on another host or before a reboot."""
    NO_RULE = "no-rule"
    """A node is passed, and no rule lets it be opened for reading and writing."""
    BAD_RULE = "bad-rule"
    """A rule that LXC cannot read, for which it does not start the container."""
    WRONG_TARGET = "wrong-target"
    """A card's node is mounted under the name of another card."""
    WRONG_STYLE = "wrong-style"
    """The spec wants the devices passed in the other way."""

    # Where the config is, and who else works on it.
    LOCKED = "locked"
    """Proxmox is at work on the container (``lock:`` in its config)."""
    TEMPLATE = "template"
    """The container is a template."""
    PENDING = "pending-changes"
    """A change of NVIDIA devices by somebody else waits for the container's next start."""
    NO_QUORUM = "no-quorum"
    """The node is in no quorate part of its cluster."""

    # The cards.
    GPU_NOT_LISTED = "gpu-not-listed"
    """The host's spec does not list the card."""
    GPU_OWNED_BY_VM = "gpu-owned-by-vm"
    """The host's spec gives the card to virtual machines."""
    GPU_CLAIMED_BY_VM = "gpu-claimed-by-vm"
    """A virtual machine's config claims the card, or a device in its IOMMU group."""
    GPU_MISSING = "gpu-missing"
    """The card is not there."""
    GPU_OTHER_MODEL = "gpu-other-model"
    """The card is not the model that the spec says."""
    GPU_IN_USE = "gpu-in-use"
    """Another container wants the same card, and they do not share it."""
    NOT_ENOUGH_GPUS = "not-enough-gpus"
    """The host has fewer free cards of the sort than asked for."""
    GPU_NOT_AVAILABLE = "gpu-not-available"
    """The nvidia driver does not have the card."""

    # The nodes on the host.
    NO_UVM = "no-uvm"
    """The nvidia-uvm module is not loaded."""
    MISSING_NODE = "missing-node"
    """A device node that the config has to pass is not there on the host."""
    NODE_NOT_A_DEVICE = "node-not-a-device"
    """Something else is where a device node should be: a plain file, left by ``create=file``."""
    NODE_OF_ANOTHER_DEVICE = "node-of-another-device"
    """A device node on the host has other numbers than the driver's now."""

    # Rules that are not ours to change.
    ALLOWS_EVERYTHING = "allows-every-device"
    """A rule for all devices lets it open cards that are not assigned."""
    DENIED = "denied"
    """A rule that may be meant for something else refuses what is wanted."""
    CGROUP_V1 = "cgroup-v1"
    """The host has not got the pure cgroup v2 tree that device rules need."""
