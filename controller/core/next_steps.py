"""From everything wanted and everything seen to what may be done now, what waits, and what is blocked.

A pure function, called again after every step with fresh facts: there is no stored workflow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from controller.core.view import View
from controller.core.words import Block, Drift, Gate, InSync, Layer, NotKnown, Skipped, Step, Unseen, Verdict, Wait
from controller.spec.model import Container, Host, ModelServer
from controller.spec.ref import Ref


@dataclass(frozen=True, slots=True)
class Judged:
    """One layer of one object, judged. ``held`` says which earlier layer its step has to wait for."""

    object: Ref
    layer: str
    verdict: Verdict
    held: str = ""


@dataclass(frozen=True, slots=True)
class Next:
    """Everything that follows from specs and facts.

    ``ready`` are steps that nothing but permission stands in the way of, in order; steps in it may overlap in hosts
    or objects, whoever performs them takes one of those at a time.
    """

    judged: tuple[Judged, ...]
    ready: tuple[Step, ...]
    held: tuple[tuple[Step, str], ...]
    blocked: tuple[tuple[Judged, Block], ...]
    waiting: tuple[tuple[Judged, Wait], ...]

    @property
    def in_sync(self) -> bool:
        """Everything is known and as wanted."""
        return all(isinstance(j.verdict, InSync | Skipped) for j in self.judged)

    def verdict(self, obj: Ref, layer: str) -> Verdict | None:
        """The verdict on one layer of one object, None when it was not judged."""
        return next((j.verdict for j in self.judged if j.object == obj and j.layer == layer), None)


def next_steps(layers: Sequence[Layer], view: View) -> Next:
    """Judge every layer of every object, in dependency order, and sort what would put the drift right."""
    judged: dict[Ref, list[Judged]] = {}
    for host in view.specs.hosts.values():
        ref = Ref("Host", host.name)
        judged[ref] = list(_chain(layers, view, ref, host, held=""))
    for container in sorted(view.specs.containers.values(), key=lambda c: c.id):
        ref = Ref("Container", container.name)
        held = _held_by_host(layers, judged[Ref("Host", container.host)], uses_gpus=container.gpus is not None)
        judged[ref] = list(_chain(layers, view, ref, container, held))
    for server in view.specs.servers.values():
        ref = Ref("ModelServer", server.name)
        below = Ref("Container", server.container) if server.container else Ref("Host", str(server.host))
        held = _held_by(judged[below])
        judged[ref] = list(_chain(layers, view, ref, server, held))
    return _sorted(tuple(j for chain in judged.values() for j in chain))


def _chain(
    layers: Sequence[Layer], view: View, ref: Ref, obj: Host | Container | ModelServer, held: str
) -> Iterator[Judged]:
    """The layers of one object, each later one held by the first that is not right."""
    for layer in layers:
        if layer.kind != ref.kind:
            continue
        verdict = _judge(layer, view, obj)
        yield Judged(ref, layer.name, verdict, held)
        if not held and not isinstance(verdict, InSync | Skipped):
            held = f"{layer.name} of {ref}"


def _judge(layer: Layer, view: View, obj: Host | Container | ModelServer) -> Verdict:
    try:
        return layer.check(view, obj)
    except NotKnown as unknown:
        return Unseen(unknown.reason, unknown.message)


def _held_by(chain: Sequence[Judged]) -> str:
    """The first layer below that is not right."""
    for judged in chain:
        if not isinstance(judged.verdict, InSync | Skipped):
            return f"{judged.layer} of {judged.object}"
    return ""


def _held_by_host(layers: Sequence[Layer], chain: Sequence[Judged], uses_gpus: bool) -> str:
    """The host's layer that what lives on it has to wait for: one not known, or one drifted that gates."""
    gates = {layer.name: layer.gates for layer in layers}
    for judged in chain:
        gate = gates[judged.layer]
        drifted = isinstance(judged.verdict, Drift) and (gate is Gate.ALL or (gate is Gate.GPUS and uses_gpus))
        if drifted or isinstance(judged.verdict, Unseen):
            return f"{judged.layer} of {judged.object}"
    return ""


def _sorted(judged: tuple[Judged, ...]) -> Next:
    ready: list[Step] = []
    held: list[tuple[Step, str]] = []
    blocked: list[tuple[Judged, Block]] = []
    waiting: list[tuple[Judged, Wait]] = []
    for one in judged:
        if not isinstance(one.verdict, Drift):
            continue
        match one.verdict.remedy:
            case Step() as step if one.held and not step.independent:
                held.append((step, one.held))
            case Step() as step:
                ready.append(step)
            case Block() as block:
                blocked.append((one, block))
            case Wait() as wait:
                waiting.append((one, wait))
    return Next(judged, tuple(ready), tuple(held), tuple(blocked), tuple(waiting))
