"""Servers that stand in for each other: those that are wanted running under one served name."""

from __future__ import annotations

from controller.core.words import Step
from controller.spec.model import ModelServer, ServerState, Specs
from controller.spec.ref import Ref


def last_healthy(step: Step, specs: Specs, healthy: frozenset[Ref]) -> str:
    """Why a step would take the last healthy server of a group, "" when it does not.

    A server that stands alone is no group, and taking one that is not healthy takes nothing.
    """
    taken = frozenset(d.object for d in step.disrupts)
    for ref in sorted(taken & healthy, key=str):
        server = specs.servers.get(ref.name) if ref.kind == "ModelServer" else None
        others = _stand_ins(server, specs) if server is not None else frozenset()
        if server is not None and others and not others & (healthy - taken):
            names = ", ".join(sorted(other.name for other in others))
            return f"{ref} is the last healthy server of {_served(server)}: {names} cannot stand in"
    return ""


def _stand_ins(server: ModelServer, specs: Specs) -> frozenset[Ref]:
    return frozenset(
        other.ref
        for other in specs.servers.values()
        if other.name != server.name and other.state is ServerState.RUNNING and _served(other) == _served(server)
    )


def _served(server: ModelServer) -> str:
    return server.serve.served_model_name or server.model.repo
