"""Where servers run: in containers of a Proxmox host, or on a plain Linux host itself. What looks and acts in there.

A place is told by a container's id, or None for the host itself. What lies in the place of a container goes with it
when it moves, so facts of it are looked for on its old host as long as it has not been seen on the new one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from controller.core.package import text
from controller.core.view import View
from controller.core.words import Drift, NotKnown, Script, Step
from controller.facts.files import File, read_files
from controller.facts.words import FleetFacts, Known, Later, ParseError
from controller.layers.access.facts import AccessFacts
from controller.layers.power.facts import PowerFacts
from controller.layers.shared.place import Place as Place
from controller.layers.shared.place import place_of as place_of
from controller.spec.model import Lifecycle, ModelServer, Specs, State

ROOT = "/opt/reconcile"
"""Under which everything of ours lies in a place; units lie where systemd wants them."""
UNITS = "/etc/systemd/system"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Inside(Generic[T]):
    """A layer's facts of every place of a host that could be looked into; a layer derives a class from it.

    ``between`` are containers that just start or stop. A place that is in neither does not run: nothing is known of it.
    """

    places: tuple[tuple[int | None, T], ...] = ()
    between: frozenset[int] = frozenset()

    def of(self, vmid: int | None) -> T | None:
        """What is there, None when the place was not looked into."""
        return next((value for where, value in self.places if where == vmid), None)

    def having(self, vmid: int | None, value: T) -> Self:
        """A copy in which this is there. For predictions."""
        others = tuple(each for each in self.places if each[0] != vmid)
        return dataclasses.replace(self, places=tuple(sorted((*others, (vmid, value)), key=_in_order)))


def _in_order(entry: tuple[int | None, object]) -> int:
    return -1 if entry[0] is None else entry[0]


@dataclass(frozen=True, slots=True)
class Seen(Generic[T]):
    """What is known of a server's place: nothing (None) while its container has not been started where it will run.

    ``certain`` is whether it was seen in the place as it is now: not so for a container that will have moved.
    """

    value: T | None
    certain: bool


def why_not(specs: Specs, server: ModelServer) -> str:
    """Why a server is not looked after where its spec wants it, "" when it is."""
    place = place_of(specs, server)
    host = specs.hosts[place.host]
    if host.lifecycle is not Lifecycle.ACTIVE:
        return f"{host.name}: {host.lifecycle}"
    if server.container is not None and specs.containers[server.container].state is State.STOPPED:
        return f"{server.container} is to be stopped"
    return ""


def look(view: View, place: Place, section: str, kind: type[Inside[T]]) -> Seen[T]:
    """What a layer's facts say of a place. Raises NotKnown when the host is not known, or the container is in between.

    In a plan, what lies in a container that will have been moved is what was seen on the host that it ran on.
    """
    here = view.fact(place.host, section, kind)
    found = here.of(place.vmid)
    if found is not None:
        return Seen(found, certain=True)
    if place.vmid is None:
        raise NotKnown("not-looked-into", f"{place.host} did not say what is on itself")
    running = view.fact(place.host, "container.power", PowerFacts).of(place.vmid)
    if place.vmid in here.between or (running is not None and not isinstance(running.started, Later)):
        raise NotKnown("in-between", f"CT {place.vmid} is just being started or stopped")
    for facts in view.facts.values():
        known = facts.section(section)
        if isinstance(known, Known) and isinstance(known.value, kind):
            elsewhere = known.value.of(place.vmid)
            if elsewhere is not None and _one_cluster(view, place.host, facts.host):
                return Seen(elsewhere, certain=False)
    return Seen(None, certain=False)


def working_place(view: View, server: ModelServer) -> tuple[Place, bool]:
    """Where things can be made ready for a server now; the second value is whether its container is still to move.

    That is inside the container on the host that it still runs on. One that runs nowhere is waited for.
    """
    place = place_of(view.specs, server)
    if place.vmid is None or _runs(view, place):
        return place, False
    for name in view.facts:
        other, spec = Place(name, place.vmid), view.specs.hosts.get(name)
        if spec is None or spec.lifecycle is Lifecycle.MAINTENANCE or name == place.host:
            continue
        if _one_cluster(view, place.host, name) and _runs(view, other):
            return other, True
    return place, False


def made_ahead(drift: Drift, *, ahead: bool) -> Drift:
    """The drift of something that is made ready where its container still runs: the layers below hold up nothing."""
    if ahead and isinstance(drift.remedy, Step):
        return dataclasses.replace(drift, remedy=dataclasses.replace(drift.remedy, independent=True))
    return drift


def _runs(view: View, place: Place) -> bool:
    known = view.facts[place.host].section("container.power")
    if place.vmid is None or not isinstance(known, Known) or not isinstance(known.value, PowerFacts):
        return False
    running = known.value.of(place.vmid)
    return running is not None


def _one_cluster(view: View, one: str, other: str) -> bool:
    """Whether a container of one host may have come from the other: ids are a cluster's own."""
    return one == other or _cluster(view, one) == _cluster(view, other)


def _cluster(view: View, host: str) -> str | None:
    known = view.facts[host].section("host.access")
    if isinstance(known, Known) and isinstance(known.value, AccessFacts) and known.value.cluster is not None:
        return known.value.cluster.name
    return None


def after(
    facts: FleetFacts, place: Place, section: str, kind: type[Inside[T]], change: Callable[[T | None], T]
) -> FleetFacts:
    """The facts after a step that makes the place so; for effects. ``change`` gets what was there, if that is known."""
    known = facts[place.host].section(section)
    if not isinstance(known, Known) or not isinstance(known.value, kind):
        return facts
    made = known.value.having(place.vmid, change(known.value.of(place.vmid)))
    return {**facts, place.host: facts[place.host].with_section(section, made)}


# What is asked, and how the answer is read


def probe(package: str, name: str) -> str:
    """A layer's fragment that looks into places: with ``places``, ``plain``, ``want`` and ``wanted`` before it."""
    return text("controller.layers.shared", "places.sh") + text(package, name)


def script(package: str, name: str) -> Script:
    """An action's script about one place: with ``enter_place``, ``inside``, ``put`` and ``inside_job`` before it."""
    return Script(
        f"{package.replace('.', '/')}/{name}", text("controller.layers.shared", "inside.sh") + text(package, name)
    )


@dataclass(frozen=True, slots=True)
class Told:
    """What a fragment told of one place: its own lines, and the small files it has by their paths inside."""

    lines: tuple[str, ...]
    files: Mapping[str, File]


def read(out: str) -> tuple[dict[int | None, Told], frozenset[int]]:
    """Split an answer of ``places`` and ``wanted`` by place, and tell who is in between. Raises ParseError."""
    plain, mark, rest = out.partition("==files\n")
    if not mark:
        raise ParseError("cut-off", "what was found in places has no end")
    lines: dict[int | None, list[str]] = {}
    roots: dict[str, int | None] = {}
    between: set[int] = set()
    here: list[str] | None = None
    for line in plain.split("\n")[:-1]:
        match line.split(" "):
            case ["place", "-"]:
                here = lines.setdefault(None, [])
            case ["place", vmid, pid]:
                here = lines.setdefault(int(vmid), [])
                roots[f"/proc/{pid}/root/"] = int(vmid)
            case ["between", vmid]:
                between.add(int(vmid))
            case _ if here is not None:
                here.append(line)
            case _:
                raise ParseError("garbage", f"cannot tell of which place {line[:80]!r} is")
    files: dict[int | None, dict[str, File]] = {where: {} for where in lines}
    for path, file in read_files(rest).items():
        # A test's tree stands before it
        root = next((each for each in roots if each in path), None)
        if root is None:
            files[None][path] = file
        else:
            files[roots[root]]["/" + path.partition(root)[2]] = file
    return {where: Told(tuple(found), files[where]) for where, found in lines.items()}, frozenset(between)
