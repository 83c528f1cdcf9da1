"""Why a container's config does not lie where its spec wants it, and why it is not brought there."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The closed list of reasons of ``container.placement``."""

    NOT_ON_HOST = "not-on-host"
    """The config lies on another node."""
    RUNS_ELSEWHERE = "runs-elsewhere"
    """The config lies where it is wanted, and another host still runs the container."""
    NO_CONTAINER = "no-container"
    """No guest of that id is anywhere in the cluster."""
    OTHER_CLUSTER = "other-cluster"
    """The container is in another cluster."""
    ID_TAKEN = "id-taken"
    """A virtual machine has that id."""

    # Where it lies.
    SOURCE_NOT_IN_SPECS = "source-not-in-specs"
    """No spec says anything of the node that it lies on."""
    SOURCE_IN_MAINTENANCE = "source-in-maintenance"
    """The node that it lies on is in maintenance: nothing on it is touched."""
    SOURCE_UNREACHABLE = "source-unreachable"
    """Whether the node that it lies on still runs it is not known."""
    SOURCE_ONLINE = "source-online"
    """The node does not answer, and its cluster says that it is online."""
    WATCHED = "watched"
    """Somebody has the container's disk mapped."""
    NOT_FENCED = "not-fenced"
    """Nothing tells that the node does not use the container's disk any more."""

    # The cluster.
    NO_QUORUM = "no-quorum"
    """The source or the target is in no quorate part of the cluster."""
    TARGET_OFFLINE = "target-offline"
    """The source does not see the target in the cluster."""
    HA_MANAGED = "ha-managed"
    """Proxmox's HA decides where it is."""

    # The container.
    LOCKED = "locked"
    """Proxmox is at work on the container (``lock:`` in its config)."""
    BACKUP_RUNNING = "backup-running"
    """A backup or a snapshot of the container is being made or rolled back."""
    TEMPLATE = "template"
    """The container is a template."""

    # What it needs.
    STORAGE_MISSING = "storage-missing"
    """The target cannot use a storage that holds a disk of the container."""
    LOCAL_DISK = "local-disk"
    """A disk of the container lies on storage that only its node has."""
    LOCAL_BIND_MOUNT = "local-bind-mount"
    """A mount point of a directory that is not marked as being on every node: Proxmox does not move it."""
    SOURCE_MISSING = "mount-source-missing"
    """What the container mounts of its host is not there on the target."""

    SERVER_NOT_READY = "server-not-ready"
    """What a model needs on the target's cards is still being made ready inside the container, which runs on."""
    SERVER_DOES_NOT_FIT = "server-does-not-fit"
    """A model that is served in the container would not fit the target's cards: its engine would not start there."""

    # The cards of the target.
    GPU_NOT_LISTED = "gpu-not-listed"
    """The target's spec does not list the card."""
    GPU_OWNED_BY_VM = "gpu-owned-by-vm"
    """The target's spec gives the card to virtual machines."""
    GPU_CLAIMED_BY_VM = "gpu-claimed-by-vm"
    """A virtual machine's config claims the card, or a device in its IOMMU group."""
    GPU_MISSING = "gpu-missing"
    """The card is not there."""
    GPU_OTHER_MODEL = "gpu-other-model"
    """The card is not the model that the spec says."""
    GPU_IN_USE = "gpu-in-use"
    """Another container wants the same card, and they do not share it."""
    NOT_ENOUGH_GPUS = "not-enough-gpus"
    """The target has fewer free cards of the sort (model, memory, capability) than asked for."""
