"""Why a server's environment is not as its spec wants it."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The closed list of reasons of ``server.environment``."""

    NOT_BUILT = "not-built"
    """There is no environment of what is wanted."""
    OTHER_GPUS = "built-for-other-gpus"
    """There is one of the same engine, built for another generation of GPUs: it is replaced, never repaired."""
    NOT_WHOLE = "environment-not-whole"
    """It was built, and its interpreter is gone."""
    NOT_PROVEN = "not-proven"
    """Its kernels have not run yet on each of the server's GPUs."""
    KERNELS_DO_NOT_FIT = "kernels-do-not-fit"
    """Its kernels do not run on one of the server's GPUs."""
    OLD_ENVIRONMENT = "old-environment"
    """One of ours that nothing uses any more is still there."""
    UNKNOWN_ENGINE = "unknown-engine"
    """There is no plug-in of that name."""
    NO_UV = "no-uv"
    """There is no uv for the machine's architecture."""
    NO_GPU = "no-gpu"
    """The GPUs that the server asks for are not those that its place has."""
    NEWER_SCHEMA = "newer-schema"
    """It was made by a newer release, which alone understands it."""
    NOT_KNOWN_YET = "not-known-yet"
    """What is in its place is known only when that runs."""
