"""A pass over a world of switches, which answers and performs as a test tells it to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from controller.core.permissions import Grants
from controller.core.view import View
from controller.core.words import Disruption, Drift, InSync, Layer, Script, Step, Verdict, Wait
from controller.facts.units import How, Job, Unit, UnitFacts
from controller.facts.words import HostFacts, Observation, Section, Unknown
from controller.run.ended import Ended, Result
from controller.run.eyes import Eyes
from controller.run.once import AGAIN, FRESH, TRIES, Pass, Report
from controller.spec.model import Container, Specs
from controller.spec.policy import Permission, Policy, Window
from controller.spec.ref import Ref
from controller.world.port import Done, Look, Lost, Order, Outcome, Refused
from tests.core.builders import ALLOW_ALL, Reason, specs, switch_layer


class Switchboard:
    """Hosts that are switches: a section's text is ``on`` or ``off``, and a step that is performed turns it on."""

    def __init__(self, **hosts: dict[str, bool]) -> None:
        self.hosts = hosts
        self.answers: dict[str, list[Callable[[Order], Outcome]]] = {}
        self.performed: list[str] = []
        self.units: dict[str, UnitFacts | Unknown] = {name: UnitFacts(0, "boot") for name in hosts}
        self.dark: set[str] = set()
        self.looked: list[str] = []

    def layers(self, *layers: Layer) -> tuple[Layer, ...]:
        return tuple(dataclasses.replace(x, parse=lambda section: section.out == "on") for x in layers)

    def observe(self, looks: Sequence[Look]) -> Mapping[str, Observation]:
        self.looked += [look.host for look in looks]
        return {look.host: self._seen(look.host) for look in looks}

    def _seen(self, host: str) -> Observation:
        if host in self.dark:
            return Observation(host, 0.0, failure=Unknown("unreachable", "no route"))
        sections = {name: Section(0, "on" if on else "off") for name, on in self.hosts[host].items()}
        return Observation(host, 0.0, sections)

    def perform(self, order: Order) -> Outcome:
        self.performed.append(order.step.layer)
        queue = self.answers.get(order.step.layer)
        return queue.pop(0)(order) if queue else self.turn_on(order)

    def turn_on(self, order: Order) -> Outcome:
        self.hosts[order.step.hosts[0]][order.step.layer] = True
        return Done(0, "", "")

    def close(self) -> None:
        pass


class Clock:
    def __init__(self) -> None:
        self.at = 0.0
        self.during: list[Callable[[], None]] = []

    def now(self) -> float:
        return self.at

    def date(self) -> datetime:
        return datetime(2026, 1, 12, 2, tzinfo=UTC) + timedelta(seconds=self.at)  # a Monday

    def wait(self, seconds: float) -> None:
        self.at += seconds
        if self.during:
            self.during.pop(0)()


class Silent:
    def __init__(self) -> None:
        self.waits: list[str] = []

    def started(self, step: Step) -> None:
        pass

    def ended(self, ended: Ended) -> None:
        pass

    def waiting(self, message: str) -> None:
        self.waits.append(message)


class SwitchEyes(Eyes):
    """Eyes that put each host's units into its facts, as the world's own section would."""

    def look(self, hosts: object, max_age: float = 0.0) -> object:
        super().look(hosts, max_age)  # type: ignore[arg-type]
        board: Switchboard = self._world  # type: ignore[assignment]
        self._facts = {
            name: facts if facts.failure else _with_units(facts, board.units[name])
            for name, facts in self._facts.items()
        }
        return self._facts


def _with_units(facts: HostFacts, units: UnitFacts | Unknown) -> HostFacts:
    if isinstance(units, Unknown):
        return dataclasses.replace(facts, sections={**facts.sections, "world": units})
    return facts.with_section("world", units)


def run(
    board: Switchboard, layers: Sequence[Layer], wanted: Specs, clock: Clock | None = None, timeout: float = 60
) -> tuple[Report, Silent]:
    layers, teller = board.layers(*layers), Silent()
    eyes = SwitchEyes(board, layers, wanted)
    eyes.look(wanted.hosts)
    grants = Grants(wanted)
    return Pass(board, layers, wanted, grants, clock or Clock(), teller, timeout).run(eyes), teller


ONE, TWO = switch_layer("one"), switch_layer("two")
CT = ("ct", 129, "a")


def results(report: Report) -> list[tuple[str, Result]]:
    return [(e.step.layer, e.result) for e in report.ended]


def test_layer_by_layer_until_everything_is_right() -> None:
    board = Switchboard(a={"one": False, "two": False}, b={})
    report, _ = run(board, (ONE, TWO), specs(CT))
    assert results(report) == [("one", Result.WORKED), ("two", Result.WORKED)]
    assert report.upcoming.in_sync


def test_nothing_to_do_performs_nothing_and_looks_once() -> None:
    board = Switchboard(a={"one": True}, b={})
    report, _ = run(board, (ONE,), specs(CT))
    assert report.ended == []
    assert sorted(board.looked) == ["a", "b"]


def test_only_the_hosts_that_a_step_touched_are_looked_at_again() -> None:
    board = Switchboard(a={"one": False}, b={})
    run(board, (ONE,), specs(CT))
    assert board.looked.count("b") == 1


def test_stale_facts_are_looked_at_again_and_gone_on_from() -> None:
    board = Switchboard(a={"one": False}, b={})
    board.answers["one"] = [
        lambda order: Done(75, "", "the config has changed\n"),
        lambda order: Refused("stale", "generation 4, not 3"),
    ]
    report, _ = run(board, (ONE,), specs(CT))
    assert [r for _, r in results(report)] == [Result.STALE, Result.STALE, Result.WORKED]


def test_facts_that_keep_changing_end_in_a_failure_and_not_for_ever() -> None:
    board = Switchboard(a={"one": False}, b={})
    board.answers["one"] = [lambda order: Done(75, "", "changed again\n")] * 50
    report, _ = run(board, (ONE,), specs(CT))
    assert board.performed == ["one"] * TRIES
    assert list(report.failed.values()) == [f"given up after {TRIES} tries: changed again"]


def test_a_failed_step_is_not_tried_again_and_others_go_on() -> None:
    board = Switchboard(a={"one": False}, b={"one": False})
    board.answers["one"] = [lambda order: Done(1, "", "start failed\nno such storage\n")]
    report, _ = run(board, (ONE,), specs(CT, ("other", 130, "b")))
    assert results(report) == [("one", Result.FAILED), ("one", Result.WORKED)]
    assert list(report.failed.values()) == ["exit 1: no such storage"]


def test_a_step_that_ends_well_and_changes_nothing_has_failed() -> None:
    board = Switchboard(a={"one": False}, b={})
    board.answers["one"] = [lambda order: Done(0, "", "")]
    report, _ = run(board, (ONE,), specs(CT))
    assert results(report) == [("one", Result.FAILED)]
    assert "still not right" in report.ended[0].message


def test_a_step_that_makes_an_earlier_layer_worse_has_failed() -> None:
    board = Switchboard(a={"one": True, "two": False}, b={})

    def wreck(order: Order) -> Outcome:
        board.hosts["a"]["one"] = False
        return board.turn_on(order)

    board.answers["two"] = [wreck]
    report, _ = run(board, (ONE, TWO), specs(CT))
    assert results(report)[0] == ("two", Result.FAILED)
    assert "made one of Container/ct worse" in report.ended[0].message


def test_a_lost_reply_is_looked_at_and_nothing_is_doubled() -> None:
    board = Switchboard(a={"one": False, "two": False}, b={})

    def lost(order: Order) -> Outcome:
        board.turn_on(order)
        return Lost("the connection was lost")

    board.answers["one"] = [lost]
    report, _ = run(board, (ONE, TWO), specs(CT))
    assert board.performed == ["one", "two"]
    assert report.upcoming.in_sync


def test_a_step_still_at_work_after_a_lost_connection_is_waited_for() -> None:
    board, clock = Switchboard(a={"one": False}, b={}), Clock()

    def lost(order: Order) -> Outcome:
        board.units["a"] = UnitFacts(1, "boot", step=Unit("one-ct", "Container/ct", How.RUNNING))
        return Lost("the connection was lost")

    def end() -> None:
        board.units["a"] = UnitFacts(1, "boot", step=Unit("one-ct", "Container/ct", How.EXIT, 0))
        board.hosts["a"]["one"] = True

    board.answers["one"] = [lost]
    clock.during = [lambda: None, lambda: None, end]
    report, teller = run(board, (ONE,), specs(CT), clock)
    assert board.performed == ["one"]
    assert report.upcoming.in_sync
    assert teller.waits[0] == "one-ct runs on a"


def test_waiting_ends_with_the_time() -> None:
    board = Switchboard(a={"one": False}, b={})
    board.units["a"] = UnitFacts(1, "boot", step=Unit("other", "Container/ct", How.RUNNING))
    report, _ = run(board, (ONE,), specs(CT), timeout=10)
    assert report.timed_out
    assert board.performed == []


def test_another_controllers_lease_is_said_and_not_fought() -> None:
    board = Switchboard(a={"one": False}, b={})
    board.answers["one"] = [lambda order: Refused("lease", "held by other (box:7) for 42 s more")]
    report, _ = run(board, (ONE,), specs(CT))
    assert results(report) == [("one", Result.REFUSED)]
    assert "held by other (box:7)" in report.failed[report.ended[0].step.id]


def test_a_host_that_vanishes_while_a_step_runs_leaves_it_unknown_and_undone() -> None:
    board = Switchboard(a={"one": False, "two": False}, b={})

    def vanish(order: Order) -> Outcome:
        board.dark.add("a")
        return Lost("the connection was lost")

    board.answers["one"] = [vanish]
    report, _ = run(board, (ONE, TWO), specs(CT))
    assert board.performed == ["one"]
    assert not report.upcoming.in_sync


def job_layer(board: Switchboard) -> Layer:
    """A layer whose step is a job named ``build`` on host a."""

    def check(view: View, container: Container) -> Verdict:
        if view.fact("a", "one", bool):
            return InSync()
        job = board.units["a"].job("build")
        if job is not None and job.running:
            return Drift(Reason.OFF, "off", Wait("job", "build is at work on a", ("a",)))
        ref = Ref("Container", container.name)
        step = Step(
            action="build",
            object=ref,
            layer="one",
            reason=Reason.OFF,
            summary="build it",
            hosts=("a",),
            script=Script("none", "main() { :; }\nmain\n"),
            disrupts=(Disruption(ref, Permission.RESTART_CONTAINER),),
            job="build",
        )
        return Drift(Reason.OFF, "off", step)

    return dataclasses.replace(ONE, check=check)


def begin(board: Switchboard, how: How, rc: int | None = None, *log: str) -> Callable[[Order], Outcome]:
    def start(order: Order) -> Outcome:
        job = Job(order.step.id, "Container/ct", how, rc, name="build", log=log)
        board.units["a"] = dataclasses.replace(board.units["a"], jobs=(job,))
        return Done(0, "", "")

    return start


def test_a_job_is_waited_for() -> None:
    board, clock = Switchboard(a={"one": False}, b={}), Clock()

    def end() -> None:
        job = dataclasses.replace(board.units["a"].jobs[0], how=How.EXIT, rc=0)
        board.units["a"] = dataclasses.replace(board.units["a"], jobs=(job,))
        board.hosts["a"]["one"] = True

    board.answers["one"] = [begin(board, How.RUNNING)]
    clock.during = [lambda: None, end]
    report, teller = run(board, (job_layer(board),), specs(CT), clock)
    assert board.performed == ["one"]
    assert teller.waits == ["build is at work on a"] * 2
    assert report.upcoming.in_sync


def test_a_job_that_fails_is_told_with_its_last_line_and_not_started_again_in_the_same_pass() -> None:
    board, clock = Switchboard(a={"one": False}, b={}), Clock()

    def fail() -> None:
        job = dataclasses.replace(board.units["a"].jobs[0], how=How.EXIT, rc=1, log=("building", "no headers", ""))
        board.units["a"] = dataclasses.replace(board.units["a"], jobs=(job,))

    board.answers["one"] = [begin(board, How.RUNNING)]
    clock.during = [fail]
    report, _ = run(board, (job_layer(board),), specs(CT), clock)
    assert board.performed == ["one"]
    assert list(report.failed.values()) == ["the job has failed: no headers"]


def test_a_step_rests_on_no_facts_that_are_old_by_the_time_it_is_begun() -> None:
    board, clock = Switchboard(a={"one": False}, b={"one": False}), Clock()

    def takes_long(order: Order) -> Outcome:
        clock.at += FRESH + 1
        board.hosts["b"]["one"] = True  # somebody has put it right meanwhile
        return board.turn_on(order)

    board.answers["one"] = [takes_long]
    report, _ = run(board, (ONE,), specs(CT, ("other", 130, "b")), clock)
    assert [e.step.hosts for e in report.ended] == [("a",)]
    assert report.upcoming.in_sync


def test_a_step_that_worked_in_the_end_is_not_called_a_loop() -> None:
    board = Switchboard(a={"one": False}, b={})
    board.answers["one"] = [lambda order: Done(75, "", "changed\n")] * (TRIES - 1)
    report, _ = run(board, (ONE,), specs(CT))
    assert results(report)[-1] == ("one", Result.WORKED)
    assert report.failed == {}


def test_steps_that_somebody_undoes_again_and_again_end_though_each_is_another() -> None:
    board = Switchboard(a={"one": False}, b={})

    def undone(order: Order) -> Outcome:
        board.units["a"] = UnitFacts(len(board.performed), "boot")
        return Done(0, "", "")

    board.answers["one"] = [undone] * 1000

    def check(view: View, container: Container) -> Verdict:
        verdict = ONE.check(view, container)
        generation = view.fact("a", "world", UnitFacts).generation
        assert isinstance(verdict, Drift)
        assert isinstance(verdict.remedy, Step)
        return dataclasses.replace(verdict, remedy=dataclasses.replace(verdict.remedy, args=(str(generation),)))

    report, _ = run(board, (dataclasses.replace(ONE, check=check),), specs(CT))
    assert len(board.performed) == AGAIN
    assert "is needed again: a loop" in list(report.failed.values())[-1]


def test_while_a_lost_step_may_still_disrupt_no_other_step_does() -> None:
    board, clock = Switchboard(a={"one": False}, b={"one": False}), Clock()

    def vanish(order: Order) -> Outcome:
        board.dark.add("a")
        return Lost("the connection was lost")

    def begun_at(order: Order) -> Outcome:
        begun.append(clock.at)
        return board.turn_on(order)

    begun: list[float] = []
    board.answers["one"] = [vanish, begun_at]
    _, teller = run(board, (ONE,), specs(CT, ("other", 130, "b")), clock, timeout=1000)
    assert len(begun) == 1
    assert begun[0] >= 120  # the step's own time is up by then, whatever became of it
    assert "may still run on a, which does not answer" in teller.waits[0]


def test_a_host_that_does_not_tell_what_is_at_work_on_it_is_given_no_step_and_the_reason_is_told_once() -> None:
    board = Switchboard(a={"one": False}, b={})
    board.units["a"] = Unknown("newer-schema", "the state on the host has schema 2, this release knows 1")
    report, _ = run(board, (ONE,), specs(CT))
    assert board.performed == []
    assert results(report) == [("one", Result.REFUSED)]
    assert list(report.failed.values()) == ["unable: the state on the host has schema 2, this release knows 1"]


def windowed(cron: str) -> Specs:
    window = Window(cron=cron, duration="3h", timezone="UTC")
    return specs(CT, policy=Policy(mode=ALLOW_ALL.mode, allow=ALLOW_ALL.allow, windows=(window,)))


def test_outside_the_maintenance_window_a_step_that_disrupts_waits_and_says_so() -> None:
    board = Switchboard(a={"one": False}, b={})
    report, _ = run(board, (ONE,), windowed("0 2 * * SUN"))
    assert board.performed == []
    assert list(report.closed.values()) == [
        "the maintenance window of Container/ct is closed; it opens 2026-01-18 02:00 UTC"
    ]


def test_inside_the_maintenance_window_it_is_performed() -> None:
    board = Switchboard(a={"one": False}, b={})
    report, _ = run(board, (ONE,), windowed("0 2 * * MON"))
    assert results(report) == [("one", Result.WORKED)]
    assert report.closed == {}
