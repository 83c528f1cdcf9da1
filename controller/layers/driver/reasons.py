"""Why the wanted NVIDIA driver is not in use on a host, and why that cannot be changed."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The closed list of reasons of ``host.driver``."""

    NOT_INSTALLED = "driver-not-installed"
    """The module of a kernel, or the library, is missing or of another version or flavour."""
    NOT_LOADED = "driver-not-loaded"
    """It is installed, and no NVIDIA module is loaded."""
    OTHER_LOADED = "other-driver-loaded"
    """It is installed, and another one is loaded."""
    HOLDERS_STOPPED = "holders-stopped"
    """Services that were stopped for the driver's sake were not started again."""
    MODULE_IN_USE = "module-in-use"
    """Somebody uses the loaded module who is not ours to stop."""
    NO_FREE_GPU = "no-free-gpu"
    """Every card is on another driver: the module would not load."""
    NEEDS_A_PERSON = "preinstalled"
    """The spec says that somebody else installs it."""
    KERNEL_TOO_NEW = "kernel-too-new"
    SECURE_BOOT = "secure-boot"
    UNLISTED_GPU = "unlisted-gpu"
    WRONG_FLAVOUR = "wrong-flavour"
    DID_NOT_LOAD = "did-not-load"
    """These five: shared/driver_wanted.py."""
