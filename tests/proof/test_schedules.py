"""Schedules in CI: those that once failed, a fixed set, and new ones each time."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.proof.fleets import STARTS
from tests.proof.schedule import KINDS, Event, Play, Schedule, smallest

FIXED = range(int(os.environ.get("RECONCILE_SCHEDULES", "120")))
ONCE_FAILED = {
    "the loop's first life with the hosts' file broken": "story-done/loop spoil.29512 loop.84011",
}


@pytest.mark.parametrize("name", list(ONCE_FAILED))
def test_what_once_failed(name: str) -> None:
    assert Play(Schedule.parse(ONCE_FAILED[name])).run().violations == []


@pytest.mark.parametrize("block", range(FIXED.start, FIXED.stop, 10))
def test_a_fixed_set(block: int) -> None:
    for seed in FIXED[block : block + 10]:
        schedule = Schedule.of(seed)
        book = Play(schedule).run()
        assert book.violations == [], f"seed {seed}: {schedule}\n" + "\n".join(book.log)


class Fleets(RuleBasedStateMachine):
    """Any event after any other; when hypothesis has had enough, faults end and the fleet has to come to rest."""

    play: Play | None = None

    @initialize(start=st.sampled_from(STARTS), last=st.sampled_from(["once", "loop"]))
    def begin(self, start: str, last: str) -> None:
        self.play = Play(Schedule(start, last, ()))
        self.events: list[Event] = []

    @precondition(lambda self: self.play is not None)
    @rule(kind=st.sampled_from(list(KINDS)), seed=st.integers(0, 99_999))
    def happen(self, kind: str, seed: int) -> None:
        event = Event(kind, seed)
        self.events.append(event)
        assert self.play is not None
        self.play.happen(event)
        self.holds()

    def holds(self) -> None:
        assert self.play is not None
        book, schedule = self.play.book, self.play.schedule
        if book.violations:
            note(f"replay: {Schedule(schedule.start, schedule.last, tuple(self.events))}")
            note("\n".join(book.log))
        assert book.violations == []

    def teardown(self) -> None:
        if self.play is None:
            return
        try:
            self.play.come_to_rest()
            self.holds()
        finally:
            self.play.close()


TestFleets = Fleets.TestCase
TestFleets.settings = settings(
    max_examples=60, stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck)
)


def some_schedule() -> Iterator[Schedule]:
    yield Schedule.parse("story/once drive.1 odd.2 drive.3 wait.4")


def test_a_schedule_is_its_text_and_plays_the_same_each_time() -> None:
    for schedule in (*some_schedule(), *map(Schedule.of, range(20, 24))):
        assert Schedule.parse(str(schedule)) == schedule
        one, other = Play(schedule).run(), Play(schedule).run()
        assert one.log == other.log
        assert one.faults == other.faults


def test_the_smallest_sequence_is_what_the_failure_needs() -> None:
    schedule = Schedule.parse("demo/once odd.1 wait.2 drive.3 odd.4 drive.5")
    needed = {Event("wait", 2), Event("drive", 5)}
    least = smallest(schedule, lambda one: needed <= set(one.events))
    assert str(least) == "demo/once wait.2 drive.5"
