"""The git work tree that specs lie in: which commit is checked out there, and whether the specs differ from it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

PATIENCE = 10.0  # seconds; a work tree on a file system that hangs must not hold anything up


class Commit(NamedTuple):
    """A commit's id, and whether the specs in the work tree differ from it; an empty id says that there is no git."""

    id: str = ""
    dirty: bool = False

    def __str__(self) -> str:
        return f"{self.id}-dirty" if self.dirty else self.id


def commit_of(where: Path) -> Commit:
    """The commit that spec files (a folder or a file) come from. Without git, or without a commit: an empty one."""
    folder, name = (where, ".") if where.is_dir() else (where.parent, where.name)
    # Nothing of the repository's own configuration is run (core.fsmonitor), and nothing in it is written.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), "status"]
    command += ["--porcelain=v2", "--branch", "--untracked-files=normal", "--", f"./{name}"]
    try:
        said = subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE, env=_environment()).stdout
    except (OSError, subprocess.SubprocessError):
        return Commit()
    lines = said.decode("utf-8", "replace").splitlines()
    ids = [line.removeprefix("# branch.oid ") for line in lines if line.startswith("# branch.oid ")]
    if not ids or ids[0] == "(initial)":
        return Commit()
    return Commit(ids[0], any(not line.startswith("# ") for line in lines))


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return {**kept, "LC_ALL": "C"}
