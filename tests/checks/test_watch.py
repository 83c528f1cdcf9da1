"""The watch: how far up a server is, dead told from busy, ends that nobody asked for."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from controller.layers.shared.checks import files, watch
from controller.layers.shared.checks.place import UnitState, process
from controller.layers.shared.checks.watch import Watch
from tests.checks.engine import Engine, Played, place, playing

OURS = process(1) or "1 1"


@dataclass
class Clock:
    """A clock that stands still until it is told to go on."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Watching:
    """A watch over a played server."""

    place: Played
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.place.said = UnitState("active", 0, OURS, "success: exited 0")
        self.watch = Watch(self.place, self.clock)

    def look(self, after: float = 10.0) -> dict[str, Any]:
        self.clock.now += after
        return self.watch.look()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silences are long enough in a second."""
    monkeypatch.setattr(watch, "PROBE_TIMEOUT", 1.0)
    monkeypatch.setattr(watch, "ANSWER_TIMEOUT", 1.0)


def test_the_ladder(tmp_path: Path) -> None:
    engine = Engine(models_status=503)
    with playing(tmp_path / "server", engine) as place:
        one = Watching(place)
        assert one.look()["level"] == "wrapper-only"
        engine.models_status, engine.models = 200, ["another"]
        found = one.look()
        assert (found["level"], found["evidence"]) == ("wrong-model", "it serves another, not m")
        engine.models, engine.status = ["m"], 500
        found = one.look()
        assert found["level"] == "generation-fails"
        assert "HTTP 500" in found["evidence"]
        assert (found["took"], found["starting"] > 0) == (None, True)
        engine.status = 200
        found = one.look()
        assert (found["level"], found["starting"]) == ("generates", 0)
        assert found["took"] > 0


def test_nothing_listens(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        one = Watching(place(tmp_path / "server", closed.getsockname()[1], Engine()))
        found = one.look()
        assert (found["level"], found["evidence"]) == ("no-answer", "nothing listens on its port")
        one.place.said = UnitState("activating", 1, "", "signal: killed 9")
        assert one.look()["evidence"] == "it does not run (activating, signal: killed 9)"


def test_what_moves_is_not_asked(tmp_path: Path) -> None:
    engine = Engine()
    with playing(tmp_path / "server", engine) as place:
        one = Watching(place)
        assert one.look()["level"] == "generates"
        before = len(engine.requests)
        engine.running, engine.waiting, engine.status = 8, 100, 500  # it would fail, if it was asked
        for _ in range(30):
            engine.generation_tokens += 7
            found = one.look()
            assert (found["level"], found["running"], found["waiting"]) == ("generates", 8, 100)
        assert len(engine.requests) == before


def test_what_rests_is_asked_seldom(tmp_path: Path) -> None:
    engine = Engine()
    with playing(tmp_path / "server", engine) as place:
        one = Watching(place)
        for _ in range(13):
            assert one.look()["level"] == "generates"
        assert 2 <= len(engine.requests) <= 4


def test_an_old_gauge_does_not_make_it_stuck(tmp_path: Path) -> None:
    engine = Engine(running=1)  # SGLang shows the last request until the next one
    with playing(tmp_path / "server", engine) as place:
        one = Watching(place)
        for _ in range(60):
            found = one.look()
            assert (found["level"], found["stuck"]) == ("generates", 0)


def test_work_without_progress_and_without_an_answer_is_stuck(tmp_path: Path) -> None:
    engine = Engine()
    with playing(tmp_path / "server", engine) as place:
        one = Watching(place)
        one.look()
        engine.waiting, engine.status = 5, 504
        assert one.look(70)["level"] == "inconclusive"  # once is no verdict
        found = one.look(70)
        assert (found["level"], found["waiting"]) == ("generation-fails", 5)
        assert found["stuck"] == 140
        assert one.look(200)["stuck"] == 340
        engine.status = 200
        found = one.look(70)
        assert (found["level"], found["stuck"]) == ("generates", 0)


def test_a_silent_server_without_work_fails_and_is_not_stuck(tmp_path: Path) -> None:
    engine = Engine()
    with playing(tmp_path / "server", engine) as place:
        one = Watching(place)
        assert one.look()["took"] is not None
        engine.silent.set()
        assert one.look()["level"] == "inconclusive"
        found = one.look()
        assert (found["level"], found["stuck"]) == ("no-answer", 0)
        assert found["took"] is not None


def test_a_silence_among_others_of_a_server_that_counts_nothing_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(has_metrics=False)
    with playing(tmp_path / "server", engine) as place:
        one = Watching(place)
        one.look()
        monkeypatch.setattr(watch, "others", lambda port, ours=0: 3)
        engine.silent.set()
        for _ in range(4):
            assert one.look(70)["level"] == "inconclusive"


def test_a_new_run_begins_anew(tmp_path: Path) -> None:
    with playing(tmp_path / "server", Engine()) as place:
        one = Watching(place)
        assert one.look()["took"] is not None
        place.said = UnitState("active", 0, f"{OURS.split()[0]} 2", "success: exited 0")
        one.watch.server.port = 1
        found = one.look()
        assert (found["took"], found["process"]) == (None, place.said.process)


def test_ends_that_nobody_asked_for_are_counted_with_their_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "log", lambda unit, lines: ["CUDA out of memory"])
    with playing(tmp_path / "server", Engine()) as place:
        one = Watching(place)
        assert one.look()["ends"] == 0
        for restarts in (1, 2, 3, 4):
            place.said = UnitState("active", restarts, OURS, "signal: killed 9")
            found = one.look()
            assert found["ends"] == restarts
        assert len(found["crashes"]) == watch.KEPT_CRASHES
        assert found["crashes"][-1]["lines"] == ["CUDA out of memory"]
        place.said = UnitState("failed", 4, "", "signal: killed 9")
        assert one.look()["ends"] == 5
        assert one.look()["ends"] == 5  # the same end is counted once
        place.said = UnitState("active", 0, OURS, "success: exited 0")
        assert one.look()["ends"] == 0  # somebody started it
        assert one.look(4000)["ends"] == 0


def test_a_refused_key_tells_nothing(tmp_path: Path) -> None:
    with playing(tmp_path / "server", Engine(key="k")) as place:
        assert Watching(place).look()["level"] == "inconclusive"


def test_it_ends_when_its_server_is_stopped_and_says_what_it_saw(tmp_path: Path) -> None:
    with playing(tmp_path / "server", Engine()) as place:
        told = [UnitState("active", 0, OURS, ""), UnitState("active", 0, OURS, ""), UnitState("inactive", 0, "", "")]
        waits: list[float] = []

        class Stopped(type(place)):  # type: ignore[misc]
            def state(self) -> UnitState:
                return told.pop(0)

        stopped = Stopped(place.folder, place.units)
        assert watch.keep_watch(stopped, waits.append) == 0
        health = json.loads((place.folder / "health.json").read_text())
        assert (health["schema"], health["unit"]) == (1, "inactive")
        assert int((place.folder / "health.beat").read_text()) > 0
        assert waits == [watch.EVERY] * 2


@pytest.mark.parametrize(
    ("age", "result", "due"),
    [
        (7 * 3600, "passed", True),
        (3600, "passed", False),
        (3600, "inconclusive", True),
        (60, "inconclusive", False),
    ],
)
def test_canaries_are_run_again_when_they_are_due(
    tmp_path: Path, age: float, result: str, due: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with playing(tmp_path / "server", Engine()) as place:
        ran: list[list[str]] = []
        monkeypatch.setattr(watch.subprocess, "run", lambda command, **more: ran.append(command))
        monkeypatch.setattr(watch.time, "time", lambda: 1_000_000.0)
        said = {"measured_on": place.measured_on("1 1"), "checks": [{"result": result}], "at": 1_000_000.0 - age}
        watch.run_canaries(place, {"process": "1 1"})
        assert ran == []  # the first time they are a step
        files.write(place.folder / "checks/output.json", said)
        watch.run_canaries(place, {"process": "2 2"})
        assert ran == []
        watch.run_canaries(place, {"process": "1 1"})
        assert bool(ran) is due
        if due:
            assert ran[0][-3:] == ["output", str(place.folder), "again"]
