"""Why a container does not run, or not stop, or not with what its config says; and why that cannot be changed."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The closed list of reasons of ``container.power``."""

    NOT_RUNNING = "not-running"
    """It is to run and does not."""
    STILL_RUNNING = "still-running"
    """It is to be stopped and runs."""
    DEVICES_CHANGED = "devices-changed"
    """It was started with other device rules than its config has now."""
    INNER_NODE_MISSING = "inner-node-missing"
    """A node that its config passes is not inside."""
    INNER_NODE_NOT_A_DEVICE = "inner-node-not-a-device"
    """Inside, something else is where a device node should be: a plain file, left by ``create=file``."""
    INNER_NODE_OF_ANOTHER_DEVICE = "inner-node-of-another-device"
    """A node inside has numbers that are not the driver's any more."""
    RESTART_DID_NOT_HELP = "restart-did-not-help"
    """It was restarted for this very difference, and the difference is there again."""
    GPU_STILL_IN_USE = "gpu-still-in-use"
    """Another container still runs with a card that is this one's now."""
    LOCKED = "locked"
    """Proxmox is at work on the container (``lock:`` in its config)."""
    TEMPLATE = "template"
    """The container is a template."""
    HA_MANAGED = "ha-managed"
    """Proxmox's HA starts and stops it."""
