"""server.health: ready within its budget, moving when it is busy, and not ending again and again.

A watch beside the server sees how it is (``shared/checks/watch.py``); this layer installs it and judges what it saw.
systemd starts again what ends. What runs and generates nothing any more is restarted from here, once it had been ready.
"""

from __future__ import annotations

import dataclasses
import json

from controller.core.view import View
from controller.core.words import Block, Disruption, Drift, InSync, Layer, NotKnown, Skipped, Step, Verdict, Wait
from controller.engines.registry import NoEngine, engine
from controller.engines.words import Engine, causes_in
from controller.facts.words import FleetFacts, Later
from controller.layers.server_health.facts import SCHEMA, Health, HealthFacts, Level, parse
from controller.layers.server_health.reasons import Reason
from controller.layers.server_process.facts import ProcessFacts, ServerProcess
from controller.layers.server_unit.facts import ServerUnit, ServerUnits
from controller.layers.shared import checking, inside
from controller.layers.shared.checking import LOOP, started_anew
from controller.layers.shared.inside import Place
from controller.spec.model import ModelServer, ServerState
from controller.spec.policy import Permission

NAME = "server.health"
_PACKAGE = "controller.layers.server_health"
STUCK = 300.0
"""Seconds without any progress, with work to do and our own request unanswered, after which a server is stuck: as long
as SGLang's own watchdog waits (--watchdog-timeout, 0.5.11)."""


def check(view: View, server: ModelServer) -> Verdict:
    """Whether the server is ready, and gets on with its work."""
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
    processes = inside.look(view, place, "server.process", ProcessFacts)
    here = processes.value if processes.certain else None
    process = here.of(server.name) if here is not None else None
    if process is None or (process.main is None and process.down):
        return Skipped("it does not run")
    seen = inside.look(view, place, NAME, HealthFacts).value or ()
    health = next((each for each in seen if each.server == server.name), Health(server.name))
    if health.unreadable:
        raise NotKnown("garbage", health.unreadable)
    watch = checking.watch(server, unit.arguments, kind)
    if health.watch != watch.digest:
        message = (
            f"nobody watches {server.name} in {place}" if not health.watch else f"the watch of {server.name} is old"
        )
        return Drift(Reason.NOT_WATCHED, message, _install(server, place, watch, Reason.NOT_WATCHED))
    if health.silent:
        message = f"the watch of {server.name} in {place} says nothing"
        return Drift(Reason.WATCH_SILENT, message, _install(server, place, watch, Reason.WATCH_SILENT))
    return _judge(view, server, place, kind, process, unit, health)


def _judge(
    view: View,
    server: ModelServer,
    place: Place,
    kind: Engine,
    process: ServerProcess,
    unit: ServerUnit,
    health: Health,
) -> Verdict:
    started = process.main.started if process.main is not None else None
    if isinstance(started, Later):
        return InSync("how it is will be seen when it has started")
    if health.ends >= LOOP and health.level is not Level.GENERATES:
        return _loop(server, place, kind, health)
    if started is None or health.started != started:
        message = f"{server.name} was just started"
        return Drift(Reason.STARTING, message, Wait("start", message, (place.host,)))
    evidence = {"level": health.level.value, "seen": health.evidence}
    if health.level is Level.GENERATES:
        return InSync(f"ready after {health.took:.0f} s" if health.took is not None else "")
    if health.level is Level.INCONCLUSIVE:
        raise NotKnown(Reason.INCONCLUSIVE, f"{server.name}: {health.evidence}")
    if health.level is Level.WRONG_MODEL:
        needs = f"look at what listens on port {server.serve.port} in {place}"
        return Drift(Reason.WRONG_MODEL, health.evidence, Block(Reason.WRONG_MODEL, health.evidence, needs), evidence)
    if health.took is not None:
        return _ill(view, server, place, health, evidence)
    budget = server.checks.startup_budget.total_seconds()
    if health.starting <= budget:
        message = f"{server.name} starts since {health.starting:.0f} s of {budget:.0f} s: {health.evidence}"
        return Drift(Reason.STARTING, message, Wait("start", message, (place.host,)), evidence)
    message = (
        f"{server.name} is not ready after {health.starting:.0f} s, {budget:.0f} s are its budget: {health.evidence}"
    )
    needs = (
        f"look at `journalctl -u reconcile-{server.name}` in {place}; a longer `checks.startup_budget` gives it time"
    )
    return Drift(Reason.NOT_READY_IN_TIME, message, Block(Reason.NOT_READY_IN_TIME, message, needs), evidence)


def _ill(view: View, server: ModelServer, place: Place, health: Health, evidence: dict[str, str]) -> Drift:
    """It had been ready and is not any more. What has work and may only be slow is given the time of a stuck one."""
    if 0 < health.stuck < STUCK:
        message = f"{server.name} has work and has not got on with it for {health.stuck:.0f} s"
        return Drift(Reason.STUCK, message, Wait("recovery", message, (place.host,)), evidence)
    reason = Reason.STUCK if health.stuck else Reason.GENERATION_FAILS
    what = f"does not get on since {health.stuck:.0f} s" if health.stuck else "generates nothing any more"
    message = f"{server.name} {what}: {health.evidence}"
    if health.running or health.waiting:
        evidence["requests"] = f"{health.running or 0} running, {health.waiting or 0} waiting"
    return Drift(reason, message, _restart(server, place, reason, health), evidence)


def _loop(server: ModelServer, place: Place, kind: Engine, health: Health) -> Drift:
    """It ends again and again: the log says why, for those who know its words."""
    last = health.crashes[-1] if health.crashes else None
    lines = last.lines if last is not None else ()
    causes = causes_in(kind.causes, lines)
    means = "; ".join(f"{found.cause.means} ({found.line})" for found in causes)
    how = f", last by {last.how}" if last is not None else ""
    message = f"{server.name} has ended {health.ends} times within an hour{how}" + (f": {means}" if means else "")
    todo = "; ".join(found.cause.todo for found in causes)
    needs = todo or f"look at `journalctl -u reconcile-{server.name}` in {place}"
    evidence = {"log": " / ".join(lines[-8:])[:2000]} if lines else {}
    return Drift(Reason.CRASH_LOOP, message, Block(Reason.CRASH_LOOP, message, needs), evidence)


def _install(server: ModelServer, place: Place, watch: checking.Watch, reason: Reason) -> Step:
    marker = json.dumps({"schema": SCHEMA, "object": str(server.ref), "digest": watch.digest}).encode() + b"\n"
    parts = (checking.program(), watch.settings, watch.unit.encode(), marker)

    def effect(facts: FleetFacts) -> FleetFacts:
        def changed(here: tuple[Health, ...] | None) -> tuple[Health, ...]:
            others = tuple(each for each in here or () if each.server != server.name)
            was = next((each for each in here or () if each.server == server.name), Health(server.name))
            return (*others, dataclasses.replace(was, watch=watch.digest, silent=False))

        return inside.after(facts, place, NAME, HealthFacts, changed)

    return Step(
        action="install-watch",
        object=server.ref,
        layer=NAME,
        reason=reason,
        summary=f"install the watch of {server.name} in {place}",
        hosts=(place.host,),
        script=inside.script(_PACKAGE, "install-watch.sh"),
        args=(place.argument, server.name, watch.python, *(str(len(part)) for part in parts)),
        stdin=b"".join(parts),
        timeout=600.0,
        effect=effect,
    )


def _restart(server: ModelServer, place: Place, reason: Reason, health: Health) -> Step:
    step = Step(
        action="restart-ill-server",
        object=server.ref,
        layer=NAME,
        reason=reason,
        summary=f"restart {server.name} in {place}, which {health.evidence or 'is stuck'}"[:200],
        hosts=(place.host,),
        script=inside.script(_PACKAGE, "restart.sh"),
        args=(place.argument, server.name, health.process),
        disrupts=(Disruption(server.ref, Permission.RESTART_SERVER),),
        timeout=900.0,
    )
    return dataclasses.replace(step, effect=lambda facts: started_anew(facts, place, server.name, step.id))


LAYER = Layer(
    name=NAME,
    kind="ModelServer",
    reasons=Reason,
    check=check,
    probe=inside.probe(_PACKAGE, "probe.sh"),
    parse=parse,
)
