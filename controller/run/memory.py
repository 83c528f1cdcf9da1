"""What the controller remembers, in SQLite: history, and what people have decided.

What correctness needs lies on the hosts. Losing this file loses history and leave: permissions that were given by hand,
suspensions, backoff. Several processes use it at once. Times are UNIX seconds and come in as arguments. No secret
enters it: specs hold secrets by name only, and messages are kept without what looks like one.
"""

from __future__ import annotations

import functools
import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

from controller.core.conditions import Condition
from controller.core.permissions import Approval
from controller.core.suspension import Suspension
from controller.run.database import Database
from controller.run.state import NoState
from controller.spec.literals import without_secrets
from controller.spec.policy import Permission
from controller.spec.ref import Ref

FILE = "memory.db"
KEPT_SECONDS = 90 * 86400.0  # how long events are kept
KEPT_EVENTS = 100_000  # and how many
P = ParamSpec("P")
T = TypeVar("T")
Key = tuple[Ref, str, str]  # object, layer, action: what is tried again and again

_log = logging.getLogger(__name__)

# One entry for each version of the file (PRAGMA user_version), in order. What was released is never edited.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE conditions (
            object TEXT NOT NULL, type TEXT NOT NULL, place INTEGER NOT NULL, status TEXT NOT NULL,
            reason TEXT NOT NULL, message TEXT NOT NULL, digest TEXT NOT NULL, since REAL NOT NULL,
            PRIMARY KEY (object, type)) WITHOUT ROWID""",
        """CREATE TABLE drifts (
            object TEXT NOT NULL, layer TEXT NOT NULL, reason TEXT NOT NULL, cause TEXT NOT NULL, since REAL NOT NULL,
            PRIMARY KEY (object, layer)) WITHOUT ROWID""",
        """CREATE TABLE events (
            number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, at REAL NOT NULL, kind TEXT NOT NULL,
            object TEXT, layer TEXT NOT NULL, action TEXT NOT NULL, step TEXT NOT NULL, cause TEXT NOT NULL,
            result TEXT NOT NULL, message TEXT NOT NULL, digest TEXT NOT NULL, "commit" TEXT NOT NULL, seconds REAL)""",
        "CREATE INDEX events_of_object ON events (object, number)",
        "CREATE INDEX events_by_time ON events (at)",
        """CREATE TABLE applied (
            number INTEGER PRIMARY KEY AUTOINCREMENT, object TEXT NOT NULL, digest TEXT NOT NULL, text TEXT NOT NULL,
            "commit" TEXT NOT NULL, at REAL NOT NULL, outcome TEXT NOT NULL, outcome_at REAL NOT NULL,
            reached_at REAL)""",
        "CREATE INDEX applied_of_object ON applied (object, number)",
        "CREATE TABLE files (path BLOB PRIMARY KEY, text BLOB NOT NULL) WITHOUT ROWID",
        """CREATE TABLE backoffs (
            object TEXT NOT NULL, layer TEXT NOT NULL, action TEXT NOT NULL, tries INTEGER NOT NULL,
            until REAL NOT NULL, message TEXT NOT NULL, PRIMARY KEY (object, layer, action)) WITHOUT ROWID""",
        """CREATE TABLE approvals (
            id TEXT PRIMARY KEY, permission TEXT NOT NULL, object TEXT NOT NULL, of TEXT NOT NULL, layer TEXT NOT NULL,
            action TEXT NOT NULL, reason TEXT NOT NULL, digest TEXT NOT NULL, until REAL, why TEXT NOT NULL,
            by TEXT NOT NULL, at REAL NOT NULL, summary TEXT NOT NULL, used_at REAL, lapsed_at REAL)""",
        """CREATE TABLE suspensions (
            object TEXT PRIMARY KEY, until REAL, reason TEXT NOT NULL, by TEXT NOT NULL, at REAL NOT NULL)
            WITHOUT ROWID""",
    ),
)


class Outcome(StrEnum):
    """What became of a spec that was applied."""

    APPLYING = "applying"
    """The object is not yet as it says."""
    REACHED = "reached"
    """The object was as it says."""
    FAILED = "failed"
    """A step towards it has failed, and is tried again."""
    SUPERSEDED = "superseded"
    """Another one came before the object was as this one says."""


class Kind(StrEnum):
    """What an event is about."""

    STEP_STARTED = "step-started"
    STEP_ENDED = "step-ended"
    CONDITION = "condition"
    SPEC = "spec"
    APPROVAL = "approval"
    SUSPENSION = "suspension"
    BREAKER = "breaker"
    CONTROLLER = "controller"


@dataclass(frozen=True, slots=True)
class Kept:
    """A condition as it is remembered: ``since`` is when its status last changed, ``digest`` the spec it is about."""

    type: str
    status: str
    reason: str
    message: str
    digest: str
    since: float


@dataclass(frozen=True, slots=True)
class Drifting:
    """A layer that is not right, since when, and who changed: ``intentional`` the spec, ``corrective`` the world."""

    reason: str
    since: float
    cause: str


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. ``key`` is its own: the same event handed in twice is kept once.

    ``number`` counts up in the order of remembering, and is given by the memory. ``seconds`` is how long a step took.
    """

    key: str
    at: float
    kind: str
    object: Ref | None = None
    layer: str = ""
    action: str = ""
    step: str = ""
    cause: str = ""
    result: str = ""
    message: str = ""
    digest: str = ""
    commit: str = ""
    seconds: float | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class Applied:
    """A spec of an object that was applied ``at``: its digest, its canonical JSON text, and what became of it."""

    object: Ref
    digest: str
    text: str
    commit: str
    at: float
    outcome: str
    outcome_at: float


@dataclass(frozen=True, slots=True)
class Backoff:
    """A step that did not work ``tries`` times and is left alone until ``until``; ``message`` is how it failed."""

    tries: int
    until: float
    message: str


def _history(otherwise: Callable[[], T]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A method that keeps history: what cannot be kept is lost and said so, and the answer is that of ``otherwise``."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def keep(*args: P.args, **kwargs: P.kwargs) -> T:
            memory = args[0]
            assert isinstance(memory, Memory)  # noqa: S101 - it decorates methods of Memory only
            try:
                kept = method(*args, **kwargs)
            except NoState as error:
                memory.lost(error)
                return otherwise()
            memory.trouble = ""
            return kept

        return keep

    return decorate


class Memory:
    """What one state directory remembers. Safe to use from several threads and processes.

    History that cannot be written (the disk is full) is lost and ``trouble`` says so; the controller goes on. What
    people decided is never taken for absent: reading, and writing of approvals and suspensions, raises NoState.
    """

    def __init__(self, database: Database) -> None:
        """Use ``Memory.open``."""
        self._db = database
        self._spent: set[str] = set()  # approvals used up or lapsed, also where that could not be written
        self.trouble = ""
        """Why the last piece of history could not be written, "" when it could."""

    @classmethod
    def open(cls, state: Path) -> Self:
        """Open the memory of a state directory, and make it if there is none.

        A file that is damaged or of a newer release is kept aside under a name that says so, and ``notes`` too.

        Raises:
            NoState: the directory cannot be used.
        """
        return cls(Database(state / FILE, MIGRATIONS))

    @property
    def notes(self) -> tuple[str, ...]:
        """What people have to know of this memory: which earlier one was kept aside, and why."""
        return self._db.notes

    @property
    def file(self) -> int:
        """Which file it is that is used: another number after one that was deleted, replaced or put aside."""
        return self._db.file

    def close(self) -> None:
        """Close the file. What was kept stays."""
        self._db.close()

    def changed(self) -> bool:
        """Whether another process has written since the last call (or since it was opened). Raises NoState."""
        return self._db.changed()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Keep several pieces of history at once: many are much faster so. They are kept, or lost, together."""
        try:
            with self._db.together():
                yield
        except NoState as error:
            self.lost(error)

    def lost(self, error: NoState) -> None:
        """Say that a piece of history could not be kept."""
        if self.trouble != str(error):
            _log.error("%s; what happens meanwhile is not remembered", error)
        self.trouble = str(error)

    # Conditions and drift

    def conditions(self, refs: Iterable[Ref] | None = None) -> dict[Ref, tuple[Kept, ...]]:
        """The conditions of objects (of all when none are named) that has any, in the order they were given in."""
        names = None if refs is None else [str(ref) for ref in refs]
        select = "SELECT object, type, status, reason, message, digest, since FROM conditions"

        def read(db: sqlite3.Connection) -> list[Any]:
            if names is None:
                return db.execute(f"{select} ORDER BY object, place").fetchall()
            one = f"{select} WHERE object = ? ORDER BY place"
            return [row for name in names for row in db.execute(one, (name,)).fetchall()]

        found: dict[Ref, tuple[Kept, ...]] = {}
        for name, *kept in self._db.read(read):
            ref = Ref.parse(name)
            found[ref] = (*found.get(ref, ()), Kept(*kept))
        return found

    @_history(list[Kept])
    def keep_conditions(self, ref: Ref, conditions: Sequence[Condition], digest: str, at: float) -> list[Kept]:
        """Set the conditions of an object; return those whose status is new. ``since`` stays with the status."""
        before = {kept.type: kept for kept in self.conditions([ref]).get(ref, ())}
        now = []
        for c in conditions:
            same = before.get(c.type)
            since = same.since if same is not None and same.status == c.status else at
            now.append(Kept(str(c.type), str(c.status), c.reason, _kept(c.message), digest, since))
        if now == list(before.values()):
            return []

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM conditions WHERE object = ?", (str(ref),))
            db.executemany(
                "INSERT INTO conditions VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (str(ref), k.type, place, k.status, k.reason, k.message, k.digest, k.since)
                    for place, k in enumerate(now)
                ],
            )

        self._db.write(write)
        return [kept for kept in now if kept.type not in before or before[kept.type].status != kept.status]

    def drifts(self) -> dict[tuple[Ref, str], Drifting]:
        """Every layer that is not right, by object and layer."""
        rows = self._db.read(lambda db: db.execute("SELECT object, layer, reason, since, cause FROM drifts").fetchall())
        return {(Ref.parse(name), layer): Drifting(*drift) for name, layer, *drift in rows}

    @_history(lambda: None)
    def keep_drifts(self, current: Mapping[tuple[Ref, str], tuple[str, str]], at: float) -> None:
        """Set all drift there is, as (reason, cause). What was there before keeps its ``since``, with any reason."""
        before = self.drifts()
        now = {
            key: Drifting(reason, before[key].since if key in before else at, cause)
            for key, (reason, cause) in current.items()
        }
        if now == before:
            return

        def write(db: sqlite3.Connection) -> None:
            db.executemany(
                "DELETE FROM drifts WHERE object = ? AND layer = ?",
                [(str(ref), layer) for ref, layer in before.keys() - now.keys()],
            )
            db.executemany(
                "INSERT OR REPLACE INTO drifts (object, layer, reason, cause, since) VALUES (?, ?, ?, ?, ?)",
                [
                    (str(ref), layer, drift.reason, drift.cause, drift.since)
                    for (ref, layer), drift in now.items()
                    if before.get((ref, layer)) != drift
                ],
            )

        self._db.write(write)

    # Events

    @_history(bool)
    def event(self, event: Event) -> bool:
        """Keep an event; False when one of its key is kept already. Old events go from time to time."""

        def write(db: sqlite3.Connection) -> bool:
            cursor = db.execute(
                """INSERT OR IGNORE INTO events (key, at, kind, object, layer, action, step, cause, result, message,
                    digest, "commit", seconds) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
                (
                    event.key,
                    event.at,
                    str(event.kind),
                    None if event.object is None else str(event.object),
                    event.layer,
                    event.action,
                    event.step,
                    event.cause,
                    event.result,
                    _kept(event.message),
                    event.digest,
                    event.commit,
                    event.seconds,
                ),
            )
            added = cursor.rowcount == 1
            if added and cursor.lastrowid is not None and cursor.lastrowid % 1000 == 0:
                _prune(db, cursor.lastrowid, event.at)
            return added

        return self._db.write(write)

    def events(
        self,
        object: Ref | None = None,  # noqa: A002 - the word of an event's own field
        since: float | None = None,
        kind: str | None = None,
        limit: int | None = None,
        after: int = 0,
    ) -> list[Event]:
        """Events in the order of remembering: of an object, at or after a time, of a kind, after a number.

        ``limit`` keeps the last ones.
        """
        where: list[str] = ["number > ?"]
        values: list[str | float] = [after]
        for clause, value in (
            ("object = ?", None if object is None else str(object)),
            ("at >= ?", since),
            ("kind = ?", None if kind is None else str(kind)),
        ):
            if value is not None:
                where.append(clause)
                values.append(value)
        rows = self._db.read(
            lambda db: db.execute(
                f"""SELECT key, at, kind, object, layer, action, step, cause, result, message, digest, "commit",
                    seconds, number FROM events WHERE {" AND ".join(where)}
                    ORDER BY number DESC LIMIT ?""",  # noqa: S608 - the clauses are those above
                (*values, -1 if limit is None else limit),
            ).fetchall()
        )
        return [
            Event(key, at, what, None if name is None else Ref.parse(name), *rest)
            for key, at, what, name, *rest in reversed(rows)
        ]

    def objects(self) -> set[Ref]:
        """Every object that an event or a spec is kept of."""
        rows = self._db.read(
            lambda db: db.execute(
                "SELECT object FROM applied UNION SELECT object FROM events WHERE object IS NOT NULL"
            ).fetchall()
        )
        return {Ref.parse(name) for (name,) in rows}

    # History of specs

    @_history(bool)
    def applied(self, ref: Ref, digest: str, text: str, commit: str, at: float) -> bool:
        """Keep that a spec of an object is wanted from now on; False when it is the one that was wanted already.

        ``text`` is ``Specs.canonical``. The one before it that was not reached is superseded.
        """
        last = next(iter(self.history(ref, 1)), None)
        if last is not None and last.digest == digest:
            return False

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "UPDATE applied SET outcome = ?, outcome_at = ? WHERE object = ? AND outcome IN (?, ?)",
                (Outcome.SUPERSEDED, at, str(ref), Outcome.APPLYING, Outcome.FAILED),
            )
            db.execute(
                """INSERT INTO applied (object, digest, text, "commit", at, outcome, outcome_at)
                    VALUES (?, ?, ?, ?, ?, ?, ?)""",
                (str(ref), digest, text, commit, at, Outcome.APPLYING, at),
            )

        self._db.write(write)
        return True

    @_history(lambda: None)
    def outcome(self, ref: Ref, digest: str, outcome: str, at: float) -> None:
        """Keep what became of the spec of an object that was applied last with that digest."""

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                """UPDATE applied SET outcome = ?1, outcome_at = ?2,
                    reached_at = CASE ?1 WHEN 'reached' THEN coalesce(reached_at, ?2) ELSE reached_at END
                    WHERE outcome != ?1 AND number =
                        (SELECT max(number) FROM applied WHERE object = ?3 AND digest = ?4)""",
                (str(outcome), at, str(ref), digest),
            )

        self._db.write(write)

    def history(self, ref: Ref | None = None, limit: int | None = None) -> list[Applied]:
        """The specs that were applied (of one object), the last one first."""
        rows = self._db.read(
            lambda db: db.execute(
                """SELECT object, digest, text, "commit", at, outcome, outcome_at FROM applied
                    WHERE ?1 IS NULL OR object = ?1 ORDER BY number DESC LIMIT ?2""",
                (None if ref is None else str(ref), -1 if limit is None else limit),
            ).fetchall()
        )
        return [Applied(Ref.parse(name), *rest) for name, *rest in rows]

    def reached(self, ref: Ref) -> str | None:
        """The digest of the last spec that the object was in sync with, None when there is none."""
        row = self._db.read(
            lambda db: db.execute(
                "SELECT digest FROM applied WHERE object = ? AND reached_at IS NOT NULL ORDER BY number DESC LIMIT 1",
                (str(ref),),
            ).fetchone()
        )
        return None if row is None else str(row[0])

    # The last good reading of spec files

    def last_good(self) -> dict[str, bytes]:
        """What was in each spec file when it was last good, by path."""
        rows = self._db.read(lambda db: db.execute("SELECT path, text FROM files").fetchall())
        return {path.decode("utf-8", "surrogateescape"): text for path, text in rows}

    @_history(lambda: None)
    def keep_good(self, texts: Mapping[str, bytes]) -> None:
        """Keep what is in good spec files, byte for byte. Files that are not named stay as they were."""
        before = self.last_good()
        new = [(_path_bytes(path), text) for path, text in texts.items() if before.get(path) != text]
        if new:

            def write(db: sqlite3.Connection) -> None:
                db.executemany("INSERT OR REPLACE INTO files (path, text) VALUES (?, ?)", new)

            self._db.write(write)

    @_history(lambda: None)
    def forget_file(self, path: str) -> None:
        """Forget a spec file that is gone, and that nothing depends on any more."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM files WHERE path = ?", (_path_bytes(path),))

        self._db.write(write)

    # Backoff

    def backoffs(self) -> dict[Key, Backoff]:
        """What did not work and is left alone for a while, or is about to be tried again."""
        rows = self._db.read(
            lambda db: db.execute("SELECT object, layer, action, tries, until, message FROM backoffs").fetchall()
        )
        return {(Ref.parse(name), layer, action): Backoff(*rest) for name, layer, action, *rest in rows}

    @_history(lambda: None)
    def back_off(self, key: Key, backoff: Backoff) -> None:
        """Leave an action in a layer of an object alone for a while."""
        ref, layer, action = key

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT OR REPLACE INTO backoffs (object, layer, action, tries, until, message) VALUES (?,?,?,?,?,?)",
                (str(ref), layer, action, backoff.tries, backoff.until, _kept(backoff.message)),
            )

        self._db.write(write)

    @_history(lambda: None)
    def forgive(self, what: Ref | Key) -> None:
        """Forget the backoff of an object, or of one action in one of its layers."""
        ref, layer, action = (what, None, None) if isinstance(what, Ref) else what

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "DELETE FROM backoffs WHERE object = ?1 AND (?2 IS NULL OR layer = ?2) AND (?3 IS NULL OR action = ?3)",
                (str(ref), layer, action),
            )

        self._db.write(write)

    # Approvals

    def approve(self, *approvals: Approval) -> None:
        """Keep approvals that were given together; they take the place of earlier ones for the same. Raises NoState."""
        rows = [
            {
                "id": each.id,
                "permission": each.permission.value,
                "object": str(each.object),
                "of": str(each.of),
                "layer": each.layer,
                "action": each.action,
                "reason": each.reason,
                "digest": each.digest,
                "until": each.until,
                "why": _kept(each.why),
                "by": each.by,
                "at": each.at,
                "summary": _kept(each.summary),
            }
            for each in approvals
        ]

        def write(db: sqlite3.Connection) -> None:
            db.executemany(
                """UPDATE approvals SET lapsed_at = :at WHERE used_at IS NULL AND lapsed_at IS NULL
                    AND permission = :permission AND object = :object AND of = :of AND layer = :layer
                    AND action = :action AND reason = :reason AND summary = :summary""",
                rows,
            )
            db.executemany(
                """INSERT INTO approvals VALUES (:id, :permission, :object, :of, :layer, :action, :reason, :digest,
                    :until, :why, :by, :at, :summary, NULL, NULL)""",
                rows,
            )

        self._db.write(write)

    def approvals(self, now: float) -> list[Approval]:
        """The approvals in force: not used up, not lapsed, their time not over. Raises NoState."""
        rows = self._db.read(
            lambda db: db.execute(
                """SELECT id, permission, object, of, layer, action, reason, digest, until, why, by, at, summary
                    FROM approvals WHERE used_at IS NULL AND lapsed_at IS NULL AND (until IS NULL OR until > ?)
                    ORDER BY at, rowid""",
                (now,),
            ).fetchall()
        )
        return [
            Approval(number, Permission(permission), Ref.parse(name), Ref.parse(of), *rest)
            for number, permission, name, of, *rest in rows
            if number not in self._spent
        ]

    def used(self, id: str, at: float) -> None:  # noqa: A002 - the word of an approval's own field
        """An approval is used up: a step that needed it has worked. It is not given again, written or not."""
        self._spend("UPDATE approvals SET used_at = ? WHERE id = ? AND used_at IS NULL", id, at)

    def lapse(self, id: str, at: float) -> None:  # noqa: A002 - the word of an approval's own field
        """An approval is good for nothing any more: what it was given for is over. Written or not."""
        self._spend("UPDATE approvals SET lapsed_at = ? WHERE id = ? AND lapsed_at IS NULL", id, at)

    @_history(lambda: None)
    def _spend(self, statement: str, id: str, at: float) -> None:  # noqa: A002
        self._spent.add(id)

        def write(db: sqlite3.Connection) -> None:
            db.execute(statement, (at, id))

        self._db.write(write)

    # Suspensions

    def suspend(self, suspension: Suspension) -> None:
        """Leave an object alone; takes the place of an earlier suspension of it. Raises NoState."""

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT OR REPLACE INTO suspensions (object, until, reason, by, at) VALUES (?, ?, ?, ?, ?)",
                (str(suspension.object), suspension.until, _kept(suspension.reason), suspension.by, suspension.at),
            )

        self._db.write(write)

    def resume(self, ref: Ref) -> bool:
        """End a suspension; False when there is none. Raises NoState."""

        def write(db: sqlite3.Connection) -> bool:
            return db.execute("DELETE FROM suspensions WHERE object = ?", (str(ref),)).rowcount > 0

        return self._db.write(write)

    def suspensions(self, now: float) -> dict[Ref, Suspension]:
        """What is to be left alone at a moment. Raises NoState: unknown is not absent."""
        rows = self._db.read(
            lambda db: db.execute(
                "SELECT object, until, reason, by, at FROM suspensions WHERE until IS NULL OR until > ?", (now,)
            ).fetchall()
        )
        return {ref: Suspension(ref, *rest) for name, *rest in rows for ref in (Ref.parse(name),)}

    @_history(lambda: None)
    def forget(self, ref: Ref) -> None:
        """Forget the state of an object that is in no spec any more: conditions, drift, backoff. Its history stays."""

        def write(db: sqlite3.Connection) -> None:
            for table in ("conditions", "drifts", "backoffs"):
                db.execute(f"DELETE FROM {table} WHERE object = ?", (str(ref),))  # noqa: S608 - the three names above

        self._db.write(write)


def _kept(message: str) -> str:
    """A message as it is kept: without secrets, and with bytes of a host that are no characters spelt out."""
    return without_secrets(message).encode("utf-8", "backslashreplace").decode()


def _path_bytes(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")  # a file's name may be any bytes


def _prune(db: sqlite3.Connection, last: int, at: float) -> None:
    db.execute("DELETE FROM events WHERE at < ? OR number <= ?", (at - KEPT_SECONDS, last - KEPT_EVENTS))
