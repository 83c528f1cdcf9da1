"""Where the controller remembers, and who it is."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self


class StateInUse(Exception):  # noqa: N818 - the name says what is wrong
    """Another controller works with this state directory; the message says which process."""


def directory(given: str | None) -> Path:
    """``--state``, else RECONCILE_STATE, else ``reconcile`` in the user's state directory (XDG_STATE_HOME)."""
    if given or (given := os.environ.get("RECONCILE_STATE")):
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "reconcile"


@dataclass(frozen=True)
class Identity:
    """Who takes leases: ``id`` stays the same over restarts, ``name`` (host and process) is for people."""

    id: str
    name: str


def identity(state: Path) -> Identity:
    """Who works with a state directory; made up once and kept."""
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = state / "controller-id"
    if not file.exists():
        fresh = file.with_suffix(f".{os.getpid()}")
        fresh.write_text(secrets.token_hex(8) + "\n", encoding="ascii")
        try:
            os.link(fresh, file)  # never over one that another process has just made
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    return Identity(file.read_text(encoding="ascii").strip(), f"{socket.gethostname()}:{os.getpid()}")


class Lock:
    """Held while steps are performed: a second process with the same state, and so the same identity, is refused."""

    def __init__(self, state: Path) -> None:
        self._path = state / "lock"
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = self._path.open("a+", encoding="ascii")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            other = self._file.read().strip() or "unknown"
            self._file.close()
            raise StateInUse(
                f"cannot start: process {other} works with {self._path.parent} already; wait for it or stop it"
            ) from None
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
