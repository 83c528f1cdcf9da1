"""What stumbles over something that nobody thought of, in words that people can report."""

from __future__ import annotations

import traceback

DEFECT = "defect"


def defect(error: Exception) -> str:
    """Say which error it was and where it was raised; its text may quote a host's files, so it is left out."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    place = "/".join(at.filename.split("/")[-3:])
    return f"{type(error).__name__} at {place}:{at.lineno}; this is a defect of reconcile, please report it"
