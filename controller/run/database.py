"""One SQLite file that several threads and processes use at once, and that may be lost, damaged or too new.

A file that cannot be used is kept aside under a name that says why, and a fresh one goes on in its place, also while
other processes have it open.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from controller.run.state import NoState, private_file

BUSY = 30.0  # seconds to wait for another process that writes; it holds the file for milliseconds
PARTS = ("-wal", "-shm")  # what SQLite keeps beside a file while it is open
T = TypeVar("T")

_log = logging.getLogger(__name__)


class Database:
    """A file of tables. ``migrations`` are the statements that lead to each version of it, in order.

    Opening, ``read`` and ``write`` raise NoState.
    """

    def __init__(self, path: Path, migrations: Sequence[Sequence[str]]) -> None:
        self._path = path
        self._migrations = migrations
        self._lock = threading.RLock()
        self._together = False
        self._inode = 0
        self.file = 0
        """How many files it has used: another one was begun, or put there, when this is another number."""
        self._version: tuple[int, int] = (0, 0)
        self.notes: tuple[str, ...] = ()
        """Which earlier file was kept aside, and why."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._connection = self._opened()
        except (OSError, sqlite3.Error) as error:
            raise self._no_state(error) from None
        self.changed()

    def close(self) -> None:
        """Close the file. What was written stays."""
        with self._lock:
            self._connection.close()

    def changed(self) -> bool:
        """Whether another process has written since the last call, or the file is another one."""
        with self._lock:
            before = self._version
            now = self.read(lambda db: int(db.execute("PRAGMA data_version").fetchone()[0]))
            self._version = now, self.file  # an inode may be given again
            return before != self._version

    def read(self, read: Callable[[sqlite3.Connection], T]) -> T:
        """Read; where the file turns out to be damaged, from a fresh one."""
        with self._lock:
            try:
                self._follow()
                try:
                    return read(self._connection)
                except sqlite3.DatabaseError as error:
                    self._heal(error)
                    return read(self._connection)
            except (OSError, sqlite3.Error) as error:
                raise self._no_state(error) from None

    def write(self, write: Callable[[sqlite3.Connection], T]) -> T:
        """Write in one transaction, or in the one of ``together``. Where the file turns out to be damaged, afresh."""
        with self._lock:
            try:
                if self._together:
                    if not self._connection.in_transaction:
                        raise sqlite3.OperationalError("what was written together with this could not be written")
                    return write(self._connection)
                self._follow()
                try:
                    return self._in_transaction(write)
                except sqlite3.DatabaseError as error:
                    self._heal(error)
                    return self._in_transaction(write)
            except (OSError, sqlite3.Error) as error:
                raise self._no_state(error) from None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Everything written inside is written at once, or nothing of it. Raises NoState at the end."""
        with self._lock:
            if self._together:
                yield
                return
            try:
                self._follow()
                self._connection.execute("BEGIN IMMEDIATE")
                self._together = True
            except (OSError, sqlite3.Error):
                _log.debug("not together", exc_info=True)  # each for itself then, and each says why it cannot
                yield
                return
            try:
                yield
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise self._no_state(error) from None
            finally:
                self._together = False
                self._undo()

    def _in_transaction(self, write: Callable[[sqlite3.Connection], T]) -> T:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            result = write(self._connection)
            self._connection.execute("COMMIT")
        finally:
            self._undo()
        return result

    def _undo(self) -> None:
        if self._connection.in_transaction:  # SQLite has undone it by itself when the disk is full
            self._connection.execute("ROLLBACK")

    def _follow(self) -> None:
        """Another process may have put the file aside, or somebody has deleted it: go on with the one that is there."""
        if self._together:
            return
        try:
            there = self._path.stat().st_ino
        except FileNotFoundError:
            there = 0
        if there != self._inode:
            self._connection.close()
            self._connection = self._opened()

    def _heal(self, error: sqlite3.DatabaseError) -> None:
        """Put a damaged file aside; any other error is raised again."""
        if not _is_damage(error) or self._together:
            raise error
        self._connection.close()
        with self._alone():
            if self._path.exists() and self._path.stat().st_ino == self._inode:  # else another process was faster
                self._set_aside("corrupt", str(error))
        self._connection = self._opened()

    def _opened(self) -> sqlite3.Connection:
        with self._alone():
            try:
                return self._connected()
            except _Newer as newer:
                self._set_aside("newer", str(newer))
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._set_aside("corrupt", str(error))
            return self._connected()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While a file is made, migrated or put aside, no other process does the same."""
        with open(private_file(self._path.with_name(f"{self._path.name}.lock")), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _connected(self) -> sqlite3.Connection:
        if self._path.exists():
            self._path.chmod(0o600)
        else:
            for part in PARTS:  # of a file that was deleted: they would be taken for the new one's
                self._path.with_name(self._path.name + part).unlink(missing_ok=True)
            os.close(private_file(self._path))  # not where it is open already: that would end SQLite's locks on it
        connection = sqlite3.connect(self._path, timeout=BUSY, isolation_level=None, check_same_thread=False)
        try:
            self._inode = self._path.stat().st_ino
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")  # what somebody decided outlives a power failure
            fault = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if fault != "ok":
                raise _Damaged(fault)
            self._migrate(connection)
            self.file += 1
        except BaseException:
            connection.close()
            raise
        return connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        """Bring a file to the present version, one version at a time. Raises _Newer."""
        version, known = int(connection.execute("PRAGMA user_version").fetchone()[0]), len(self._migrations)
        if version > known:
            raise _Newer(f"it is of version {version}, and this release knows {known}")
        for number, statements in enumerate(self._migrations[version:], version + 1):
            connection.execute("BEGIN IMMEDIATE")
            try:
                for statement in statements:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {number}")
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def _set_aside(self, why: str, said: str) -> None:
        """Keep a file that cannot be used, under a name with the time that it was last written."""
        written = datetime.fromtimestamp(self._path.stat().st_mtime, UTC)
        name = f"{self._path.name}.{why}-{written:%Y%m%dT%H%M%SZ}"
        aside, number = self._path.with_name(name), 1
        while aside.exists():
            number += 1
            aside = self._path.with_name(f"{name}-{number}")
        for part in (*PARTS, ""):  # the file itself last: what is left of it must not be taken for the new one's
            if (beside := self._path.with_name(self._path.name + part)).exists():
                beside.rename(aside.with_name(aside.name + part))
        note = f"what {self._path} remembers cannot be used ({said}): it is kept as {aside.name}, and a new one begun"
        _log.warning("%s", note)
        self.notes = (*self.notes, note)

    def _no_state(self, error: OSError | sqlite3.Error) -> NoState:
        return NoState(self._path.parent, error if isinstance(error, OSError) else OSError(0, str(error)))


class _Newer(Exception):  # noqa: N818 - what is the matter with the file
    """The file is of a newer release."""


class _Damaged(sqlite3.DatabaseError):
    """A check of the file found a fault."""


def _is_damage(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the kind, the rest says more of it
    return isinstance(error, _Damaged) or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
