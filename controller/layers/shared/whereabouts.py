"""Where servers of an object are, under its name or an earlier one, and taking one out of a place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from controller.core.view import View
from controller.core.words import Disruption, Step
from controller.facts.words import FleetFacts, Known
from controller.layers.access.facts import AccessFacts
from controller.layers.server_placement.facts import Found, FoundFacts
from controller.layers.server_process.facts import ProcessesHere, ProcessFacts
from controller.layers.shared import inside
from controller.layers.shared.inside import Place
from controller.spec.model import ModelServer, ServerState
from controller.spec.policy import Permission

SECTION = "server.placement"


@dataclass(frozen=True, slots=True)
class There:
    """A server of an object in some place, under its name or an earlier one."""

    place: Place
    found: Found

    @property
    def at_work(self) -> bool:
        """Whether it runs there, or would after the next start of that place."""
        return self.found.active or self.found.enabled


def names(server: ModelServer) -> tuple[str, ...]:
    """Whose a server of this object says it is."""
    earlier = server.renamed_from
    return (str(server.ref), *((f"ModelServer/{earlier}",) if earlier is not None else ()))


def everywhere(view: View, server: ModelServer) -> Iterator[There]:
    """What of this object was seen anywhere, in its own place last."""
    own = inside.place_of(view.specs, server)
    found = []
    for host, facts in view.facts.items():
        known = facts.section(SECTION)
        if not isinstance(known, Known) or not isinstance(known.value, FoundFacts):
            continue
        for vmid, servers in known.value.places:
            found += [There(Place(host, vmid), each) for each in servers if each.object in names(server)]
    yield from sorted(found, key=lambda there: (there.place == own, there.place.host, there.place.vmid or 0))


def others(view: View, server: ModelServer, place: Place) -> list[There]:
    """What of this object was seen anywhere but in its own place under its own name."""
    return [there for there in everywhere(view, server) if not _is_here(view, there, server, place)]


def _is_here(view: View, there: There, server: ModelServer, place: Place) -> bool:
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


def leave(server: ModelServer, there: There, layer: str, reason: str) -> Step:
    """Stop and disable it there; one under an earlier name, or of an object that is to be absent, is removed.

    Environments and weights stay: others may use them.
    """
    gone = there.found.name != server.name or server.state is ServerState.ABSENT
    action, what = ("remove", "remove") if gone else ("stop", "stop and disable")
    step = Step(
        action="remove-server" if gone else "stop-server-there",
        object=server.ref,
        layer=layer,
        reason=reason,
        summary=f"{what} {there.found.name} in {there.place}",
        hosts=(there.place.host,),
        script=inside.script("controller.layers.shared", "leave-place.sh"),
        args=(action, there.place.argument, there.found.name, there.found.object),
        disrupts=(Disruption(server.ref, Permission.RESTART_SERVER),),
        timeout=900.0,
    )

    def effect(facts: FleetFacts) -> FleetFacts:
        def found(here: tuple[Found, ...] | None) -> tuple[Found, ...]:
            rest = tuple(each for each in here or () if each.name != there.found.name)
            stopped = dataclasses.replace(there.found, enabled=False, active=False)
            return rest if action == "remove" else tuple(sorted((*rest, stopped), key=lambda each: each.name))

        def processes(here: ProcessesHere | None) -> ProcessesHere:
            known = here or ProcessesHere()
            unit = f"reconcile-{there.found.name}.service"
            return dataclasses.replace(
                known,
                servers=tuple(each for each in known.servers if each.name != there.found.name),
                listeners=tuple(each for each in known.listeners if each.unit != unit),
            )

        made = inside.after(facts, there.place, SECTION, FoundFacts, found)
        return inside.after(made, there.place, "server.process", ProcessFacts, processes)

    return dataclasses.replace(step, effect=effect)
