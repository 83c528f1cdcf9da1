"""What has to leave a host that goes into maintenance or out of service, and who could take it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from controller.core.view import View
from controller.core.words import Block, Drift, NotKnown, Step
from controller.facts.words import FleetFacts
from controller.layers import placement
from controller.layers.access.facts import AccessFacts
from controller.layers.placement.facts import PlacementFacts
from controller.run.session import Mistake
from controller.spec.model import Container, Lifecycle, Platform, Specs, State
from controller.spec.ref import Ref


@dataclass(frozen=True, slots=True)
class Candidate:
    """A host that could take a container; or why it cannot (``reason``, ``message``), and what that needs."""

    host: str
    reason: str = ""
    message: str = ""
    needs: str = ""

    @property
    def can(self) -> bool:
        """Whether nothing stands in the way."""
        return not self.reason


@dataclass(frozen=True, slots=True)
class Leaving:
    """A container that lies on the host, the servers that go with it, and who could take it."""

    container: Container
    runs: bool
    servers: tuple[str, ...]
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """All that lies on a host: containers of specs, guests of nobody (``210``), servers on the host itself."""

    host: str
    containers: tuple[Leaving, ...]
    foreign: tuple[tuple[str, int], ...]
    servers: tuple[str, ...]

    @property
    def empty(self) -> bool:
        """Whether nothing is left there."""
        return not (self.containers or self.foreign or self.servers)


def drain(specs: Specs, facts: FleetFacts, host: str) -> Drain:
    """What lies on the host now. Raises Mistake when the host cannot be looked at."""
    view = View(specs, facts)
    on_it = tuple(sorted(s.name for s in specs.servers.values() if s.host == host))
    if specs.hosts[host].platform is not Platform.PROXMOX:
        return Drain(host, (), (), on_it)
    try:
        cluster = view.fact(host, "host.access", AccessFacts).cluster
        running = view.fact(host, placement.NAME, PlacementFacts).running
    except NotKnown as unknown:
        raise Mistake(f"cannot drain {host}, which cannot be looked at: {unknown.message}") from None
    guests = [(kind, vmid) for vmid, node, kind in cluster.guests if node == host] if cluster is not None else []
    near = {member.name for member in cluster.members} | {host} if cluster is not None else {host}
    wanted = {("lxc", c.id): c for c in specs.containers.values() if c.host in near}
    return Drain(
        host,
        tuple(_leaving(view, wanted[guest], host, guest in running, near) for guest in guests if guest in wanted),
        tuple(guest for guest in guests if guest not in wanted),
        on_it,
    )


def _leaving(view: View, container: Container, host: str, runs: bool, near: Iterable[str]) -> Leaving:
    others = [
        other.name
        for other in view.specs.hosts.values()
        if other.name != host and other.name in near and other.lifecycle is Lifecycle.ACTIVE
    ]
    servers = sorted(s.name for s in view.specs.servers.values() if s.container == container.name)
    return Leaving(container, runs, tuple(servers), tuple(_candidate(view, container, host, name) for name in others))


def _candidate(view: View, container: Container, host: str, target: str) -> Candidate:
    """Whether the container would be moved there if its spec said so and the host were in service."""
    moved = container.model_copy(update={"host": target})
    specs = _with(view.specs, host, {container.name: moved})
    try:
        verdict = placement.check(View(specs, view.facts), moved)
    except NotKnown as unknown:
        return Candidate(target, unknown.reason, unknown.message, "it is looked at again the next time")
    match verdict:
        case Drift(remedy=Step()):
            return Candidate(target)
        case Drift(remedy=Block(reason, message, needs)):
            return Candidate(target, reason, message, needs)
    raise AssertionError(f"{container.name} lies on {host} and is in its place on {target}")


def stopping(specs: Specs, found: Drain) -> tuple[Specs, frozenset[Ref]]:
    """Specs in which every container that lies on the host is stopped there, and which containers these are.

    Policies stay as they are: a container is stopped only with its own ``restart-container``.
    """
    stopped = {
        leaving.container.name: leaving.container.model_copy(update={"host": found.host, "state": State.STOPPED})
        for leaving in found.containers
    }
    return _with(specs, found.host, stopped), frozenset(Ref("Container", name) for name in stopped)


def _with(specs: Specs, host: str, containers: dict[str, Container]) -> Specs:
    """The specs with other containers, and the host in service: what is in maintenance is not judged."""
    active = specs.hosts[host].model_copy(update={"lifecycle": Lifecycle.ACTIVE})
    return dataclasses.replace(
        specs, hosts={**specs.hosts, host: active}, containers={**specs.containers, **containers}
    )
