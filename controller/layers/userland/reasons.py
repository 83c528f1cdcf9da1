"""Why programs in a container cannot use its cards although it has them, and why that cannot be changed."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The closed list of reasons of ``container.userland``."""

    NO_LIBRARY = "no-library"
    """NVIDIA's libraries are not in it."""
    OTHER_VERSION = "other-version"
    """Its libraries are of another version than the module: the kernel refuses them (osapi.c: API mismatch)."""
    NOT_KNOWN_YET = "not-known-yet"
    """What it has inside is known when it runs; of plans alone."""
    SMI_FAILED = "nvidia-smi-failed"
    """The libraries are right, and nvidia-smi fails in it."""
    OTHER_CARDS = "other-cards"
    """nvidia-smi sees other cards in it than it is to have."""
    FROM_PACKAGES = "from-packages"
    """Its distribution's packages brought the libraries: an installer over them would break both."""
    NEEDS_A_PERSON = "preinstalled"
    """The spec says that somebody else installs the driver."""
    NO_INSTALLER = "no-installer"
    """The host has no installer of its module's version."""
