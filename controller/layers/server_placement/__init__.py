"""server.placement: the server's unit is in its container or host and nowhere else.

A server that moves goes on where it was until everything is ready where it will be. With ``strategy: stop-first`` it is
then stopped there by ``server.process``, which starts it in its new place next; with ``start-first`` it serves there
before the old one is stopped by this layer.
"""

from __future__ import annotations

from controller.core.view import View
from controller.core.words import Block, Drift, InSync, Layer, Skipped, Verdict
from controller.facts.words import Known
from controller.layers.server_health.facts import HealthFacts, Level
from controller.layers.server_placement.facts import UNREADABLE, FoundFacts, parse
from controller.layers.server_placement.reasons import Reason
from controller.layers.server_process.facts import ProcessesHere, ProcessFacts
from controller.layers.shared import inside, whereabouts
from controller.layers.shared.inside import Place
from controller.layers.shared.server_wanted import is_managed
from controller.spec.model import Lifecycle, ModelServer, ServerState
from controller.spec.policy import Strategy

NAME = "server.placement"
_PACKAGE = "controller.layers.server_placement"


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
    if mine is not None and mine.object not in ("", UNREADABLE, *whereabouts.names(server)):
        message = f"{server.name} in {place} is {mine.object}'s"
        needs = f"rename one of the two, or remove /opt/reconcile/server/{server.name} there if nobody needs it"
        return Drift(Reason.OTHER_OBJECTS, message, Block(Reason.OTHER_OBJECTS, message, needs))
    return _elsewhere(view, server, place)


def _absent(view: View, server: ModelServer) -> Verdict:
    """Nothing of it is to be left anywhere but its environment and weights."""
    there = next(iter(whereabouts.everywhere(view, server)), None)
    if there is None:
        return InSync()
    message = f"{server.name} is in {there.place} and is to be absent"
    return Drift(Reason.ABSENT_WANTED, message, whereabouts.leave(server, there, NAME, Reason.ABSENT_WANTED))


def _elsewhere(view: View, server: ModelServer, place: Place) -> Verdict:
    others = whereabouts.others(view, server, place)
    for there in others:
        renamed = there.found.name != server.name
        if not there.at_work and not renamed:
            continue
        was = f"{there.found.name} in {there.place}"
        if why := _not_ready(view, server, place, there.place):
            return InSync(f"it goes on as {was} until it can be replaced: {why}")
        reason = Reason.RENAMED if renamed else Reason.STILL_ELSEWHERE
        return Drift(reason, f"{server.name} is still {was}", whereabouts.leave(server, there, NAME, reason))
    return InSync(_unseen(view, place))


def _not_ready(view: View, server: ModelServer, place: Place, old: Place) -> str:
    """What is still missing in the new place before the old one may be stopped, "" when nothing is."""
    if server.state is ServerState.STOPPED:
        return ""
    processes = inside.look(view, place, "server.process", ProcessFacts).value or ProcessesHere()
    process = processes.of(server.name)
    if process is None or process.main is None:
        return f"it does not run in {place} yet"
    if server.policy.strategy is not Strategy.START_FIRST or old == place:
        return ""
    known = view.facts[place.host].section("server.health")
    facts = known.value if isinstance(known, Known) else None
    health = facts.server(place.vmid, server.name) if isinstance(facts, HealthFacts) else None
    if health is None or health.level is not Level.GENERATES:
        return f"it does not answer in {place} yet"
    return ""


def _unseen(view: View, place: Place) -> str:
    """The hosts on which it could be as well, for all that is known."""
    hidden = [
        host.name
        for host in view.specs.hosts.values()
        if host.name != place.host
        and host.lifecycle is Lifecycle.ACTIVE
        and (facts := view.facts.get(host.name)) is not None
        and not isinstance(facts.section(NAME), Known)
    ]
    return f"whether it also is on {', '.join(hidden)} cannot be seen" if hidden else ""


LAYER = Layer(
    name=NAME,
    kind="ModelServer",
    reasons=Reason,
    check=check,
    probe=inside.probe(_PACKAGE, "probe.sh"),
    parse=parse,
)
