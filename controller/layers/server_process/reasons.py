"""Why what serves is not the process that the spec wants."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The closed list of reasons of ``server.process``."""

    NOT_RUNNING = "not-running"
    """It does not run, and systemd does not start it by itself."""
    STILL_ELSEWHERE = "still-elsewhere"
    """It is ready here, and goes on in its old place or under its old name."""
    STILL_RUNNING = "still-running"
    """It runs and is to be stopped."""
    STILL_ENABLED = "still-enabled"
    """It does not run, is not to, and would start with its place."""
    NOT_ENABLED = "not-enabled"
    """It would not start with its place."""
    STARTED_BEFORE = "started-before"
    """It was started with what its unit meant before the last change."""
    OTHER_ARGUMENTS = "other-arguments"
    """It runs with other arguments than its unit says."""
    OTHER_GPUS = "other-gpus"
    """It runs on other GPUs than its unit says."""
    FOREIGN_PORT = "foreign-port"
    """Somebody else's process listens on its port."""
    CRASHED = "crashed"
    """It ended again and again, and systemd has given up."""
