"""server.output: what the server says makes sense, as fast as it should be, with as many drafts accepted as it should.

The canaries (``shared/checks/canaries.py``) are asked by a job on the serving machine once for each run of the server
with the same files; the watch asks them again now and then. A failed one is drift, with the answer as evidence. Where
``policy.rollback`` says so, a unit that failed makes room for the last good one. That it failed is remembered there: it
is not tried again until the spec or the GPUs change.
"""

from __future__ import annotations

import dataclasses
import json

from controller.core.view import View
from controller.core.words import Block, Disruption, Drift, InSync, Layer, NotKnown, Skipped, Step, Unseen, Verdict
from controller.engines.registry import NoEngine, engine
from controller.engines.words import Engine
from controller.facts.words import FleetFacts, Known, Later
from controller.layers.server_health.facts import Health, HealthFacts, Level
from controller.layers.server_output.facts import Check, Failed, Good, Judged, Output, OutputFacts, Result, parse
from controller.layers.server_output.reasons import Reason
from controller.layers.server_process.facts import ProcessesHere, ProcessFacts, ServerProcess
from controller.layers.server_unit.facts import Arguments, Marker, ServerUnit, ServerUnits, UnitsHere
from controller.layers.shared import checking, inside, jobs, server_wanted
from controller.layers.shared.inside import Place
from controller.spec.model import ModelServer, ServerState
from controller.spec.policy import Permission

NAME = "server.output"
_PACKAGE = "controller.layers.server_output"
PREDICTED = "predicted"
"""The run of the server that a plan's measurement is of."""
NO_ROLLBACK = (Reason.SLOWER_THAN_BEFORE,)
"""What going back to an earlier unit would not put right: the unit is the same that was faster."""


def check(view: View, server: ModelServer) -> Verdict:
    """Whether this run of the server, with these files, answered as it should."""
    if server.state is not ServerState.RUNNING:
        return Skipped(f"it is to be {server.state}")
    if why := inside.why_not(view.specs, server):
        return Skipped(why)
    place = inside.place_of(view.specs, server)
    units = inside.look(view, place, "server.unit", ServerUnits).value
    unit = units.of(server.name) if units is not None else None
    if unit is None or unit.arguments is None or unit.marker is None:
        return Skipped("it has no unit yet")
    try:
        kind = engine(unit.arguments.engine)
    except NoEngine as none:
        return Skipped(str(none))
    seen = inside.look(view, place, NAME, OutputFacts).value or ()
    judged = next((each for each in seen if each.server == server.name), Judged(server.name))
    if judged.unreadable:
        raise NotKnown("garbage", judged.unreadable)
    one = _One(view, server, place, kind, unit, unit.marker, unit.arguments, judged)
    processes = inside.look(view, place, "server.process", ProcessFacts)
    here = processes.value if processes.certain else None
    process = (here.of(server.name) if here is not None else None) or ServerProcess(server.name, down=True)
    if (down := one.ended(process) or one.not_up(process)) is not None and (back := one.way_back(down)) is not None:
        return back
    if process.main is None:
        return Skipped("it does not run")
    return one.verdict(process)


@dataclasses.dataclass(frozen=True)
class _One:
    """One server, with what its verdict rests on."""

    view: View
    server: ModelServer
    place: Place
    kind: Engine
    unit: ServerUnit
    marker: Marker
    arguments: Arguments
    judged: Judged

    def verdict(self, process: ServerProcess) -> Verdict:
        """Of a server that runs."""
        output = self.judged.output
        if output is None or not self._is_of(output, process):
            message = f"nobody has asked {self.server.name} anything since it was started so"
            return jobs.drift(self.view, Reason.NOT_MEASURED, message, self._ask())
        if output.failed:
            return self._wrong(output)
        if self._is_put_back:
            return self._rolled_back()
        if output.undecided:
            undecided = "; ".join(f"{check.name}: {check.evidence}" for check in output.undecided)
            if len(output.undecided) == len(output.checks):
                return Unseen(Reason.INCONCLUSIVE, f"{self.server.name} could not be judged: {undecided}")
            return InSync(f"could not be judged: {undecided}")
        return InSync(_told(output))

    def _is_of(self, output: Output, process: ServerProcess) -> bool:
        """Whether it was measured on this unit, this run of it, and by what is asked for now."""
        if output.unit != self.marker.digest or output.asked != checking.asked(self.server, self.kind):
            return False
        if output.process == PREDICTED:
            return True
        started = process.main.started if process.main is not None else None
        return not isinstance(started, Later) and output.process.split(" ")[-1] == str(started)

    def _wrong(self, output: Output) -> Drift:
        first = output.failed[0]
        reason = _reason(first)
        evidence = {check.name: check.evidence for check in output.failed}
        names = ", ".join(check.name for check in output.failed)
        message = f"{self.server.name} fails {names}: {first.evidence}"
        back = [check for check in output.failed if _reason(check) not in NO_ROLLBACK]
        trouble = Trouble(reason, message, tuple(check.reason for check in back), evidence)
        if back and (way := self.way_back(trouble)) is not None:
            return way
        needs = "look at the answers above; another version of the engine, other flags or other weights may be right"
        if self.server.policy.rollback and back:
            needs = f"{needs}; there is no other good one to go back to"
        return Drift(reason, message, Block(reason, message, needs), evidence)

    @property
    def _is_put_back(self) -> bool:
        """Whether the last good unit is there in place of what the spec still asks for."""
        failure = self.judged.failure(self.marker.instead_of) if self.marker.instead_of else None
        return failure is not None and failure.spec == _meaning(self.server)

    def _rolled_back(self) -> Drift:
        failure = self.judged.failure(self.marker.instead_of)
        said = failure.evidence if failure is not None else ""
        message = f"{self.server.name} serves with its last good unit: what the spec asks for has failed: {said}"
        needs = "change the spec: the same engine and flags are not tried again on the same GPUs"
        return Drift(Reason.ROLLED_BACK, message, Block(Reason.ROLLED_BACK, message, needs), {"failed": said})

    def ended(self, process: ServerProcess) -> Trouble | None:
        """What the unit has done that is there, when it ended and systemd starts it no more."""
        last = process.ends[-1] if process.ends else None
        if process.main is not None or not process.down or last is None or last.result == "success":
            return None
        if process.digest != self.marker.digest:
            return None
        how = f"{last.result} ({last.code} {last.status})"
        message = f"{self.server.name} ends as it starts, last by {how}"
        return Trouble(Reason.ENDS, message, (Reason.ENDS,), {"end": how, **_log(self._health())})

    def not_up(self, process: ServerProcess) -> Trouble | None:
        """What keeps the unit that is there from being ready, when its time or its tries are up."""
        health = self._health()
        if health is None or process.digest != self.marker.digest or health.level is Level.GENERATES:
            return None
        evidence = {"seen": health.evidence, **_log(health)}
        if health.ends >= checking.LOOP:
            message = f"{self.server.name} ends again and again: {health.evidence}"
            return Trouble(Reason.ENDS, message, (Reason.ENDS,), evidence)
        started = process.main.started if process.main is not None else None
        budget = self.server.checks.startup_budget.total_seconds()
        if started is None or health.started != started or health.took is not None or health.starting <= budget:
            return None
        message = f"{self.server.name} is not ready after {health.starting:.0f} s: {health.evidence}"
        return Trouble(Reason.NOT_READY, message, (Reason.NOT_READY,), evidence)

    def _health(self) -> Health | None:
        known = self.view.facts[self.place.host].section("server.health")
        if not isinstance(known, Known) or not isinstance(known.value, HealthFacts):
            return None
        health = known.value.server(self.place.vmid, self.server.name)
        return None if health is None or health.unreadable or health.silent else health

    def way_back(self, trouble: Trouble) -> Drift | None:
        """The step to the last good unit, None where there is none, or the spec does not want it."""
        good = self.judged.good
        if not self.server.policy.rollback or good is None or good.unit == self.marker.digest:
            return None
        return Drift(trouble.reason, trouble.message, self._put_back(good, trouble), dict(trouble.evidence))

    def _ask(self) -> Step:
        def effect(facts: FleetFacts) -> FleetFacts:
            answered = Output(
                self.marker.digest,
                self.arguments.env_digest,
                PREDICTED,
                checking.asked(self.server, self.kind),
                (Check("predicted", Result.PASSED),),
            )
            return self._having(facts, dataclasses.replace(self.judged, output=answered))

        return Step(
            action="check-output",
            object=self.server.ref,
            layer=NAME,
            reason=Reason.NOT_MEASURED,
            summary=f"ask {self.server.name} in {self.place} what it has to know",
            hosts=(self.place.host,),
            script=inside.script(_PACKAGE, "check-output.sh"),
            args=(self.place.argument, self.server.name, self._python),
            timeout=7500.0,
            job=f"output-{self.server.name}",
            effect=effect,
        )

    @property
    def _python(self) -> str:
        return f"{self.arguments.env_dir}/bin/python"

    def _put_back(self, good: Good, trouble: Trouble) -> Step:
        failure = Failed(
            self.marker.digest,
            self.arguments.env_digest,
            _meaning(self.server),
            trouble.reasons,
            trouble.message[:1500],
        )
        step = Step(
            action="roll-back",
            object=self.server.ref,
            layer=NAME,
            reason=trouble.reason,
            summary=f"put the last good unit of {self.server.name} in {self.place} back, and restart it",
            hosts=(self.place.host,),
            script=inside.script(_PACKAGE, "put-back.sh"),
            args=(self.place.argument, self.server.name, self._python, self.marker.digest, good.unit),
            stdin=json.dumps(dataclasses.asdict(failure)).encode(),
            disrupts=(Disruption(self.server.ref, Permission.RESTART_SERVER),),
            timeout=900.0,
            independent=True,  # what runs is not as it should be: that is what it is for
        )

        def effect(facts: FleetFacts) -> FleetFacts:
            restarted = checking.started_anew(facts, self.place, self.server.name, step.id)
            written = inside.after(
                restarted, self.place, "server.unit", ServerUnits, lambda here: self._back(here, good)
            )
            noted = inside.after(
                written, self.place, "server.process", ProcessFacts, lambda here: self._runs(here, good)
            )
            remembered = (*self.judged.failed, failure)
            return self._having(noted, dataclasses.replace(self.judged, failed=remembered, output=None))

        return dataclasses.replace(step, effect=effect)

    def _back(self, here: UnitsHere | None, good: Good) -> UnitsHere:
        marker = dataclasses.replace(
            self.marker, digest=good.unit, environment=good.environment, instead_of=self.marker.digest
        )
        now = dataclasses.replace(self.unit, marker=marker)
        return UnitsHere(tuple(now if each.name == now.name else each for each in (here or UnitsHere()).units))

    def _runs(self, here: ProcessesHere | None, good: Good) -> ProcessesHere:
        known = here or ProcessesHere()
        now = tuple(
            dataclasses.replace(each, digest=good.unit) if each.name == self.server.name else each
            for each in known.servers
        )
        return dataclasses.replace(known, servers=now)

    def _having(self, facts: FleetFacts, judged: Judged) -> FleetFacts:
        def changed(here: tuple[Judged, ...] | None) -> tuple[Judged, ...]:
            return (*(each for each in here or () if each.server != judged.server), judged)

        return inside.after(facts, self.place, NAME, OutputFacts, changed)


@dataclasses.dataclass(frozen=True)
class Trouble:
    """What is wrong with a unit, for which it may make room for the last good one."""

    reason: Reason
    message: str
    reasons: tuple[str, ...]
    evidence: dict[str, str]


def _meaning(server: ModelServer) -> str:
    """The digest of what a spec means by a server, wherever it runs."""
    return server_wanted.asked(server, (), "")


def _reason(check: Check) -> Reason:
    try:
        return Reason(check.reason)
    except ValueError:
        return Reason.WRONG_OUTPUT


def _log(health: Health | None) -> dict[str, str]:
    lines = health.crashes[-1].lines if health is not None and health.crashes else ()
    return {"log": " / ".join(lines[-8:])[:2000]} if lines else {}


def _told(output: Output) -> str:
    """The figures of a server that passed, for people."""
    figures = output.figures
    told = []
    if figures.tokens_per_second is not None:
        told.append(f"{figures.tokens_per_second:.1f} tokens/s")
    if figures.first_token_seconds is not None:
        told.append(f"first token after {figures.first_token_seconds * 1000:.0f} ms")
    if figures.draft_acceptance is not None:
        told.append(f"{figures.draft_acceptance:.0%} of drafts accepted")
    return ", ".join(told)


LAYER = Layer(
    name=NAME,
    kind="ModelServer",
    reasons=Reason,
    check=check,
    probe=inside.probe(_PACKAGE, "probe.sh"),
    parse=parse,
)
