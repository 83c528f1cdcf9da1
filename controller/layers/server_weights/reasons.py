"""Why a model's files are not as its spec wants them."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The closed list of reasons of ``server.weights``."""

    NOT_THERE = "not-there"
    """None or not all of the files are there."""
    OTHER_SIZE = "other-size"
    """A file has another size than the revision's."""
    DAMAGED = "damaged"
    """A file's content is not the revision's."""
    NOT_VERIFIED = "not-verified"
    """The files are there, and nobody has compared their content yet, or they have changed since."""
    LEFTOVERS = "leftovers"
    """All is there and right, and what a download left is still beside it."""
    RECHECK_DUE = "recheck-due"
    """All is right, and was compared so long ago that it is compared again."""
    NO_SPACE = "no-space"
    """The disk has not enough room for what is to be fetched."""
    NOT_FOUND = "model-not-found"
    """The Hub has no such model or revision, or does not show it without a token."""
    GATED = "model-gated"
    """The Hub gives the model only to who has accepted its terms."""
    TOKEN_REFUSED = "token-refused"  # noqa: S105
    """The Hub does not take the token."""
    NO_FILES = "no-files"
    """The revision has no files that an engine could load."""
    DIRECTORY_HANGS = "directory-hangs"
    """The directory's disk does not answer."""
    ANOTHERS = "anothers"
    """In its directory lies another model of ours."""
    NEWER_SCHEMA = "newer-schema"
    """It was fetched by a newer release, which alone understands it."""
    NOT_KNOWN_YET = "not-known-yet"
    """What is in its place is known only when that runs."""
