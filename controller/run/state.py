"""Where the controller remembers, and who it is."""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import secrets
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self


class StateInUse(Exception):  # noqa: N818 - the name says what is wrong
    """Another controller works with this state directory; the message says which process."""


class NoState(Exception):  # noqa: N818 - the name says what is wrong
    """The state directory cannot be used; the message says why and what to do."""

    def __init__(self, state: Path, error: OSError) -> None:
        why = error.strerror or str(error)
        super().__init__(
            f"cannot remember anything in {state}: {why}; name another directory with --state DIR or RECONCILE_STATE"
        )


def directory(given: str | None) -> Path:
    """``--state``, else RECONCILE_STATE, else ``reconcile`` in the user's state directory (XDG_STATE_HOME)."""
    if given or (given := os.environ.get("RECONCILE_STATE")):
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "reconcile"


def person() -> str:
    """Who has started this process, for records: the user, and behind ``sudo`` the one who asked for it."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a service's user without an entry
        name = str(os.getuid())
    behind = os.environ.get("SUDO_USER", "")
    return f"{behind} (as {name})" if behind and behind != name else name


def private_file(path: Path, flags: int = os.O_RDWR) -> int:
    """Open a file that nobody else may read, and make it if there is none; the file descriptor is the caller's.

    It belongs to whom the directory belongs: root may look at a controller's state, and must not lock it out.
    """
    descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        now, folder = os.fstat(descriptor), path.parent.stat()
        if stat.S_IMODE(now.st_mode) & 0o077:
            os.fchmod(descriptor, 0o600)
        if os.geteuid() == 0 and now.st_uid != folder.st_uid:
            os.fchown(descriptor, folder.st_uid, folder.st_gid)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@dataclass(frozen=True)
class Identity:
    """Who takes leases: ``id`` stays the same over restarts, ``name`` (host and process) is for people."""

    id: str
    name: str


def identity(state: Path) -> Identity:
    """Who works with a state directory; made up once and kept. Raises NoState."""
    file = state / "controller-id"
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not file.exists():
            fresh = file.with_suffix(f".{os.getpid()}")
            fresh.write_text(secrets.token_hex(8) + "\n", encoding="ascii")
            try:
                os.link(fresh, file)  # never over one that another process has just made
            except FileExistsError:
                pass
            finally:
                fresh.unlink()
        kept = file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise NoState(state, error) from None
    if re.fullmatch(r"[0-9a-f]{16}", kept) is None:
        # Two controllers that both took a damaged file for their id would take each other's leases for their own.
        raise NoState(state, OSError(0, f"{file} holds no id (delete it, and a new one is made)"))
    return Identity(kept, f"{socket.gethostname()}:{os.getpid()}")


class Lock:
    """Held while steps are performed: a second process with the same state, and so the same identity, is refused.

    Entering raises StateInUse, NoState.
    """

    def __init__(self, state: Path) -> None:
        self._path = state / "lock"
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = self._path.open("a+", encoding="ascii")
        except OSError as error:
            raise NoState(self._path.parent, error) from None
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
