"""One pass: look, perform what may be done, look again, until nothing more can be done now."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from controller.core import observe, suspension, windows
from controller.core.batch import batch
from controller.core.next_steps import Next, next_steps
from controller.core.permissions import Grants
from controller.core.view import View
from controller.core.words import Gate, InSync, Layer, Skipped, Step
from controller.facts.words import FleetFacts, Known, Unknown
from controller.run.ended import Ended, Result, failed_job, judge, last_words
from controller.run.ended import busy as busy_hosts
from controller.run.eyes import Eyes
from controller.run.records import Records
from controller.spec.model import Specs
from controller.spec.ref import Ref
from controller.world.port import Done, Lost, Order, Outcome, Refused, World

TRIES = 5  # of one step whose facts keep changing under it, before it is called failed
AGAIN = 32  # steps of one action in one layer of an object: more than a host has cards, and no fight goes on for ever
FRESH = 30.0  # seconds that facts may be old when a step is begun: it may rest on those of any host
STARTING = 90.0  # seconds from an order to the unit's start at most; its own time comes after them
SETTLING = 120.0  # seconds after a reboot in which a host's services may still come up
POLL = 1.0  # seconds between looks at a host whose unit is still at work


class Clock(Protocol):
    """Time as a pass needs it."""

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        ...

    def wait(self, seconds: float) -> None:
        """Let that much time go by."""
        ...

    def date(self) -> datetime:
        """The date and time of day, aware of its zone: what maintenance windows are about."""
        ...


class Teller(Protocol):
    """Who is told what happens, as it happens."""

    def started(self, step: Step) -> None:
        """A step is about to be performed."""
        ...

    def ended(self, ended: Ended) -> None:
        """A step has ended and its result was looked at."""
        ...

    def waiting(self, message: str) -> None:
        """Nothing can be done until something that runs on a host ends."""
        ...


@dataclass
class Report:
    """What a pass did and left."""

    facts: FleetFacts
    upcoming: Next
    ended: list[Ended] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)  # steps that wait for a maintenance window, and which
    suspended: dict[str, str] = field(default_factory=dict)  # steps that a suspension holds, and which
    timed_out: bool = False


@dataclass
class Pass:
    """A single pass over a fleet.

    ``narrowed`` says of a layer of an object whether the pass may concern itself with it. ``timeout`` in seconds ends
    waiting for what runs on hosts; no step is cut off by it. A step that disrupts begins only in the maintenance
    windows of what it disrupts, unless ``ignore_windows``. What is done is kept in ``records``, and nothing is touched
    that is suspended there; where they cannot be read or written no step is begun, and the pass ends with NoState.
    """

    world: World
    layers: Sequence[Layer]
    specs: Specs
    grants: Grants
    clock: Clock
    teller: Teller
    timeout: float
    narrowed: Callable[[Ref, str], bool] = lambda ref, layer: True
    ignore_windows: bool = False
    records: Records | None = None
    _judged: tuple[FleetFacts, Next] | None = field(default=None, init=False, repr=False)
    _looked: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _lost: dict[str, tuple[str, float]] = field(default_factory=dict, init=False, repr=False)
    _rebooting: dict[str, float] = field(default_factory=dict, init=False, repr=False)  # and until when it may settle

    def run(self, eyes: Eyes) -> Report:
        """Perform what may be done until nothing more can be done now. ``eyes`` has looked at every host before."""
        report = Report(eyes.facts, self._next(eyes.facts))
        self._looked = dict.fromkeys(eyes.facts, self.clock.now())
        until = self.clock.now() + self.timeout
        while True:
            busy = {**busy_hosts(eyes.facts), **self._reboots(report)}
            steps = batch(
                self._candidates(report), self.specs.fleet.limits, frozenset({*busy, *self._in_doubt(report)})
            )
            if steps and min(self._looked.values()) < self.clock.now() - FRESH:
                self._look(eyes, eyes.facts)
            elif steps:
                self._perform(steps, eyes, report)
            else:
                waits = self._waits(report, busy)
                if not waits:
                    return report
                if self.clock.now() >= until:
                    report.timed_out = True
                    return report
                self.teller.waiting("; ".join(dict.fromkeys(waits.values())))
                self.clock.wait(POLL)
                self._look(eyes, waits)
                if busy.keys() - busy_hosts(eyes.facts).keys():  # what has ended may have touched other hosts as well
                    self._look(eyes, eyes.facts)
            report.facts, report.upcoming = eyes.facts, self._next(eyes.facts)
            self._take_failed_jobs(report)
            self._give_up_loops(report)

    def _look(self, eyes: Eyes, hosts: Iterable[str]) -> None:
        looked = tuple(hosts)
        eyes.look(looked)
        self._looked.update(dict.fromkeys(looked, self.clock.now()))

    def _next(self, facts: FleetFacts) -> Next:
        if self._judged is None or self._judged[0] != facts:  # a job is looked at every second, and nothing is new
            self._judged = facts, next_steps(self.layers, View(self.specs, facts))
        return self._judged[1]

    def _candidates(self, report: Report) -> list[Step]:
        permitted = [
            step
            for step in report.upcoming.ready
            if step.id not in report.failed and self.narrowed(step.object, step.layer) and self.grants.may(step)
        ]
        suspensions = self.records.memory.suspensions(self.clock.date().timestamp()) if self.records else {}
        stopped = suspension.stopped(permitted, suspensions, self.specs)
        report.suspended = {step: message for step, (_, message) in stopped.items()}
        permitted = [step for step in permitted if step.id not in stopped]
        if self.ignore_windows:
            return permitted
        at = self.clock.date()
        closed = {step.id: why for step in permitted if (why := windows.closed(step, self.specs, at))}
        report.closed = closed
        return [step for step in permitted if step.id not in closed]

    def _waits(self, report: Report, busy: dict[str, str]) -> dict[str, str]:
        """What is waited for, by host: a step at work that keeps something back, a job, a reboot."""
        waits = {} if report.upcoming.in_sync else dict(busy)
        if self._candidates(report):
            waits.update(self._in_doubt(report))
        for judged, wait in report.upcoming.waiting:
            if self.narrowed(judged.object, judged.layer):
                waits.update(dict.fromkeys(wait.hosts, wait.message))
        return waits

    def _in_doubt(self, report: Report) -> dict[str, str]:
        """Hosts on which a step of this pass may still be at work: its end was not seen, and they do not answer."""
        return {
            host: f"{step} may still run on {host}, which does not answer"
            for host, (step, until) in self._lost.items()
            if self.clock.now() < until and observe.units(report.facts[host]) is None
        }

    def _reboots(self, report: Report) -> dict[str, str]:
        """Hosts that reboot, until they answer again and what they need first (their cluster) has come back as well."""
        for name, host in report.facts.items():
            units = observe.units(host)
            if units is not None and units.rebooting:
                self._rebooting.setdefault(name, math.inf)
            elif units is not None and name in self._rebooting:
                self._rebooting[name] = until = min(self._rebooting[name], self.clock.now() + SETTLING)
                if self.clock.now() >= until or self._is_back(report, name):
                    del self._rebooting[name]
        return {name: f"{name} reboots" for name in self._rebooting}

    def _is_back(self, report: Report, name: str) -> bool:
        ref, gating = Ref("Host", name), [layer.name for layer in self.layers if layer.gates is Gate.ALL]
        verdicts = [report.upcoming.verdict(ref, layer) for layer in gating]
        known = all(isinstance(section, Known) for section in report.facts[name].sections.values())
        return known and all(isinstance(verdict, InSync | Skipped | None) for verdict in verdicts)

    def _take_failed_jobs(self, report: Report) -> None:
        """A job that this pass started and that has failed is not started again by it."""
        for ended in [e for e in report.ended if e.step.job is not None and e.step.id not in report.failed]:
            if (job := failed_job(ended.step, report.facts)) is not None:
                self._end(report, Ended(ended.step, Result.FAILED, last_words(job)))

    def _give_up_loops(self, report: Report) -> None:
        """What is needed again and again is fought over by somebody, or by two layers: it is not done for ever."""
        same = Counter(e.step.id for e in report.ended)
        alike = Counter((e.step.object, e.step.layer, e.step.action) for e in report.ended)
        for step in report.upcoming.ready:
            times = alike[step.object, step.layer, step.action]
            most = 1 if step.action == "reboot-host" else AGAIN
            if step.id not in report.failed and (same[step.id] >= TRIES or times >= most):
                message = f"{step.action} was done {times} times in this pass and is needed again: a loop"
                self._end(report, Ended(step, Result.FAILED, message))

    def _end(self, report: Report, ended: Ended) -> None:
        if ended.result in (Result.FAILED, Result.REFUSED):
            report.failed[ended.step.id] = ended.message
        report.ended.append(ended)
        if self.records is not None:
            begun = ended.step.job is not None and ended.result is Result.WORKED
            message = f"{ended.message}: begun, and goes on by itself" if begun else ended.message
            kept = Ended(ended.step, ended.result, message)
            self.grants = self.records.ended(kept, self.grants, self.clock.date().timestamp())
        self.teller.ended(ended)

    def _perform(self, steps: Sequence[Step], eyes: Eyes, report: Report) -> None:
        before = report.upcoming
        for step in steps:
            if self.records is not None:
                self.records.started(step, before, self.grants, self.clock.date().timestamp())
            self.teller.started(step)
        outcomes = self._ordered(steps, eyes.facts)
        self._look(eyes, (host for step in steps for host in step.hosts))
        after = self._next(eyes.facts)
        for step, outcome in zip(steps, outcomes, strict=True):
            if isinstance(outcome, Lost):
                self._lost[step.hosts[0]] = (step.id, self.clock.now() + STARTING + step.timeout)
            if step.action == "reboot-host" and isinstance(outcome, Done) and outcome.rc == 0:
                self._rebooting[step.hosts[0]] = math.inf
            ended = judge(step, outcome, before, after)
            tries = 1 + sum(1 for earlier in report.ended if earlier.step.id == step.id)
            if ended.result is not Result.WORKED and tries >= TRIES:
                ended = Ended(step, Result.FAILED, f"given up after {TRIES} tries: {ended.message}")
            self._end(report, ended)

    def _ordered(self, steps: Sequence[Step], facts: FleetFacts) -> list[Outcome]:
        """Order steps at once, and wait for all. An interrupt waits for them too, a second one leaves them."""
        pool = futures.ThreadPoolExecutor(max_workers=len(steps))
        stopping = False
        try:
            orders = [pool.submit(self._order, step, facts) for step in steps]
            return [order.result() for order in orders]
        except KeyboardInterrupt:
            stopping = True
            self.teller.waiting("stopping when what is at work has ended; stop again to leave it to its host")
            futures.wait(orders)
            raise
        finally:
            pool.shutdown(wait=not stopping)

    def _order(self, step: Step, facts: FleetFacts) -> Outcome:
        host = facts[step.hosts[0]]
        units, found = observe.units(host), host.section(observe.WORLD)
        if units is None:
            why = found.message if isinstance(found, Unknown) else f"what is at work on {host.host} is not known"
            return Refused("unable", why)
        return self.world.perform(Order(step, units.generation, units.boot_id))
