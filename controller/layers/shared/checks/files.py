"""The small JSON files of a server in its place: read whole, written beside and renamed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

SCHEMA = 1


def read(path: Path) -> dict[str, Any] | None:
    """The object that a file holds, None when it is not there or no object. Raises OSError."""
    try:
        said = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return said if isinstance(said, dict) else None


def write(path: Path, value: dict[str, Any], mode: int = 0o644) -> None:
    """Put an object into a file in one rename, on disk. Raises OSError."""
    replace(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode(), mode)


def replace(path: Path, data: bytes, mode: int) -> None:
    """Put bytes into a file in one rename, on disk. Raises OSError."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".reconcile-new")
    beside.unlink(missing_ok=True)
    out = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(out, "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
