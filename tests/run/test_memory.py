"""What the controller remembers, whatever happens to the file and to who writes it."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.core.conditions import Condition, Status, Type
from controller.core.permissions import Approval
from controller.core.suspension import Suspension
from controller.run import memory as memory_module
from controller.run.memory import Applied, Backoff, Drifting, Event, Kind, Memory, Outcome
from controller.run.state import NoState
from controller.spec.policy import Permission
from controller.spec.ref import Ref

HOST, CT = Ref("Host", "kpro5"), Ref("Container", "ct129")
CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def memory(state: Path) -> Iterator[Memory]:
    opened = Memory.open(state)
    yield opened
    opened.close()


def ready(status: Status = Status.TRUE, message: str = "") -> Condition:
    return Condition(Type.READY, status, "InSync", message)


def approval(name: str = "1", *, until: float | None = None, reason: str = "not-on-nvidia") -> Approval:
    return Approval(
        name, Permission.REBIND_GPU, HOST, HOST, "host.gpu-binding", "bind-gpu", reason, "d" * 64, until, "", "me", 1.0
    )


def event(key: str, at: float = 1.0, ref: Ref | None = CT, kind: Kind = Kind.SPEC) -> Event:
    return Event(key, at, kind, ref)


def test_a_condition_keeps_its_time_while_its_status_is_the_same(memory: Memory) -> None:
    stalled = Condition(Type.STALLED, Status.FALSE, "InSync", "")
    assert [k.type for k in memory.keep_conditions(CT, [ready(), stalled], "a", 10.0)] == ["Ready", "Stalled"]
    assert memory.keep_conditions(CT, [ready(message="still"), stalled], "b", 20.0) == []
    kept = memory.conditions()[CT]
    assert [(k.type, k.since, k.digest, k.message) for k in kept] == [
        ("Ready", 10.0, "b", "still"),
        ("Stalled", 10.0, "b", ""),
    ]
    (changed,) = memory.keep_conditions(CT, [ready(Status.UNKNOWN), stalled], "b", 30.0)
    assert (changed.status, changed.since) == ("Unknown", 30.0)
    assert memory.conditions([HOST]) == {}
    memory.forget(CT)
    assert memory.conditions() == {}


def test_drift_keeps_its_time_while_it_lasts(memory: Memory) -> None:
    memory.keep_drifts({(CT, "a"): ("off", "corrective"), (HOST, "b"): ("off", "intentional")}, 1.0)
    memory.keep_drifts({(CT, "a"): ("other", "corrective")}, 2.0)
    assert memory.drifts() == {(CT, "a"): Drifting("other", 1.0, "corrective")}
    memory.keep_drifts({}, 3.0)
    memory.keep_drifts({(CT, "a"): ("off", "corrective")}, 4.0)
    assert memory.drifts()[CT, "a"].since == 4.0


def test_an_event_is_kept_once(memory: Memory) -> None:
    assert memory.event(event("a"))
    assert not memory.event(event("a", at=2.0))
    assert memory.event(event("b", 5.0, None, Kind.CONTROLLER))
    assert [e.key for e in memory.events()] == ["a", "b"]
    assert [e.key for e in memory.events(CT)] == ["a"]
    assert [e.key for e in memory.events(since=2.0)] == ["b"]
    assert [e.key for e in memory.events(kind=Kind.CONTROLLER)] == ["b"]
    assert [e.key for e in memory.events(limit=1)] == ["b"]
    (first, second) = memory.events()
    assert memory.events(after=first.number) == [second]
    assert memory.objects() == {CT}


def test_old_events_go(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "KEPT_EVENTS", 600)
    late = memory_module.KEPT_SECONDS + 10.0
    with memory.together():
        for number in range(1, 1001):
            memory.event(event(str(number), 1.0 if number <= 500 else late))
    assert [e.key for e in memory.events(limit=2)] == ["999", "1000"]
    assert len(memory.events()) == 500  # those of the first second are older than 90 days
    with memory.together():
        for number in range(1001, 2001):
            memory.event(event(str(number), late))
    assert next(e.key for e in memory.events()) == "1401"


def test_messages_are_kept_without_secrets_and_in_any_bytes(memory: Memory) -> None:
    token = "hf_" + "a1" * 12
    memory.event(Event("k", 1.0, Kind.SPEC, CT, message=f"cannot log in with {token}: \udcff"))
    memory.keep_conditions(CT, [ready(message=token)], "", 1.0)
    memory.back_off((CT, "l", "a"), Backoff(1, 2.0, token))
    assert memory.events()[0].message == "cannot log in with [withheld]: \\udcff"
    assert memory.conditions()[CT][0].message == memory.backoffs()[CT, "l", "a"].message == "[withheld]"
    assert memory.trouble == ""


def test_what_became_of_specs(memory: Memory) -> None:
    assert memory.applied(CT, "a", "{}", "c1", 1.0)
    assert not memory.applied(CT, "a", "{}", "c2", 2.0)
    assert memory.reached(CT) is None
    memory.outcome(CT, "a", Outcome.REACHED, 3.0)
    assert memory.applied(CT, "b", '{"x":1}', "c2", 4.0)
    memory.outcome(CT, "b", Outcome.FAILED, 5.0)
    assert memory.reached(CT) == "a"
    assert memory.applied(CT, "c", "{}", "c3", 6.0)
    memory.outcome(CT, "c", Outcome.REACHED, 7.0)
    memory.outcome(CT, "c", Outcome.REACHED, 8.0)
    assert memory.applied(HOST, "a", "{}", "", 9.0)
    assert memory.history(CT) == [
        Applied(CT, "c", "{}", "c3", 6.0, "reached", 7.0),
        Applied(CT, "b", '{"x":1}', "c2", 4.0, "superseded", 6.0),
        Applied(CT, "a", "{}", "c1", 1.0, "reached", 3.0),
    ]
    assert memory.reached(CT) == "c"
    assert memory.applied(CT, "a", "{}", "c4", 10.0)  # back to what it was
    assert memory.reached(CT) == "c"
    assert memory.history(limit=1)[0].commit == "c4"


def test_good_files_are_kept_byte_for_byte(memory: Memory) -> None:
    memory.keep_good({"a.yaml": b"\xff\x00", "odd\udcff.yaml": b"x"})
    memory.keep_good({"a.yaml": b"new"})
    assert memory.last_good() == {"a.yaml": b"new", "odd\udcff.yaml": b"x"}
    memory.forget_file("odd\udcff.yaml")
    assert memory.last_good() == {"a.yaml": b"new"}


def test_backoff_by_object_layer_and_action(memory: Memory) -> None:
    memory.back_off((CT, "l", "a"), Backoff(1, 5.0, "x"))
    memory.back_off((CT, "l", "a"), Backoff(2, 9.0, "y"))
    memory.back_off((CT, "l", "b"), Backoff(1, 5.0, "z"))
    memory.back_off((HOST, "l", "a"), Backoff(1, 5.0, "z"))
    memory.forgive((CT, "l", "b"))
    assert memory.backoffs() == {(CT, "l", "a"): Backoff(2, 9.0, "y"), (HOST, "l", "a"): Backoff(1, 5.0, "z")}
    memory.forgive(CT)
    assert set(memory.backoffs()) == {(HOST, "l", "a")}


def test_approvals_end_by_use_by_lapse_and_by_time(memory: Memory) -> None:
    kept = [approval("1"), approval("2", reason="b"), approval("3", until=50.0, reason="c")]
    memory.approve(*kept)
    assert memory.approvals(10.0) == kept
    memory.used("1", 11.0)
    assert [a.id for a in memory.approvals(12.0)] == ["2", "3"]
    memory.lapse("2", 13.0)
    assert [a.id for a in memory.approvals(14.0)] == ["3"]
    assert memory.approvals(50.0) == []
    again = approval("4", reason="c")
    memory.approve(again)
    assert memory.approvals(15.0) == [again]  # in place of the one before


def test_suspensions(memory: Memory) -> None:
    memory.suspend(Suspension(CT, None, "a", "me", 1.0))
    memory.suspend(Suspension(CT, 10.0, "b", "me", 2.0))
    assert memory.suspensions(9.0) == {CT: Suspension(CT, 10.0, "b", "me", 2.0)}
    assert memory.suspensions(10.0) == {}
    assert memory.resume(CT)
    assert not memory.resume(CT)


def test_all_of_it_is_there_again_after_a_restart(state: Path) -> None:
    first = Memory.open(state)
    first.keep_conditions(CT, [ready()], "a", 1.0)
    first.back_off((CT, "l", "a"), Backoff(3, 99.0, "x"))
    first.approve(approval())
    first.suspend(Suspension(CT, None, "", "me", 1.0))
    first.close()
    second = Memory.open(state)
    assert second.notes == ()
    assert second.conditions()[CT][0].since == 1.0
    assert second.backoffs() == {(CT, "l", "a"): Backoff(3, 99.0, "x")}
    assert second.approvals(2.0) == [approval()]
    assert list(second.suspensions(2.0)) == [CT]
    second.close()


def test_nobody_else_can_read_it(state: Path) -> None:
    before = os.umask(0)
    try:
        memory = Memory.open(state)
        memory.event(event("a"))
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (state, *state.iterdir())}
    finally:
        os.umask(before)
    memory.close()
    assert modes.pop("state") == 0o700
    assert {"memory.db", "memory.db-wal"} <= modes.keys()
    assert set(modes.values()) == {0o600}
    (state / "memory.db").chmod(0o644)
    Memory.open(state).close()
    assert stat.S_IMODE((state / "memory.db").stat().st_mode) == 0o600


def test_another_process_writes(state: Path, memory: Memory) -> None:
    assert not memory.changed()
    memory.event(event("mine"))
    assert not memory.changed()
    _in_process(state, "memory.suspend(Suspension(CT, None, 'tests', 'somebody', 1.0))")
    assert memory.changed()
    assert not memory.changed()
    assert list(memory.suspensions(2.0)) == [CT]


PROLOGUE = """
import sys
from pathlib import Path
from controller.core.suspension import Suspension
from controller.run.memory import Event, Kind, Memory
from controller.run.state import NoState
from controller.spec.ref import Ref
CT = Ref("Container", "ct129")
memory = Memory.open(Path(sys.argv[1]))
"""


def _command(state: Path, code: str) -> list[str]:
    return [sys.executable, "-c", PROLOGUE + code, str(state)]


def _in_process(state: Path, code: str) -> str:
    done = subprocess.run(_command(state, code), cwd=CHECKOUT, check=True, capture_output=True, text=True, timeout=300)
    return done.stdout


def test_processes_and_threads_write_at_once_and_nothing_is_lost_or_doubled(state: Path, memory: Memory) -> None:
    code = """
for n in range(100):
    memory.event(Event(f"all-{n}", 1.0, Kind.SPEC, CT))
    memory.event(Event(f"{sys.argv[2]}-{n}", 1.0, Kind.SPEC, CT))
assert memory.trouble == "", memory.trouble
"""
    others = [subprocess.Popen([*_command(state, code), name], cwd=CHECKOUT) for name in ("one", "two")]

    def write(name: str) -> None:
        for n in range(100):
            memory.event(event(f"all-{n}"))
            memory.event(event(f"{name}-{n}"))

    threads = [threading.Thread(target=write, args=(name,)) for name in ("three", "four")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [other.wait(300) for other in others] == [0, 0]
    keys = [e.key for e in memory.events()]
    names = ("all", "one", "two", "three", "four")
    assert sorted(keys) == sorted(f"{name}-{n}" for name in names for n in range(100))


def test_a_process_that_is_killed_leaves_whole_transactions(state: Path) -> None:
    code = """
n = len(memory.events()) // 2
while True:
    with memory.together():
        memory.event(Event(f"a-{n}", 1.0, Kind.SPEC, CT))
        memory.event(Event(f"b-{n}", 1.0, Kind.SPEC, CT))
    print(n, flush=True)
    n += 1
"""
    told: list[int] = []
    for lines in (1, 7, 40):
        writer = subprocess.Popen(_command(state, code), cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        told += [int(writer.stdout.readline()) for _ in range(lines)]
        writer.send_signal(signal.SIGKILL)
        told += [int(line) for line in writer.stdout if line.endswith("\n")]
        writer.wait()
        writer.stdout.close()
    memory = Memory.open(state)
    keys = {e.key for e in memory.events()}
    memory.close()
    assert memory.notes == ()
    assert {f"{half}-{n}" for n in told for half in "ab"} <= keys
    assert {key.removeprefix("a-") for key in keys if key[0] == "a"} == {
        key.removeprefix("b-") for key in keys if key[0] == "b"
    }


def _aside(state: Path, why: str) -> list[Path]:
    return [path for path in state.glob(f"memory.db.{why}-*") if not path.name.endswith(("-wal", "-shm"))]


def _filled(state: Path, events: int = 500) -> Path:
    memory = Memory.open(state)
    with memory.together():
        for n in range(events):
            memory.event(Event(f"{n}", 1.0, Kind.SPEC, CT, message="x" * 200))
    memory.close()
    return state / "memory.db"


@pytest.mark.parametrize("where", [0, 8192 + 100], ids=["its-head", "a-page"])
def test_a_damaged_file_is_kept_aside(state: Path, where: int) -> None:
    path = _filled(state)
    with path.open("r+b") as file:
        file.seek(where)
        file.write(b"\xde\xad" * 2000)
    damaged = path.read_bytes()
    memory = Memory.open(state)
    (note,) = memory.notes
    (aside,) = _aside(state, "corrupt")
    assert aside.name in note
    assert aside.read_bytes() == damaged
    assert memory.events() == []
    assert memory.event(event("goes on"))
    memory.close()
    again = Memory.open(state)
    assert again.notes == ()
    assert [e.key for e in again.events()] == ["goes on"]
    again.close()


def test_a_file_that_is_damaged_while_it_is_open_is_kept_aside(state: Path) -> None:
    path = _filled(state, 15_000)  # more than SQLite keeps in its cache
    memory = Memory.open(state)
    with path.open("r+b") as file:
        file.write(b"\xde\xad" * (path.stat().st_size // 2))
    assert memory.events() == []
    assert memory.event(event("goes on"))
    assert len(memory.notes) == len(_aside(state, "corrupt")) == 1
    memory.close()


def test_a_file_of_a_newer_release_is_kept_aside(state: Path) -> None:
    path = _filled(state)
    with sqlite3.connect(path) as newer:
        newer.execute("PRAGMA user_version = 99")
    newer.close()
    memory = Memory.open(state)
    (note,) = memory.notes
    assert "version 99" in note
    assert memory.event(event("goes on"))
    memory.close()
    (aside,) = _aside(state, "newer")
    with sqlite3.connect(aside) as kept:
        assert kept.execute("SELECT count(*) FROM events").fetchone() == (500,)
    kept.close()


@pytest.mark.parametrize("parts", [("",), ("", "-wal", "-shm")], ids=["alone", "all"])
def test_a_file_that_is_lost_while_another_has_it_open(state: Path, memory: Memory, parts: tuple[str, ...]) -> None:
    memory.event(event("before"))
    for part in parts:
        (state / f"memory.db{part}").unlink()
    other = Memory.open(state)
    other.suspend(Suspension(CT, None, "", "other", 1.0))
    assert memory.changed()
    assert list(memory.suspensions(2.0)) == [CT]
    assert memory.event(event("after"))
    assert [e.key for e in other.events()] == ["after"]
    assert other.notes == memory.notes == ()
    other.close()


def test_an_earlier_version_is_brought_up_to_date(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _filled(state)
    later = (*memory_module.MIGRATIONS, ("ALTER TABLE suspensions ADD COLUMN ticket TEXT",))
    monkeypatch.setattr(memory_module, "MIGRATIONS", later)
    memory = Memory.open(state)
    assert memory.notes == ()
    assert len(memory.events()) == 500
    memory.close()
    with sqlite3.connect(state / "memory.db") as file:
        assert file.execute("PRAGMA user_version").fetchone() == (len(later),)
        file.execute("SELECT ticket FROM suspensions")
    file.close()


def test_a_migration_that_fails_leaves_the_file_as_it_was(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _filled(state)
    broken = (*memory_module.MIGRATIONS, ("ALTER TABLE suspensions ADD COLUMN ticket TEXT", "NO SUCH STATEMENT"))
    with monkeypatch.context() as patched:
        patched.setattr(memory_module, "MIGRATIONS", broken)
        with pytest.raises(NoState, match="syntax error"):
            Memory.open(state)
    memory = Memory.open(state)
    assert (memory.notes, len(memory.events())) == ((), 500)
    memory.close()


def test_a_full_disk_loses_history_and_never_a_decision(state: Path) -> None:
    said = _in_process(
        state,
        """
import resource
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
memory.event(Event("before", 1.0, Kind.SPEC, CT))
limit(0)
print(memory.event(Event("lost", 1.0, Kind.SPEC, CT)), bool(memory.trouble))
with memory.together():
    memory.event(Event("lost too", 1.0, Kind.SPEC, CT))
try:
    memory.suspend(Suspension(CT, None, "", "me", 1.0))
except NoState as error:
    print("refused")
limit(resource.RLIM_INFINITY)
print(memory.event(Event("after", 1.0, Kind.SPEC, CT)), repr(memory.trouble), memory.notes)
print([e.key for e in memory.events()])
""",
    )
    assert said.splitlines() == ["False True", "refused", "True '' ()", "['before', 'after']"]


def test_a_place_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NoState, match="cannot remember anything in"):
        Memory.open(tmp_path / "file" / "state")
