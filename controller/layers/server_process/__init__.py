"""server.process: what listens on the server's port is its unit's process, as the unit says it now, on its GPUs.

A server that has moved is stopped in its old place as the first half of its start (``strategy: stop-first``). Whether
systemd would start it with its place belongs to it. No process is killed that the unit did not start.
"""

from __future__ import annotations

import dataclasses

from controller.core.view import View
from controller.core.words import Block, Disruption, Drift, InSync, Layer, NotKnown, Skipped, Step, Verdict, Wait
from controller.facts.words import FleetFacts, Later
from controller.layers.server_health.facts import HealthFacts
from controller.layers.server_placement.facts import Found, FoundFacts
from controller.layers.server_process.facts import Listener, Process, ProcessesHere, ProcessFacts, ServerProcess, parse
from controller.layers.server_process.reasons import Reason
from controller.layers.server_unit.facts import Arguments, ServerUnit, ServerUnits
from controller.layers.shared import environments, inside, whereabouts
from controller.layers.shared.advice import advice
from controller.layers.shared.assignment import Unassigned
from controller.layers.shared.inside import Place
from controller.layers.shared.server_gpus import cards_of
from controller.layers.shared.server_wanted import is_managed
from controller.layers.shared.whereabouts import There
from controller.spec.model import ModelServer, ServerState
from controller.spec.policy import Permission, Strategy

NAME = "server.process"
_PACKAGE = "controller.layers.server_process"


def check(view: View, server: ModelServer) -> Verdict:
    """Whether the right process serves, or none when none is to."""
    if not is_managed(server):
        return Skipped("it is only watched")
    if server.state is ServerState.ABSENT:
        return Skipped("it is to be absent")
    if why := inside.why_not(view.specs, server):
        return Skipped(why)
    place = inside.place_of(view.specs, server)
    unit = inside.look(view, place, "server.unit", ServerUnits).value
    written = unit.of(server.name) if unit is not None else None
    if written is None or written.marker is None or written.arguments is None:
        return Skipped("it has no unit yet")
    seen = inside.look(view, place, NAME, ProcessFacts)
    # What ran in a container that will have moved does not run there any more.
    here = seen.value if seen.certain and seen.value is not None else ProcessesHere()
    process = here.of(server.name) or ServerProcess(server.name, down=True)
    if server.state is ServerState.STOPPED:
        return _stopped(view, server, place, process, written)
    return _running(view, server, place, here, process, written)


def _stopped(view: View, server: ModelServer, place: Place, process: ServerProcess, unit: ServerUnit) -> Verdict:
    if process.main is not None:
        message = f"{server.name} runs and is to be stopped"
        return Drift(
            Reason.STILL_RUNNING, message, _step(view, "stop", server, place, Reason.STILL_RUNNING, process, unit)
        )
    if _found(view, place, server.name).enabled:
        message = f"{server.name} would start with {place}, and is to be stopped"
        return Drift(
            Reason.STILL_ENABLED, message, _step(view, "stop", server, place, Reason.STILL_ENABLED, process, unit)
        )
    return InSync()


def _running(
    view: View,
    server: ModelServer,
    place: Place,
    here: ProcessesHere,
    process: ServerProcess,
    unit: ServerUnit,
) -> Verdict:
    marker, arguments = unit.marker, unit.arguments
    if marker is None or arguments is None:
        raise AssertionError(f"{server.name} has no unit")
    main = process.main
    if main is not None and _is_note(main):
        raise NotKnown("in-between", f"{server.name} is just being started or has just ended")
    mine = {f"reconcile-{name.partition('/')[2]}.service" for name in whereabouts.names(server)}
    foreign = [each for each in here.listeners if each.port == arguments.port and each.unit not in mine]
    if foreign:
        return _foreign(view, server, place, process, unit, foreign[0])
    if main is None:
        return _not_running(view, server, place, process, unit)
    if (process.digest, process.secrets) != _now(unit):
        what = "what its unit said" if process.digest != marker.digest else "the secrets that it had"
        message = f"{server.name} was started with {what} before the last change"
        reason = Reason.STARTED_BEFORE
        return Drift(reason, message, _step(view, "restart", server, place, reason, process, unit))
    if (other := _other_arguments(main, arguments)) is not None:
        return _by_hand(Reason.OTHER_ARGUMENTS, server, place, unit, other, {"runs": " ".join(main.argv)[:1000]})
    if main.gpus is not None and main.gpus != arguments.gpus:
        message = f"{server.name} runs on {', '.join(main.gpus)}, its unit says {', '.join(arguments.gpus) or 'none'}"
        return _by_hand(Reason.OTHER_GPUS, server, place, unit, message, {})
    if not _found(view, place, server.name).enabled:
        message = f"{server.name} runs, and would not start with {place}"
        reason = Reason.NOT_ENABLED
        return Drift(reason, message, _step(view, "enable", server, place, reason, process, unit))
    return InSync("; ".join(_advice(view, server, here)))


def _advice(view: View, server: ModelServer, here: ProcessesHere) -> tuple[str, ...]:
    """What is worth knowing of a server that runs as it should; nothing where that cannot be told."""
    try:
        cards = cards_of(view, server)
        cuda_home = environments.wanted(view, server).cuda_home
    except NotKnown:
        return ()
    return () if isinstance(cards, Unassigned) else advice(view, server, cards, here.shm, cuda_home)


def _not_running(view: View, server: ModelServer, place: Place, process: ServerProcess, unit: ServerUnit) -> Drift:
    reason = Reason.NOT_RUNNING
    there = _to_be_stopped_first(view, server, place)
    if there is not None:
        message = f"{server.name} still is {there.found.name} in {there.place}, and is ready in {place}"
        reason = Reason.STILL_ELSEWHERE
        return Drift(reason, message, whereabouts.leave(server, there, NAME, reason))
    if process.others or not process.down:
        message = f"{server.name} has just ended, and systemd starts it again by itself"
        return Drift(reason, message, Wait("restart", message, (place.host,)))
    last = process.ends[-1] if process.ends else None
    if last is None or last.result == "success" or (process.digest, process.secrets) != _now(unit):
        message = f"{server.name} does not run"
        return Drift(reason, message, _step(view, "start", server, place, reason, process, unit))
    # systemd has started it again for as long as that made sense.
    times = f" {len(process.ends)} times" if len(process.ends) > 1 else ""
    message = f"{server.name} has ended{times}, last by {last.result} ({last.code} {last.status})"
    needs = (
        f"look at `journalctl -u reconcile-{server.name}` in {place} and change the spec; when its cause has gone "
        f"without that: `systemctl reset-failed reconcile-{server.name}` there, and `systemctl start` it"
    )
    return Drift(Reason.CRASHED, message, Block(Reason.CRASHED, message, needs), _log(view, place, server.name))


def _to_be_stopped_first(view: View, server: ModelServer, place: Place) -> There | None:
    """The same server in another place or under an earlier name, that has to end before this one starts."""
    for there in whereabouts.others(view, server, place):
        first = server.policy.strategy is Strategy.START_FIRST and there.place != place
        if there.at_work and not first:
            return there
    return None


def _now(unit: ServerUnit) -> tuple[str, str]:
    """What a start notes that is made with the unit as it is now."""
    return unit.marker.digest if unit.marker is not None else "", unit.secret_digest


def _log(view: View, place: Place, name: str) -> dict[str, str]:
    """The telling lines of its log, as its watch found them."""
    known = view.facts[place.host].section("server.health")
    health = getattr(known, "value", None)
    found = health.server(place.vmid, name) if isinstance(health, HealthFacts) else None
    lines = [line for crash in found.crashes[-1:] for line in crash.lines] if found is not None else []
    return {"log": " / ".join(lines)[:2000]} if lines else {}


def _foreign(
    view: View,
    server: ModelServer,
    place: Place,
    process: ServerProcess,
    unit: ServerUnit,
    who: Listener,
) -> Drift:
    """Somebody else has the port. It is named; what somebody made by hand is taken over where that is permitted."""
    reason = Reason.FOREIGN_PORT
    told = f"process {who.pid} ({who.command})" if who.pid else "a process that could not be found"
    of = f" of {who.unit}" if who.unit and not who.unit.endswith(".scope") else ""
    message = f"port {who.port} of {place} is taken by {told}{of}, not by {server.name}"
    ours = who.unit.removeprefix("reconcile-").removesuffix(".service") if who.unit.startswith("reconcile-") else ""
    if ours:
        wanted = view.specs.servers.get(ours)
        needs = (
            f"give one of the two another port, or stop {ours}: `state: stopped`"
            if wanted is not None
            else f"nobody's spec has {ours}: stop it there, or give {server.name} another port"
        )
        return Drift(reason, message, Block(reason, message, needs))
    if who.unit.endswith(".service"):
        step = _step(view, "adopt", server, place, reason, process, unit, who.unit)
        return Drift(reason, message, step, {"process": str(who.pid), "unit": who.unit})
    needs = f"end it yourself, or give {server.name} another port: it belongs to no service that could be stopped"
    return Drift(reason, message, Block(reason, message, needs), {"process": str(who.pid)})


def _by_hand(
    reason: Reason, server: ModelServer, place: Place, unit: ServerUnit, message: str, evidence: dict[str, str]
) -> Drift:
    """It was started by our unit and is not what that says: another start would be the same."""
    others = f" ({', '.join(unit.dropins)} change it)" if unit.dropins else ""
    needs = f"look at `systemctl cat reconcile-{server.name}` in {place}: what else changes the unit?{others}"
    return Drift(reason, message, Block(reason, message, needs), evidence)


def _other_arguments(main: Process, arguments: Arguments) -> str | None:
    """How a command line differs from the unit's, None when it does not or has been written over by the program.

    A program that is a script has its interpreter before it.
    """
    argv, wanted = main.argv, arguments.argv
    if not argv or not argv[0].startswith("/") or len(argv) == 1 < len(wanted):
        return None
    if argv[-len(wanted) :] == wanted or (len(argv) > 1 and argv[-len(wanted) + 1 :] == wanted[1:] and len(wanted) > 1):
        return None
    there, not_there = [a for a in argv if a not in wanted], [a for a in wanted if a not in argv]
    return (
        "it runs with other arguments than its unit says: "
        f"{' '.join(there)[:300] or 'nothing'} in place of {' '.join(not_there)[:300] or 'nothing'}"
    )


def _is_note(main: Process) -> bool:
    """Whether this is what the unit runs before a start or after an end."""
    return len(main.argv) > 1 and main.argv[1].endswith("/note.sh")


def _found(view: View, place: Place, name: str) -> Found:
    here = inside.look(view, place, "server.placement", FoundFacts).value or ()
    return next((found for found in here if found.name == name), Found(name))


# What is done about it

_SUMMARY = {
    "start": "start {name} in {place}",
    "restart": "restart {name} in {place}",
    "stop": "stop {name} in {place}",
    "enable": "let {name} start with {place}",
    "adopt": "stop and disable {unit} in {place}, in whose place {name} comes",
}


def _step(
    view: View,
    action: str,
    server: ModelServer,
    place: Place,
    reason: Reason,
    process: ServerProcess,
    unit: ServerUnit,
    other: str = "-",
) -> Step:
    main, arguments = process.main, unit.arguments
    seen = "-" if main is None or isinstance(main.started, Later) else f"{main.pid}:{main.started}"
    classes = {"enable": (), "adopt": (Permission.ADOPT, Permission.RESTART_SERVER)}
    digest = unit.marker.digest if unit.marker is not None else "-"
    step = Step(
        action=f"{action}-server" if action != "adopt" else "adopt-unit",
        object=server.ref,
        layer=NAME,
        reason=reason,
        summary=_SUMMARY[action].format(name=server.name, place=place, unit=other),
        hosts=(place.host,),
        script=inside.script(_PACKAGE, "control.sh"),
        args=(action, place.argument, server.name, seen, digest, str(server.serve.port), other),
        disrupts=tuple(Disruption(server.ref, each) for each in classes.get(action, (Permission.RESTART_SERVER,))),
        timeout=900.0,
    )
    at = Later(step.id)

    def effect(facts: FleetFacts) -> FleetFacts:
        def processes(here: ProcessesHere | None) -> ProcessesHere:
            known = here or ProcessesHere()
            if action == "adopt":
                left = tuple(each for each in known.listeners if each.unit != other)
                return dataclasses.replace(known, listeners=left)
            if action == "enable":
                return known
            others = tuple(each for each in known.servers if each.name != server.name)
            now = ServerProcess(server.name, down=True)
            if action != "stop" and arguments is not None:
                begun = Process(0, at, arguments.argv, arguments.gpus or None)
                now = ServerProcess(server.name, begun, digest=digest, secrets=unit.secret_digest)
            ours = f"reconcile-{server.name}.service"
            listeners = tuple(each for each in known.listeners if each.unit != ours)
            return dataclasses.replace(known, servers=(*others, now), listeners=listeners)

        def found(here: tuple[Found, ...] | None) -> tuple[Found, ...]:
            if action == "adopt":
                return here or ()
            was = next((each for each in here or () if each.name == server.name), Found(server.name, unit=True))
            up = action != "stop"
            now = dataclasses.replace(was, enabled=up, active=up)
            return (*(each for each in here or () if each.name != server.name), now)

        made = inside.after(facts, place, NAME, ProcessFacts, processes)
        return inside.after(made, place, "server.placement", FoundFacts, found)

    return dataclasses.replace(step, effect=effect)


LAYER = Layer(
    name=NAME,
    kind="ModelServer",
    reasons=Reason,
    check=check,
    probe=inside.probe(_PACKAGE, "probe.sh"),
    parse=parse,
)
