"""Why a host's kernel is not ready for the wanted driver."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The closed list of reasons of ``host.kernel``."""

    HEADERS_MISSING = "headers-missing"
    """The running or the next kernel has no tree to build modules against, or there is no DKMS."""
    NO_HEADERS_PACKAGE = "no-headers-package"
    """No repository of the host has headers for its kernel."""
    NOUVEAU_NOT_KEPT_OFF = "nouveau-not-kept-off"
    """Nothing in modprobe.d keeps nouveau from the cards."""
    NOUVEAU_IN_INITRAMFS = "nouveau-in-initramfs"
    """An initramfs has nouveau, and nothing in it that keeps it from the cards."""
    KERNEL_TOO_NEW = "kernel-too-new"
    SECURE_BOOT = "secure-boot"
    UNLISTED_GPU = "unlisted-gpu"
    WRONG_FLAVOUR = "wrong-flavour"
    DID_NOT_LOAD = "did-not-load"
    """These five: shared/driver_wanted.py. Looked at here already, so that nothing is prepared in vain."""
