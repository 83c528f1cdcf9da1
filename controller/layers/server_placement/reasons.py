"""Why a server is somewhere else than its spec wants it."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The closed list of reasons of ``server.placement``."""

    STILL_ELSEWHERE = "still-elsewhere"
    """Its unit is in another place too, runs there or would after the next start of that place."""
    ABSENT_WANTED = "absent-wanted"
    """It is to be removed, and its unit is still there."""
    RENAMED = "renamed"
    """It is there under its old name."""
    OTHER_OBJECTS = "other-objects"
    """The unit of its name is another object's."""
