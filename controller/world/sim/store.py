"""Where a simulated fleet keeps its present state between commands."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from controller.layers.shared.truth import Fleet
from controller.world.sim import file as simfile

BETWEEN_COMMANDS = 1.0  # seconds of the fleet's time that go by from one command to the next


def place_of(file: Path) -> str:
    """A short name for a simulated fleet's file, the same for the same path."""
    return hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]


class Kept:
    """A fleet's file and the state that it has come to.

    The state lies beside the controller's own memory as ``sim-DIGEST.json``, the digest being that of the file's
    path. It belongs to the file's text: when that changes, the fleet starts anew from the file, and ``notes`` says so.
    Without ``state_dir`` nothing is kept. Raises SimFileError, OSError.
    """

    def __init__(self, file: Path, state_dir: Path | None) -> None:
        text = file.read_text(encoding="utf-8")
        self.notes: tuple[str, ...] = ()
        self._digest = hashlib.sha256(text.encode()).hexdigest()
        self._path = state_dir / f"sim-{place_of(file)}.json" if state_dir is not None else None
        self.fleet = self._later(file) or simfile.load(text, str(file))

    def _later(self, file: Path) -> Fleet | None:
        """The state that the last command left, None when there is none of this file as it is now."""
        if self._path is None or not self._path.exists():
            return None
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            digest, plain = kept["of"], kept["fleet"]
            if digest != self._digest:
                self.notes = (f"{file} has changed: the simulated fleet starts anew from it",)
                return None
            fleet = simfile.from_plain(plain)
        except (ValueError, KeyError, TypeError) as error:
            self.notes = (f"{self._path} cannot be read ({error}): the simulated fleet starts anew from {file}",)
            return None
        fleet.now += BETWEEN_COMMANDS
        return fleet

    def save(self, settle: Callable[[Fleet], None]) -> None:
        """Keep the fleet's state as it will be when the next command comes; short steps have ended by then."""
        if self._path is None:
            return
        later = copy.deepcopy(self.fleet)
        settle(later)
        for host in later.hosts.values():
            for job in host.jobs.values():
                job.work.stdin = ""  # may be a secret; what a job still does must not need it
            if host.step is not None:
                host.step.work.stdin = ""
        kept = json.dumps({"of": self._digest, "fleet": simfile.to_plain(later)}, indent=1)
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = self._path.with_suffix(f".{os.getpid()}")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
            out.write(kept)
        fresh.replace(self._path)
