"""server.placement: the server's unit is in its container or host and nowhere else.

A server that moves goes on where it was until everything is ready where it will be (its unit is the last of that), and,
with ``strategy: start-first``, until it serves there. Only then is it stopped and disabled in its old place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from controller.core.view import View
from controller.core.words import Block, Disruption, Drift, InSync, Layer, Skipped, Step, Verdict
from controller.facts.words import FleetFacts, Known
from controller.layers.access.facts import AccessFacts
from controller.layers.server_health.facts import HealthFacts, Level
from controller.layers.server_placement.facts import UNREADABLE, Found, FoundFacts, parse
from controller.layers.server_placement.reasons import Reason
from controller.layers.server_process.facts import ProcessesHere, ProcessFacts
from controller.layers.server_unit.facts import ServerUnits
from controller.layers.shared import inside
from controller.layers.shared.inside import Place
from controller.layers.shared.server_wanted import is_managed
from controller.spec.model import ModelServer, ServerState
from controller.spec.policy import Permission, Strategy
from controller.spec.ref import Ref

NAME = "server.placement"
_PACKAGE = "controller.layers.server_placement"


@dataclass(frozen=True, slots=True)
class _There:
    """A server of this object in some place, under its name or an earlier one."""

    place: Place
    found: Found


def check(view: View, server: ModelServer) -> Verdict:
    """Whether the server is in its place only."""
    if not is_managed(server):
        return Skipped("it is only watched")
    place = inside.place_of(view.specs, server)
    if server.state is ServerState.ABSENT:
        return _absent(view, server)
    if why := inside.why_not(view.specs, server):
        return Skipped(why)
    here = inside.look(view, place, NAME, FoundFacts).value or ()
    mine = next((found for found in here if found.name == server.name), None)
    if mine is not None and mine.object not in ("", UNREADABLE, *_names(server)):
        message = f"{server.name} in {place} is {mine.object}'s"
        needs = f"rename one of the two, or remove /opt/reconcile/server/{server.name} there if nobody needs it"
        return Drift(Reason.OTHER_OBJECTS, message, Block(Reason.OTHER_OBJECTS, message, needs))
    return _elsewhere(view, server, place)


def _names(server: ModelServer) -> tuple[str, ...]:
    """Whose a server of this object says it is."""
    earlier = server.renamed_from
    return (str(server.ref), *((f"ModelServer/{earlier}",) if earlier is not None else ()))


def _absent(view: View, server: ModelServer) -> Verdict:
    """Nothing of it is to be left anywhere but its environment and weights."""
    there = next(iter(_all(view, server)), None)
    if there is None:
        return InSync()
    message = f"{server.name} is in {there.place} and is to be absent"
    return Drift(Reason.ABSENT_WANTED, message, _leave("remove", server, there, Reason.ABSENT_WANTED))


def _elsewhere(view: View, server: ModelServer, place: Place) -> Verdict:
    others = [there for there in _all(view, server) if not _is_here(view, there, server, place)]
    at_work = [there for there in others if there.found.active or there.found.enabled]
    renamed = [there for there in others if there.found.name != server.name]
    for there in (*at_work, *renamed):
        was = f"{there.found.name} in {there.place}"
        if why := _not_ready(view, server, place, there.place):
            return InSync(f"it goes on as {was} until it can be replaced: {why}")
        reason = Reason.RENAMED if there.found.name != server.name else Reason.STILL_ELSEWHERE
        action = "remove" if reason is Reason.RENAMED else "stop"
        message = f"{server.name} is still {was}"
        return Drift(reason, message, _leave(action, server, there, reason))
    return InSync(_unseen(view, place))


def _all(view: View, server: ModelServer) -> Iterator[_There]:
    """What of this object was seen anywhere, in its own place last."""
    own = inside.place_of(view.specs, server)
    found = []
    for host, facts in view.facts.items():
        known = facts.section(NAME)
        if not isinstance(known, Known) or not isinstance(known.value, FoundFacts):
            continue
        for vmid, servers in known.value.places:
            found += [_There(Place(host, vmid), each) for each in servers if each.object in _names(server)]
    yield from sorted(found, key=lambda there: (there.place == own, there.place.host, there.place.vmid or 0))


def _is_here(view: View, there: _There, server: ModelServer, place: Place) -> bool:
    """Whether that is the server in its own place, on whichever node the container is now."""
    if there.found.name != server.name or there.place.vmid != place.vmid:
        return False
    if there.place.host == place.host:
        return True
    return place.vmid is not None and _cluster(view, there.place.host) == _cluster(view, place.host) is not None


def _cluster(view: View, host: str) -> str | None:
    known = view.facts[host].section("host.access")
    if not isinstance(known, Known) or not isinstance(known.value, AccessFacts):
        return None
    return known.value.cluster.name if known.value.cluster is not None else None


def _not_ready(view: View, server: ModelServer, place: Place, old: Place) -> str:
    """What is still missing in the new place before the old one may be stopped, "" when nothing is."""
    units = inside.look(view, place, "server.unit", ServerUnits).value
    unit = units.of(server.name) if units is not None else None
    if unit is None or unit.marker is None:
        return f"its unit is not in {place} yet"
    starts_first = server.policy.strategy is Strategy.START_FIRST and old != place
    if server.state is ServerState.STOPPED or not starts_first:
        return ""
    processes = inside.look(view, place, "server.process", ProcessFacts).value or ProcessesHere()
    process = processes.of(server.name)
    if process is None or process.main is None or process.digest != unit.marker.digest:
        return f"it does not run in {place} yet"
    known = view.facts[place.host].section("server.health")
    if isinstance(known, Known) and isinstance(known.value, HealthFacts):
        health = known.value.server(place.vmid, server.name)
        if health is None or health.level is not Level.GENERATES:
            return f"it does not answer in {place} yet"
    return ""


def _unseen(view: View, place: Place) -> str:
    """The hosts on which it could be as well, for all that is known."""
    hidden = [
        host.name
        for host in view.specs.hosts.values()
        if host.name != place.host
        and (facts := view.facts.get(host.name)) is not None
        and not isinstance(facts.section(NAME), Known)
    ]
    return f"whether it also is on {', '.join(hidden)} cannot be seen" if hidden else ""


def _leave(action: str, server: ModelServer, there: _There, reason: Reason) -> Step:
    what = "remove" if action == "remove" else "stop and disable"
    step = Step(
        action=f"{action}-server-there" if action == "stop" else "remove-server",
        object=server.ref,
        layer=NAME,
        reason=reason,
        summary=f"{what} {there.found.name} in {there.place}",
        hosts=(there.place.host,),
        script=inside.script(_PACKAGE, "leave.sh"),
        args=(action, there.place.argument, there.found.name, there.found.object),
        disrupts=(Disruption(Ref("ModelServer", server.name), Permission.RESTART_SERVER),),
        timeout=900.0,
    )

    def effect(facts: FleetFacts) -> FleetFacts:
        def found(here: tuple[Found, ...] | None) -> tuple[Found, ...]:
            others = tuple(each for each in here or () if each.name != there.found.name)
            stopped = dataclasses.replace(there.found, enabled=False, active=False)
            return others if action == "remove" else tuple(sorted((*others, stopped), key=lambda each: each.name))

        def processes(here: ProcessesHere | None) -> ProcessesHere:
            known = here or ProcessesHere()
            unit = f"reconcile-{there.found.name}.service"
            return dataclasses.replace(
                known,
                servers=tuple(each for each in known.servers if each.name != there.found.name),
                listeners=tuple(each for each in known.listeners if each.unit != unit),
            )

        made = inside.after(facts, there.place, NAME, FoundFacts, found)
        return inside.after(made, there.place, "server.process", ProcessFacts, processes)

    return dataclasses.replace(step, effect=effect)


LAYER = Layer(
    name=NAME,
    kind="ModelServer",
    reasons=Reason,
    check=check,
    probe=inside.probe(_PACKAGE, "probe.sh"),
    parse=parse,
)
