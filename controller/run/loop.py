"""The loop's mind: what to look at and what to do next, from what it is told.

It has no threads, waits for nothing and reads no clock. A driver hands in what happened (specs, observations, ends of
steps), carries out what is due, and comes again: ``daemon.py`` in real time, tests in simulated time and in any order.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from controller.core import observe, suspension, windows
from controller.core.batch import batch
from controller.core.conditions import BREAKER_OPEN, SPEC_ERRORS, Condition, Status, Type, of_all
from controller.core.groups import last_healthy
from controller.core.next_steps import Next, next_steps
from controller.core.permissions import Approval, Grants
from controller.core.suspension import Suspension
from controller.core.view import View
from controller.core.words import Drift, Gate, InSync, Layer, Skipped, Step, Unseen
from controller.facts.hub import HubFacts
from controller.facts.units import Job, Unit
from controller.facts.words import FleetFacts, HostFacts, Known, Observation, Unknown
from controller.layers.access.facts import AccessFacts
from controller.run.ended import Ended, Result, busy, failed_job, judge, last_words
from controller.run.eyes import with_models
from controller.run.git import Commit
from controller.run.memory import Backoff, Drifting, Event, Kept, Key, Kind
from controller.run.picture import Board, Looked, Pending, Picture, StepKind, WaitingFor
from controller.run.records import Records
from controller.run.state import NoState
from controller.spec.errors import SpecError
from controller.spec.load import Reading
from controller.spec.model import Specs
from controller.spec.ref import Ref
from controller.world.port import Done, Look, Lost, Order
from controller.world.port import Outcome as Said

PERIOD = 20.0  # seconds between looks at a host on which nothing happens
JITTER = 0.2  # of the period, either way: hosts that were asked at once do not stay so
POLL = 2.0  # seconds between looks at a host on which something is at work
FRESH = 5.0  # seconds that the facts of the hosts that a step touches may be old when it is begun
AWAKE = 15.0  # seconds after the start in which every host may answer for the first time
SLOW = 30.0  # seconds after which a host that was asked and has not answered is not known any more
MEMORY = 60.0  # seconds that a slow tool's answer may be old in a look that nothing rests on
STARTING = 90.0  # seconds from an order to its unit's start at most; its own time comes after them
SETTLING = 120.0  # seconds after a reboot in which a host's services may still come up
BACKOFF = (10.0, 900.0)  # seconds until a step that failed is tried again: at first, and doubled up to
SOON = 3.0  # seconds until a step is tried again that was refused because the facts had changed
HELD = 15.0  # seconds until a step is tried again on a host that another controller holds
PERIOD_OF_BREAKER = 3600.0  # seconds in which
TRIES_OF_BREAKER = 3  # steps that disrupt and do not help are enough
AGAIN = 10.0  # seconds until it is tried again to keep what could not be kept
FORGOTTEN = 7 * 86400.0  # seconds after which it is not asked any more how a step ended


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment: ``now`` in seconds of a clock that never goes back, ``date`` of the calendar, aware of its zone."""

    now: float
    date: datetime

    @property
    def unix(self) -> float:
        """UNIX seconds."""
        return self.date.timestamp()


@dataclass
class _Eye:
    """Looking at one host, in seconds of ``Moment.now``.

    ``seen`` is when the last look that was answered was begun; one begun before ``need`` does not do.
    """

    due: float
    asked: float | None = None
    seen: float = -math.inf
    need: float = -math.inf
    answered: float | None = None  # UNIX seconds of the last answer that was one
    took: float = 0.0


@dataclass
class _Doing:
    """A step at work, what was known when it was begun, and how its script ended (``over``: in Moment.now)."""

    step: Step
    before: Next
    grants: Grants
    cause: str
    began: float  # UNIX seconds
    said: Said | None = None
    over: float = math.inf


@dataclass(frozen=True, slots=True)
class _Past:
    """A step that has ended: what the breaker counts."""

    unix: float
    id: str
    object: Ref
    layer: str
    action: str
    worked: bool


class Loop:
    """See the module. All methods are for one thread; ``picture`` gives values that any thread may read."""

    def __init__(self, layers: Sequence[Layer], records: Records, board: Board, chance: random.Random) -> None:
        self._layers = layers
        self._parsers = observe.parsers(layers)
        self._records = records
        self._memory = records.memory
        self._file = self._memory.file
        self._board = board
        self._chance = chance
        self._reading: Reading | None = None
        self._specs = Specs()
        self._problem: SpecError | None = None
        self._commit = Commit()
        self._loaded: float | None = None
        self._facts: FleetFacts = {}
        self._models: HubFacts | None = None
        self._described = False
        self._clusters: dict[str, str] = {}
        self._busy: dict[str, str] = {}  # hosts on which a step runs, and which
        self._eyes: dict[str, _Eye] = {}
        self._upcoming = Next((), (), (), (), ())
        self._changed = True  # since the last judgement
        self._keep_at = math.inf  # when what could not be kept is to be kept
        self._conditions: dict[Ref, tuple[Condition, ...]] = {}
        self._ready: frozenset[Ref] = frozenset()
        self._kept: dict[Ref, tuple[Kept, ...]] = {}
        self._drifting: dict[tuple[Ref, str], Drifting] = {}
        self._at_work: dict[str, _Doing] = {}
        self._jobs: dict[str, _Doing] = {}
        self._earlier: list[Event] = []
        self._lost: dict[str, tuple[str, float, float]] = {}  # step, since, until
        self._rebooting: dict[str, float] = {}  # until when it may settle
        self._told_to_reboot: dict[str, float] = {}  # when: what was seen before tells nothing of it
        self._backoffs: dict[Key, Backoff] = {}
        self._past: deque[_Past] = deque()
        self._resumed: dict[Ref, float] = {}
        self._tripped: set[str] = set()
        self._approvals: tuple[Approval, ...] = ()
        self._suspensions: Mapping[Ref, Suspension] = {}
        self._pending: dict[tuple[Ref, str], Pending] = {}
        self._succeeded: dict[Ref, float] = {}
        self._stopping = False
        self._began = -math.inf
        self._awake = False

    # --- what happened ---

    def begin(self, moment: Moment) -> None:
        """Take up what an earlier life of the controller has left. Raises NoState."""
        self._began = moment.now
        self._backoffs = self._memory.backoffs()
        ended = self._memory.events(kind=Kind.STEP_ENDED, since=moment.unix - FORGOTTEN)
        for event in ended:
            if event.at >= moment.unix - PERIOD_OF_BREAKER and event.object is not None:
                worked = event.result == Result.WORKED
                self._past.append(_Past(event.at, event.step, event.object, event.layer, event.action, worked))
        over = {event.key.removesuffix(":ended") for event in ended}
        started = self._memory.events(kind=Kind.STEP_STARTED, since=moment.unix - FORGOTTEN)
        self._earlier = [event for event in started if event.key.removesuffix(":started") not in over]
        self._newly_resumed(moment)  # an earlier life has heard of it: what was tried in vain since then still counts
        self.reconsider(moment)

    def reconsider(self, moment: Moment) -> None:
        """Read again what people have decided: approvals and suspensions. Raises NoState."""
        self._approvals = tuple(self._memory.approvals(moment.unix))
        suspensions = self._memory.suspensions(moment.unix)
        if (file := self._memory.file) != self._file:  # all that is known is kept anew
            for ref, suspension in self._suspensions.items():
                if ref not in suspensions and (suspension.until is None or suspension.until > moment.unix):
                    self._memory.suspend(suspension)  # nobody has resumed it because a file was lost
            suspensions = self._memory.suspensions(moment.unix)
            self._conditions = {}
            self._file = file
        self._suspensions = suspensions
        for ref in self._newly_resumed(moment):
            self._forgive(ref)
        self._changed = True

    def _newly_resumed(self, moment: Moment) -> set[Ref]:
        """What somebody has resumed since this was asked last."""
        resumed = set()
        for event in self._memory.events(kind=Kind.SUSPENSION, since=moment.unix - PERIOD_OF_BREAKER):
            ref = event.object
            if ref is not None and event.action == "resume" and event.at > self._since(ref, moment):
                self._resumed[ref] = event.at
                resumed.add(ref)
        return resumed

    def take_specs(
        self, reading: Reading, moment: Moment, commit: Commit | None = None, problem: SpecError | None = None
    ) -> None:
        """Go on with other specs. ``problem`` says why nothing could be read: then nothing is done."""
        before, self._specs = self._specs, reading.specs
        self._reading, self._problem, self._commit = reading, problem, commit or Commit()
        if not reading.errors and problem is None:
            self._loaded = moment.unix
        self._records.use(self._specs, self._commit)
        self._eyes = {name: self._eyes.get(name, _Eye(due=moment.now)) for name in self._specs.hosts}
        self._facts = {name: facts for name, facts in self._facts.items() if name in self._eyes}
        self._busy = busy(self._facts)
        self._succeeded = {ref: at for ref, at in self._succeeded.items() if ref in self._specs}
        for obj in before:
            if obj.ref in self._specs and self._specs.digest_of(obj.ref) != before.digest_of(obj.ref):
                self._forgive(obj.ref)
                self._resumed[obj.ref] = moment.unix
        self._conditions = {}  # all are kept anew, under the digests of the present specs
        self._changed = True

    def seen(self, observation: Observation, moment: Moment) -> None:
        """A host was looked at."""
        eye = self._eyes.get(observation.host)
        if eye is None or eye.asked is None:
            return
        eye.seen, eye.took, eye.asked = eye.asked, moment.now - eye.asked, None
        if observation.failure is None:
            eye.answered = moment.unix
        if eye.seen >= eye.need:
            eye.due = moment.now + PERIOD * self._chance.uniform(1 - JITTER, 1 + JITTER)
        before = self._facts.get(observation.host)
        self._know(observe.read(self._parsers, observation, before))

    def described(self, models: HubFacts | None) -> None:
        """The Hub was asked about the models of the specs."""
        self._described = True
        if models == self._models:
            return
        self._models = models
        for facts in self._facts.values():
            self._know(facts)

    def performed(self, step: str, said: Said, moment: Moment) -> None:
        """A step has come to its end, or it is not known whether."""
        doing = self._at_work.get(step)
        if doing is None:
            return
        doing.said, doing.over = said, moment.now
        if isinstance(said, Lost):
            until = moment.now + STARTING + doing.step.timeout
            self._lost[doing.step.hosts[0]] = (step, moment.now, until)
        if isinstance(said, Done) and said.rc == 0 and doing.step.action == "reboot-host":
            self._rebooting[doing.step.hosts[0]] = math.inf
            self._told_to_reboot[doing.step.hosts[0]] = moment.now
        for host in doing.step.hosts:
            self._look_again(host, moment)

    def stop(self) -> None:
        """Begin nothing any more."""
        self._stopping = True

    # --- what to do ---

    @property
    def specs(self) -> Specs:
        """The specs that it works with."""
        return self._specs

    @property
    def clusters(self) -> dict[str, str]:
        """The names of the Proxmox clusters of hosts, as they were last seen; a host in none is a cluster alone."""
        return dict(self._clusters)

    @property
    def idle(self) -> bool:
        """Whether no short step is at work."""
        return not self._at_work

    def tasks(self, moment: Moment) -> list[Look | Order]:
        """Return the looks and steps that are due now. Each is handed out once; the driver tells how it went."""
        self._give_up_on_slow(moment)
        self._let_expire(moment)
        self._judge_if_changed(moment)
        for doing in list(self._at_work.values()):
            self._settle_if_seen(doing, moment)
        self._judge_if_changed(moment)
        orders = [] if self._stopping else self._orders(moment)
        return [*orders, *self._looks(moment)]

    def due(self, moment: Moment) -> float:
        """In how many seconds there may be something to do, if nothing happens before."""
        hot = self._hot()
        times = [
            min(eye.due, eye.seen + POLL if name in hot else math.inf) if eye.asked is None else eye.asked + SLOW
            for name, eye in self._eyes.items()
            if eye.asked is None or eye.asked + SLOW > moment.now
        ]
        times += [
            moment.now + max(0.0, b.until - moment.unix) for b in self._backoffs.values() if b.until > moment.unix
        ]
        untils = [a.until for a in self._approvals] + [s.until for s in self._suspensions.values()]
        times += [moment.now + max(0.0, until - moment.unix) for until in untils if until is not None]
        times.append(self._keep_at)
        if any(p.waiting_for is WaitingFor.WINDOW for p in self._pending.values()):
            times.append(moment.now + 5.0)
        return max(0.0, min(times, default=moment.now + 60.0) - moment.now)

    def picture(self) -> Picture:
        """What metrics, health and status are made from."""
        for ref in self._ready:
            eye = self._eyes.get(self._specs.below(ref)[-1].name)
            if eye is not None and eye.answered is not None:
                self._succeeded[ref] = eye.answered
        errors = self._reading.errors if self._reading is not None else ()
        return Picture(
            specs=self._specs,
            spec_errors=(*errors, self._problem) if self._problem is not None else errors,
            loaded=self._loaded,
            commit=self._commit.id,
            dirty=self._commit.dirty,
            facts=self._facts,
            hosts={
                name: Looked(name in self._facts and self._facts[name].failure is None, eye.answered, eye.took)
                for name, eye in self._eyes.items()
            },
            observed=self._awake and all(eye.seen > -math.inf for eye in self._eyes.values()),
            upcoming=self._upcoming,
            conditions=self._kept,
            drifts=self._drifting,
            pending=tuple(self._pending.values()),
            suspensions=dict(self._suspensions),
            backoff=self._backoff_of_objects(),
            last_success=dict(self._succeeded),
            notes=self._memory.notes,
        )

    def _backoff_of_objects(self) -> dict[Ref, float]:
        longest: dict[Ref, float] = {}
        for (ref, _, _), backoff in self._backoffs.items():
            longest[ref] = max(longest.get(ref, 0.0), _pause(backoff.tries))
        return longest

    # --- specs ---

    def _broken(self, step: Step) -> str:
        """Why nothing may be done to what a step touches as far as spec files go."""
        if self._problem is not None:
            return f"{self._problem.says}; nothing is done until there are specs again"
        reading = self._reading
        if reading is None or reading.all_frozen:
            return "a spec file that may hold the Fleet's defaults has errors: no object's meaning is certain"
        touched = {step.object, *(d.object for d in step.disrupts), *(Ref("Host", host) for host in step.hosts)}
        touched |= {below for ref in touched if ref in self._specs for below in self._specs.below(ref)}
        frozen = sorted(map(str, touched & reading.frozen))
        return f"the spec of {', '.join(frozen)} has errors; nothing is done to it until it is right" if frozen else ""

    # --- facts ---

    def _know(self, facts: HostFacts) -> None:
        facts = with_models(facts, self._models)
        if facts == self._facts.get(facts.host):
            return
        self._facts = {**self._facts, facts.host: facts}
        self._busy = busy(self._facts)
        access = facts.section("host.access")
        if isinstance(access, Known) and isinstance(access.value, AccessFacts) and access.value.cluster is not None:
            self._clusters[facts.host] = access.value.cluster.name or f"{facts.host} alone"
        if (units := observe.units(facts)) is not None and units.rebooting:
            self._rebooting.setdefault(facts.host, math.inf)
        self._changed = True

    def _give_up_on_slow(self, moment: Moment) -> None:
        """A host that was asked long ago is not known any more; it holds up nothing, and nothing rests on it."""
        for name, eye in self._eyes.items():
            before = self._facts.get(name)
            if eye.asked is not None and moment.now >= eye.asked + SLOW and not (before and before.failure):
                message = f"{name} was asked {SLOW:.0f} s ago and has not answered yet"
                self._know(HostFacts(name, {}, Unknown("slow", message)))

    def _look_again(self, host: str, moment: Moment) -> None:
        """What is known of a host does not do: look at it again, after this moment."""
        if (eye := self._eyes.get(host)) is not None:
            eye.need = moment.now
            eye.due = min(eye.due, moment.now)

    def _looks(self, moment: Moment) -> list[Look]:
        hot = self._hot()
        guests = tuple(sorted({c.id for c in self._specs.containers.values()}))
        looks = []
        for name, eye in self._eyes.items():
            polled = eye.seen + POLL if name in hot else math.inf
            if eye.asked is None and moment.now >= min(eye.due, polled):
                asked_for = eye.seen < eye.need or name in hot
                eye.asked = moment.now
                proxmox = self._specs.hosts[name].platform == "proxmox"
                looks.append(Look(name, 0.0 if asked_for else MEMORY, guests if proxmox else ()))
        return looks

    def _hot(self) -> set[str]:
        """Hosts on which something is at work, or will come back soon."""
        hot = {host for _, wait in self._upcoming.waiting for host in wait.hosts}
        hot |= {host for doing in self._at_work.values() for host in doing.step.hosts}
        return hot | set(self._busy) | set(self._rebooting) | set(self._lost)

    # --- judging ---

    def _let_expire(self, moment: Moment) -> None:
        """Approvals and suspensions have a time."""
        approvals = tuple(a for a in self._approvals if a.until is None or a.until > moment.unix)
        suspensions = {ref: s for ref, s in self._suspensions.items() if s.until is None or s.until > moment.unix}
        if approvals != self._approvals or suspensions != self._suspensions:
            self._approvals, self._suspensions, self._changed = approvals, suspensions, True

    def _judge_if_changed(self, moment: Moment) -> None:
        again = moment.now >= self._keep_at
        if not (self._changed or again) or self._reading is None or self._awakes(moment):
            return
        self._upcoming = next_steps(self._layers, View(self._specs, self._facts))
        for doing in list(self._jobs.values()):
            self._settle_job(doing, moment)
        self._settle_earlier(moment)
        self._keep(moment)
        self._keep_at = moment.now + AGAIN if self._memory.trouble else math.inf
        self._changed = False  # last: what could not be kept is judged again

    def _awakes(self, moment: Moment) -> bool:
        """Whether it is too early to judge: what was remembered is not to be called unknown before hosts were asked."""
        if not self._awake:
            described = self._described or not self._specs.servers
            asked = described and all(eye.seen > -math.inf for eye in self._eyes.values())
            self._awake = asked or moment.now >= self._began + AWAKE
        return not self._awake

    def _grants(self) -> Grants:
        return Grants(self._specs, approvals=self._approvals)

    def _keep(self, moment: Moment) -> None:
        """Keep the conditions and drift that follow; of conditions, those that are others than before."""
        grants = self._grants()
        lacking, failed, stopped = {}, {}, {}
        for step in self._upcoming.ready:
            backoff = self._backoffs.get((step.object, step.layer, step.action))
            if why := self._broken(step):
                stopped[step.id] = (SPEC_ERRORS, why)
            elif why := self._open_breaker(step, moment):
                stopped[step.id] = (BREAKER_OPEN, why)
            elif backoff is not None:
                failed[step.id] = backoff.message
            elif missing := grants.missing(step):
                lacking[step.id] = ", ".join(map(str, missing))
            elif not grants.may(step):
                lacking[step.id] = f"policy: {{mode: enforce}} in {step.object}"
        stopped.update(suspension.stopped(self._upcoming.ready, self._suspensions, self._specs))
        refs = [obj.ref for obj in self._specs]
        conditions = of_all(refs, self._upcoming, lacking, failed, stopped, self._suspensions)
        new = {ref: each for ref, each in conditions.items() if each != self._conditions.get(ref)}
        self._records.seen(self._upcoming, new, moment.unix)
        self._conditions = conditions if not self._memory.trouble else {}
        self._ready = frozenset(ref for ref, each in conditions.items() if _is_ready(each))
        for ref in self._ready & new.keys():
            self._forgive(ref)
        self._approvals = tuple(self._memory.approvals(moment.unix))
        self._kept, self._drifting = self._memory.conditions(conditions), self._memory.drifts()

    # --- steps ---

    def _orders(self, moment: Moment) -> list[Order]:
        self._pending = {}
        steps = [step for step in self._upcoming.ready if not self._kept_back(step, moment)]
        self._note_waits()
        mine = [doing.step for doing in self._at_work.values()]
        at_my_work = {host for step in mine for host in step.hosts}
        theirs = {**self._busy, **self._reboots(moment), **self._in_doubt(moment)}
        chosen = batch(steps, self._specs.fleet.limits, frozenset(theirs) - at_my_work, mine)
        orders = [order for step in chosen if (order := self._begin(step, moment)) is not None]
        begun = {order.step.id for order in orders}
        for step in steps:
            if step.id not in begun and (step.object, step.layer) not in self._pending:
                at_work = [why for host, why in theirs.items() if host in step.hosts]
                turn = "waits for its turn, or for a fresh look at its hosts"
                self._pend(step, WaitingFor.BUDGET, "; ".join(at_work) or turn)
        return orders

    def _kept_back(self, step: Step, moment: Moment) -> bool:
        """Whether a step may not be begun now for a reason of its own; the reason is noted."""
        if step.id in self._at_work or step.id in self._jobs:
            return True
        grants = self._grants()
        backoff = self._backoffs.get((step.object, step.layer, step.action))
        if why := self._broken(step):
            return self._pend(step, WaitingFor.BLOCKED, why)
        if (held := suspension.held_by(step, self._suspensions, self._specs)) is not None:
            return self._pend(step, WaitingFor.BLOCKED, str(held))
        if missing := grants.missing(step):
            return self._pend(step, WaitingFor.PERMISSION, ", ".join(map(str, missing)))
        if not grants.may(step):
            return self._pend(step, WaitingFor.PERMISSION, f"policy: {{mode: enforce}} in {step.object}")
        if why := self._open_breaker(step, moment):
            return self._pend(step, WaitingFor.BLOCKED, why)
        if backoff is not None and moment.unix < backoff.until <= moment.unix + BACKOFF[1]:
            return self._pend(step, WaitingFor.BACKOFF, backoff.message)
        if why := windows.closed(step, self._specs, moment.date):
            return self._pend(step, WaitingFor.WINDOW, why)
        taken = frozenset(d.object for each in self._at_work.values() for d in each.step.disrupts)
        if why := last_healthy(step, self._specs, self._ready - taken):
            return self._pend(step, WaitingFor.BUDGET, why)
        return False

    def _pend(self, step: Step, what: WaitingFor, message: str) -> bool:
        self._pending[step.object, step.layer] = Pending(step.object, step.layer, what, message)
        return True

    def _note_waits(self) -> None:
        for judged, block in self._upcoming.blocked:
            self._pending[judged.object, judged.layer] = Pending(
                judged.object, judged.layer, WaitingFor.BLOCKED, block.message
            )
        for judged, wait in self._upcoming.waiting:
            self._pending[judged.object, judged.layer] = Pending(
                judged.object, judged.layer, WaitingFor.JOB, wait.message
            )

    def _begin(self, step: Step, moment: Moment) -> Order | None:
        """Begin a step, if what it rests on was seen just now; else look first."""
        old = [host for host in step.hosts if host in self._eyes and self._eyes[host].seen < moment.now - FRESH]
        for host in old:
            self._look_again(host, moment)
        units = observe.units(self._facts[step.hosts[0]]) if step.hosts[0] in self._facts else None
        if old or units is None:
            return None
        grants = self._grants()
        try:  # first: what cannot be recorded is not begun
            cause = self._records.cause(step.object)
            self._records.started(step, self._upcoming, grants, moment.unix)
        except NoState as error:
            self._pend(step, WaitingFor.BLOCKED, str(error))
            return None
        self._at_work[step.id] = _Doing(step, self._upcoming, grants, cause, moment.unix)
        return Order(step, units.generation, units.boot_id)

    def _settle_if_seen(self, doing: _Doing, moment: Moment) -> None:
        """Judge a step that has ended, when all hosts that it touched were looked at after that."""
        step, said = doing.step, doing.said
        if said is None:
            return
        eyes = [self._eyes[host] for host in step.hosts if host in self._eyes]
        if isinstance(said, Done) and any(eye.seen < doing.over for eye in eyes):
            return
        del self._at_work[step.id]
        if isinstance(said, Done) and said.rc == 0 and step.job is not None:
            self._jobs[step.id] = doing
            self._settle_job(doing, moment)
        else:
            self._settle(doing, judge(step, said, doing.before, self._upcoming), moment)

    def _settle_job(self, doing: _Doing, moment: Moment) -> None:
        """A job that was started ends some time, or is not there any more."""
        step = doing.step
        units = observe.units(self._facts[step.hosts[0]]) if step.hosts[0] in self._facts else None
        if units is None or step.job is None:
            return
        job = units.job(step.job)
        if (failed := failed_job(step, self._facts)) is not None:
            ended = Ended(step, Result.FAILED, last_words(failed))
        elif job is not None and job.id == step.id and job.running:
            return
        else:
            ended = judge(step, Done(0, "", ""), doing.before, self._upcoming)
        del self._jobs[step.id]
        self._settle(doing, ended, moment)

    def _settle_earlier(self, moment: Moment) -> None:
        """Steps that an earlier life of the controller began: what the hosts say of them is how they ended."""
        if not self._earlier or any(eye.seen == -math.inf for eye in self._eyes.values()):
            return
        there: dict[str, Unit | Job] = {}
        for facts in self._facts.values():
            if (units := observe.units(facts)) is not None:
                there.update({unit.id: unit for unit in (units.step, *units.jobs) if unit is not None})
        silent = any(observe.units(facts) is None for facts in self._facts.values())
        left = []
        for event in self._earlier:
            unit = there.get(event.step)
            if unit.running if unit is not None else silent:
                left.append(event)  # it is at work, or it may be on a host that does not answer
            elif event.object is not None:
                result, message = self._how_it_ended(event, event.object, unit)
                over = dataclasses.replace(
                    event,
                    key=f"{event.key.removesuffix(':started')}:ended",
                    at=moment.unix,
                    kind=Kind.STEP_ENDED,
                    result=result,
                    message=message,
                    seconds=moment.unix - event.at,
                )
                if self._memory.event(over):
                    what = (event.object, event.layer, event.action)
                    if result is Result.WORKED:
                        self._use_up(what, event, moment)
                    self._count(event.step, what, event.cause, result, message, moment.unix - event.at, moment)
        self._earlier = left

    def _use_up(self, what: Key, begun: Event, moment: Moment) -> None:
        """The approvals for such a step are used; which of them it was begun by, only the earlier life knew."""
        for approval in self._approvals:
            if (approval.of, approval.layer, approval.action) == what and approval.at <= begun.at:
                self._records.used(approval, begun.step, moment.unix)

    def _how_it_ended(self, event: Event, ref: Ref, unit: Unit | None) -> tuple[Result, str]:
        if unit is None:
            return Result.LOST, "the controller was stopped meanwhile, and no host knows of it"
        if unit.rc != 0:
            return Result.FAILED, f"it ended ({unit.how}, exit {unit.rc}) while the controller was stopped"
        verdict = self._upcoming.verdict(ref, event.layer)
        again = isinstance(verdict, Drift) and isinstance(verdict.remedy, Step) and verdict.remedy.id == event.step
        if again or isinstance(verdict, Unseen):
            return Result.LOST, f"it ended while the controller was stopped, and {event.layer} is still not right"
        return Result.WORKED, "it ended while the controller was stopped"

    def _settle(self, doing: _Doing, ended: Ended, moment: Moment) -> None:
        step = doing.step
        self._records.ended(ended, doing.grants, moment.unix)
        what = (step.object, step.layer, step.action)
        self._count(step.id, what, doing.cause, ended.result, ended.message, moment.unix - doing.began, moment)
        self._approvals = tuple(self._memory.approvals(moment.unix))  # last: it raises NoState

    def _count(
        self, step: str, what: Key, cause: str, result: Result, message: str, seconds: float, moment: Moment
    ) -> None:
        """Count a step that has ended, and decide when it may be tried again if it is needed again."""
        ref, layer, action = what
        self._board.step_ended(StepKind(layer, action, cause, result), max(0.0, seconds))
        if result not in (Result.STALE, Result.REFUSED):  # nothing was done then
            self._past.append(_Past(moment.unix, step, ref, layer, action, result is Result.WORKED))
        self._changed = True  # conditions say what has failed
        times = self._times(step, ref, moment)
        if result is Result.STALE:
            self._back_off(what, SOON, message, moment)
        elif result is Result.REFUSED:
            self._back_off(what, HELD, message, moment)
        elif result is not Result.WORKED:
            self._back_off(what, None, message, moment)
        elif times > 1:
            self._back_off(what, None, f"{action} was done {times} times within an hour and is needed again", moment)
        else:
            self._forgive(what)

    def _times(self, step: str, ref: Ref, moment: Moment) -> int:
        """How often the very same step was done lately: what is needed again and again does not help."""
        since = max(moment.unix - PERIOD_OF_BREAKER, self._since(ref, moment))
        return sum(1 for past in self._past if past.id == step and past.unix >= since)

    def _back_off(self, key: Key, seconds: float | None, message: str, moment: Moment) -> None:
        """Leave a step alone for so long; None: for longer each time."""
        tries = self._backoffs[key].tries + 1 if key in self._backoffs else 1
        wait = _pause(tries) if seconds is None else seconds
        self._backoffs[key] = backoff = Backoff(tries, moment.unix + wait, message)
        self._memory.back_off(key, backoff)

    def _forgive(self, what: Ref | Key) -> None:
        gone = [key for key in self._backoffs if what in (key, key[0])]
        for key in gone:
            del self._backoffs[key]
            self._memory.forgive(key)

    def _open_breaker(self, step: Step, moment: Moment) -> str:
        """Why a step that disrupts is not tried any more, "" while it may be."""
        if not step.disrupts:
            return ""
        while self._past and self._past[0].unix < moment.unix - PERIOD_OF_BREAKER:
            self._past.popleft()
        since = self._since(step.object, moment)
        alike = [p for p in self._past if (p.object, p.layer, p.action) == (step.object, step.layer, step.action)]
        useless = [p for p in alike if p.unix >= since and (not p.worked or p.id == step.id)]
        if len(useless) < TRIES_OF_BREAKER:
            return ""
        message = (
            f"{step.action} was tried {len(useless)} times within an hour and did not help: stopped; "
            f"`reconcile resume {step.object}`, or another spec, has it tried again"
        )
        trip = f"breaker:{step.object}:{step.layer}:{step.action}:{useless[0].unix:.0f}"
        if trip not in self._tripped:
            self._tripped.add(trip)
            what = (step.layer, step.action, step.id)
            self._memory.event(Event(trip, moment.unix, Kind.BREAKER, step.object, *what, message=message))
        return message

    def _since(self, ref: Ref, moment: Moment) -> float:
        """Since when it counts what was tried for an object: a time to come is of a clock that was put right since."""
        at = self._resumed.get(ref, -math.inf)
        return at if at <= moment.unix else -math.inf

    def _reboots(self, moment: Moment) -> dict[str, str]:
        """Hosts that reboot, until they answer again and what they need first (their cluster) has come back as well."""
        for name in list(self._rebooting):
            units = observe.units(self._facts[name]) if name in self._facts else None
            if name not in self._specs.hosts:
                del self._rebooting[name]
            elif not self._seen_since(name, self._told_to_reboot.get(name, -math.inf)):
                continue
            elif units is not None and not units.rebooting:
                self._rebooting[name] = until = min(self._rebooting[name], moment.now + SETTLING)
                if moment.now >= until or self._is_back(name):
                    del self._rebooting[name]
                    self._told_to_reboot.pop(name, None)
        return {name: f"{name} reboots" for name in self._rebooting}

    def _is_back(self, name: str) -> bool:
        gating = [layer.name for layer in self._layers if layer.gates is Gate.ALL]
        verdicts = [self._upcoming.verdict(Ref("Host", name), layer) for layer in gating]
        known = all(isinstance(section, Known) for section in self._facts[name].sections.values())
        return known and all(isinstance(verdict, InSync | Skipped | None) for verdict in verdicts)

    def _in_doubt(self, moment: Moment) -> dict[str, str]:
        """Hosts on which a step may still be at work: its end was not seen, and they do not answer."""
        for host, (_, since, until) in list(self._lost.items()):
            answers = host in self._facts and observe.units(self._facts[host]) is not None
            if moment.now >= until or (answers and self._seen_since(host, since)):
                del self._lost[host]
        return {
            host: f"{step} may still run on {host}, which does not answer" for host, (step, *_) in self._lost.items()
        }

    def _seen_since(self, host: str, moment: float) -> bool:
        """Whether what is known of a host is from a look that was begun at that moment or later."""
        return host in self._eyes and self._eyes[host].seen >= moment


def _pause(tries: int) -> float:
    """Seconds until a step that did not work so often is tried again."""
    return min(BACKOFF[1], BACKOFF[0] * 2.0 ** min(tries - 1, 20))


def _is_ready(conditions: Iterable[Condition]) -> bool:
    return any(c.type is Type.READY and c.status is Status.TRUE for c in conditions)
