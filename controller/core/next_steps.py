"""From everything wanted and everything seen to what may be done now, what waits, and what is blocked.

A pure function, called again after every step with fresh facts: there is no stored workflow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from controller.core.batch import kept_apart
from controller.core.defects import DEFECT, defect
from controller.core.view import View
from controller.core.words import Block, Drift, Gate, InSync, Layer, NotKnown, Skipped, Step, Unseen, Verdict, Wait
from controller.spec.model import Container, Host, Lifecycle, ModelServer
from controller.spec.ref import Ref


@dataclass(frozen=True, slots=True)
class Judged:
    """One layer of one object, judged. ``held`` says what its step has to wait for: mostly an earlier layer."""

    object: Ref
    layer: str
    verdict: Verdict
    held: str = ""

    def __str__(self) -> str:
        return f"{self.layer} of {self.object}"


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
        return all(_is_right(j.verdict) for j in self.judged)

    def verdict(self, obj: Ref, layer: str) -> Verdict | None:
        """The verdict on one layer of one object, None when it was not judged."""
        return next((j.verdict for j in self.judged if j.object == obj and j.layer == layer), None)


def next_steps(layers: Sequence[Layer], view: View) -> Next:
    """Judge every layer of every object, in dependency order, and sort what would put the drift right."""
    judged: dict[Ref, list[Judged]] = {}
    closed: dict[str, Judged] = {}
    for host in view.specs.hosts.values():
        ref = Ref("Host", host.name)
        judged[ref] = list(_chain(layers, view, ref, host, held=""))
        if (by := _closed_by(layers, judged[ref])) is not None:
            closed[host.name] = by
    for container in sorted(view.specs.containers.values(), key=lambda c: c.id):
        ref = Ref("Container", container.name)
        held = _held_by_host(layers, judged[Ref("Host", container.host)], uses_gpus=container.gpus is not None)
        judged[ref] = list(_chain(layers, view, ref, container, held))
    for server in view.specs.servers.values():
        ref = Ref("ModelServer", server.name)
        if server.container is not None:
            held = _held_by_container(judged[Ref("Container", server.container)])
        else:
            held = _held_by_host(layers, judged[Ref("Host", str(server.host))], uses_gpus=True)
        judged[ref] = list(_chain(layers, view, ref, server, held))
    each = (j for chain in judged.values() for j in chain)
    return _sorted(tuple(dataclasses.replace(j, held=_holds(view, j, closed)) for j in each))


def _chain(
    layers: Sequence[Layer], view: View, ref: Ref, obj: Host | Container | ModelServer, held: str
) -> Iterator[Judged]:
    """The layers of one object, each later one held by the first that is not right."""
    for layer in layers:
        if layer.kind != ref.kind:
            continue
        verdict = _judge(layer, view, obj)
        yield Judged(ref, layer.name, verdict, held)
        if not held and not _is_right(verdict) and not _goes_on(verdict):
            held = f"{layer.name} of {ref}"


def _judge(layer: Layer, view: View, obj: Host | Container | ModelServer) -> Verdict:
    try:
        return layer.check(view, obj)
    except NotKnown as unknown:
        return Unseen(unknown.reason, unknown.message)
    except Exception as error:
        # What one host's text makes a check stumble over must not keep the others from being looked after.
        return Unseen(DEFECT, f"{layer.name} of {obj.ref} cannot be judged: {defect(error)}")


def _held_by_container(chain: Sequence[Judged]) -> str:
    """What holds the container itself, or else the first of its layers that is not right."""
    held = next((judged.held for judged in chain if judged.held), "")
    return held or next((str(judged) for judged in chain if not _is_right(judged.verdict)), "")


def _is_right(verdict: Verdict) -> bool:
    return isinstance(verdict, InSync | Skipped)


def _goes_on(verdict: Verdict) -> bool:
    """Whether it is a shortcoming that is only told."""
    return isinstance(verdict, Drift) and isinstance(verdict.remedy, Block) and not verdict.remedy.holds


def _closed_by(layers: Sequence[Layer], chain: Sequence[Judged]) -> Judged | None:
    """The layer of a host without which nothing at all is done there: it may not even be the host that is meant."""
    gates = {layer.name: layer.gates for layer in layers}
    return next((j for j in chain if gates[j.layer] is Gate.ALL and not _is_right(j.verdict)), None)


def _held_by_host(layers: Sequence[Layer], chain: Sequence[Judged], uses_gpus: bool) -> str:
    """The host's layer that what lives on it has to wait for: one not known, or one drifted that gates."""
    gates = {layer.name: layer.gates for layer in layers}
    for judged in chain:
        gate = gates[judged.layer]
        drifted = isinstance(judged.verdict, Drift) and (gate is Gate.ALL or (gate is Gate.GPUS and uses_gpus))
        if drifted or isinstance(judged.verdict, Unseen):
            return str(judged)
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
            case Step() as step if one.held:
                held.append((step, one.held))
            case Step() as step:
                ready.append(step)
            case Block() as block:
                blocked.append((one, block))
            case Wait() as wait:
                waiting.append((one, wait))
    return Next(judged, tuple(ready), tuple(held), tuple(blocked), tuple(waiting))


def _holds(view: View, judged: Judged, closed: Mapping[str, Judged]) -> str:
    """What the layer's step has to wait for: a host that it touches, one kept apart from those, a layer below."""
    if not isinstance(judged.verdict, Drift) or not isinstance(judged.verdict.remedy, Step):
        return judged.held
    step = judged.verdict.remedy
    by = next((closed[host] for host in step.hosts if host in closed and closed[host] is not judged), None)
    if by is not None:
        return str(by)
    return _unseen_mate(view, step) or ("" if step.independent else judged.held)


def _unseen_mate(view: View, step: Step) -> str:
    """A host that is never disrupted together with those of the step, and that cannot be seen: it may be just now."""
    if not step.disrupts:
        return ""
    for name in sorted(kept_apart(step.hosts, view.specs.fleet.limits.never_together) - set(step.hosts)):
        host, facts = view.specs.hosts.get(name), view.facts.get(name)
        gone = host is None or host.lifecycle is Lifecycle.DECOMMISSIONED
        if not gone and (facts is None or facts.failure is not None):
            return f"Host/{name}, which is never disrupted together with {step.hosts[0]} and cannot be observed"
    return ""
