"""Why a server's unit does not mean what its spec says."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The closed list of reasons of ``server.unit``."""

    NO_UNIT = "no-unit"
    """There is no unit."""
    OTHER_MEANING = "other-meaning"
    """It was made for other arguments, weights, GPUs or another environment."""
    EDITED = "edited"
    """Its file is not as we wrote it, or is not there while our folder is."""
    OTHER_SECRETS = "other-secrets"
    """Its secrets are not those that the spec names now."""
    NOT_OURS = "not-ours"
    """There is a unit of that name that we did not make."""
    UNKNOWN_FLAG = "unknown-flag"
    """The installed engine does not take one of the flags."""
    BAD_FLAG = "bad-flag"
    """A flag's value cannot be what the engine wants."""
    UNKNOWN_ENGINE = "unknown-engine"
    """There is no plug-in of that name."""
    SECRET_UNREADABLE = "secret-unreadable"  # noqa: S105
    """A secret that it needs cannot be read on the controller's machine."""
    NO_GPU = "no-gpu"
    """The GPUs that it asks for are not those that its place has."""
    NEWER_SCHEMA = "newer-schema"
    """It was written by a newer release, which alone understands it."""
    NOT_KNOWN_YET = "not-known-yet"
    """What is in its place is known only when that runs."""
