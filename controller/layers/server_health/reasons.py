"""What can be wrong with a server's health."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The closed list."""

    NOT_WATCHED = "not-watched"
    """Its watch is not installed, or is not as it should be."""
    WATCH_SILENT = "watch-silent"
    """Its watch is installed and has said nothing for a while."""
    STARTING = "starting"
    """It is not ready yet, and has time left."""
    NOT_READY_IN_TIME = "not-ready-in-time"
    """It is not ready, and its time is up."""
    WRONG_MODEL = "wrong-model"
    """What answers does not serve the model."""
    GENERATION_FAILS = "generation-fails"
    """It answers, and generates nothing."""
    STUCK = "stuck"
    """Requests wait or run in it, and nothing moves."""
    CRASH_LOOP = "crash-loop"
    """It has ended again and again, and systemd starts it no more."""
    INCONCLUSIVE = "inconclusive"
    """What the watch saw says neither that it is well nor that it is not."""
