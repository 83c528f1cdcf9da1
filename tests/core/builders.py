"""Small specs and layers to judge, for tests of the core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from controller.core.view import View
from controller.core.words import Block, Disruption, Drift, InSync, Layer, Script, Step, Verdict
from controller.facts.words import FleetFacts, HostFacts, Known
from controller.spec.model import Container, Host, Specs
from controller.spec.policy import Mode, Permission, Policy
from controller.spec.ref import Ref


class Reason(StrEnum):
    OFF = "off"


ALLOW_ALL = Policy(mode=Mode.ENFORCE, allow=(Permission.RESTART_CONTAINER, Permission.EDIT_CONTAINER_CONFIG))


def specs(*containers: tuple[str, int, str], policy: Policy = ALLOW_ALL, hosts: tuple[str, ...] = ("a", "b")) -> Specs:
    return Specs(
        hosts={
            name: Host.model_validate({"kind": "Host", "name": name, "address": "127.0.0.1", "platform": "proxmox"})
            for name in hosts
        },
        containers={
            name: Container.model_validate(
                {"kind": "Container", "name": name, "id": number, "host": host, "policy": policy}
            )
            for name, number, host in containers
        },
    )


def switches(**hosts: Mapping[str, object]) -> FleetFacts:
    """Facts in which each host has sections of plain values."""
    return {name: HostFacts(name, {k: Known(v) for k, v in sections.items()}) for name, sections in hosts.items()}


def turn_on(host: str, section: str, step: str = "") -> Callable[[FleetFacts], FleetFacts]:
    return lambda facts: {**facts, host: facts[host].with_section(section, True)}


def switch_layer(name: str, kind: str = "Container", permission: Permission = Permission.RESTART_CONTAINER) -> Layer:
    """A layer that is right when its section of the object's host is True, and has one step that makes it so."""

    def check(view: View, obj: Any) -> Verdict:
        host = obj.host if isinstance(obj, Container) else obj.name
        on = view.fact(host, name, bool)
        if on:
            return InSync()
        ref = Ref(kind, obj.name)
        step = Step(
            action=f"switch-{name}",
            object=ref,
            layer=name,
            reason=Reason.OFF,
            summary=f"switch {name} on",
            hosts=(host,),
            script=Script("none", "main() { :; }\nmain\n"),
            disrupts=(Disruption(ref, permission),),
            effect=turn_on(host, name),
        )
        return Drift(Reason.OFF, f"{name} is off", step)

    return Layer(name=name, kind=kind, reasons=Reason, check=check)


def blocked_layer(name: str, kind: str = "Container") -> Layer:
    return Layer(
        name=name,
        kind=kind,
        reasons=Reason,
        check=lambda view, obj: Drift(Reason.OFF, "off", Block(Reason.OFF, "off", "switch it on")),
    )
