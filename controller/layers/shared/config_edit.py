"""The step that puts a new config in a container's place, for every layer that edits one."""

from __future__ import annotations

import dataclasses
import difflib

from controller.core.words import Disruption, Step
from controller.facts.words import FleetFacts, Known, Later
from controller.layers.devices.facts import Guest, GuestFacts
from controller.layers.power.facts import PowerFacts
from controller.layers.shared import guest_script
from controller.layers.shared.lxc_devices import ALLOW, DENY, DEV_KEY, ENTRY
from controller.layers.shared.pve_conf import main_lines
from controller.spec.model import Container
from controller.spec.policy import Permission
from controller.spec.ref import Ref

EDIT = guest_script("controller.layers.shared", "edit-config.sh")


def edit_config(container: Container, guest: Guest, new: str, layer: str, reason: str) -> Step:
    """Replace the container's config with ``new``, if it is still the one in ``guest``."""
    lines = device_lines(guest.text)

    def effect(facts: FleetFacts) -> FleetFacts:
        return edited(facts, container, dataclasses.replace(guest, text=new), lines)

    return Step(
        action="edit-config",
        object=Ref("Container", container.name),
        layer=layer,
        reason=reason,
        summary=f"edit the config of CT {container.id} on {container.host}",
        hosts=(container.host,),
        script=EDIT,
        args=(str(container.id), guest.sha256, "\n".join(lines)),
        stdin=new.encode("utf-8", "surrogateescape"),
        disrupts=(Disruption(Ref("Container", container.name), Permission.EDIT_CONTAINER_CONFIG),),
        diff=_diff(container.id, guest.text, new),
        effect=effect,
    )


def edited(facts: FleetFacts, container: Container, guest: Guest, started_with: tuple[str, ...] | Later) -> FleetFacts:
    """The facts after an edit: another text, and, of a running container, a record of what it was started with."""
    host = facts[container.host]
    guests = host.section("container.devices")
    if not isinstance(guests, Known) or not isinstance(guests.value, GuestFacts):
        return facts
    others = (guest if (g.kind, g.id, g.node) == (guest.kind, guest.id, guest.node) else g for g in guests.value.guests)
    host = host.with_section("container.devices", dataclasses.replace(guests.value, guests=tuple(others)))
    power = host.section("container.power")
    if isinstance(power, Known) and isinstance(power.value, PowerFacts):
        running = tuple(
            dataclasses.replace(r, edited=started_with)
            if r.id == container.id and (r.edited is None or isinstance(started_with, Later))
            else r
            for r in power.value.running
        )
        host = host.with_section("container.power", dataclasses.replace(power.value, running=running))
    return {**facts, container.host: host}


def device_lines(config: str) -> tuple[str, ...]:
    """The lines of the main section that pass devices or allow them, for the record of what a container runs with."""
    return tuple(
        f"{line.key}: {line.value}"
        for line in main_lines(config)
        if DEV_KEY.fullmatch(line.key) or line.key in (ENTRY, ALLOW, DENY)
    )


def _diff(vmid: int, old: str, new: str) -> str:
    """The changed lines alone: what stands around them is nobody's business."""
    name = f"/etc/pve/lxc/{vmid}.conf"
    lines = difflib.unified_diff(old.split("\n"), new.split("\n"), name, name, lineterm="", n=0)
    return "\n".join(lines).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
