"""container.mounts: what the config mounts of its host is there, on the host that the container runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from enum import StrEnum

from controller.core.package import text
from controller.core.view import View
from controller.core.words import Block, Drift, InSync, Layer, NotKnown, Skipped, Step, Verdict
from controller.facts.words import FleetFacts, HostFacts, Known
from controller.layers.devices.facts import Guest, GuestFacts
from controller.layers.mounts.facts import Mount, MountFacts, parse
from controller.layers.shared.config_edit import edit_config
from controller.layers.shared.pve_conf import LineKind, edit, main_lines
from controller.layers.shared.pve_conf import parse as parse_conf
from controller.layers.shared.volumes import Bind
from controller.spec.model import Container, Lifecycle, WhenMissing

NAME = "container.mounts"


class Reason(StrEnum):
    """What can be wrong with a container's mounts."""

    SOURCE_MISSING = "mount-source-missing"
    """What is to be mounted is not there on the host."""
    SOURCE_UNKNOWN = "mount-source-unknown"
    """Nobody says whether it is there: the file system that it lies in does not answer."""
    LOCKED = "locked"
    """Proxmox is at work on the container (``lock:`` in its config)."""


def check(view: View, container: Container) -> Verdict:
    """Whether the container would find everything that it mounts of its host."""
    host = view.host(container.host)
    if host.lifecycle is not Lifecycle.ACTIVE:
        return Skipped(f"{host.name}: {host.lifecycle}")
    guest = view.fact(host.name, "container.devices", GuestFacts).container(container.id)
    if guest is None:
        return Skipped(f"CT {container.id} is not on {host.name}")
    missing = missing_at(view, host.name, container)
    if not missing:
        passed_over = [m.bind.source for m in _mounts(view, host.name, container) if m.there == "missing"]
        return InSync(f"optional and not there: {', '.join(passed_over)}" if passed_over else "")
    message = _told(host.name, missing)
    needed = [bind for bind in missing if not is_dropped(container, bind)]
    if needed:
        return Drift(Reason.SOURCE_MISSING, message, missing_block(container, host.name, needed))
    conf = parse_conf(guest.text)
    if lock := conf.main.text("lock"):
        locked = Block(
            Reason.LOCKED,
            f"CT {container.id} is locked by Proxmox ({lock})",
            f"wait until that has ended; `pct unlock {container.id}` if nothing is at work any more",
        )
        return Drift(Reason.SOURCE_MISSING, message, locked)
    return Drift(Reason.SOURCE_MISSING, message, _drop(container, guest, missing))


def missing_at(view: View, host: str, container: Container) -> tuple[Bind, ...]:
    """The mounts whose source is not there on a host, those left out that may be missing. Raises NotKnown."""
    mounts = _mounts(view, host, container)
    for mount in mounts:
        if mount.there == "unknown" and not mount.bind.optional:
            raise NotKnown(
                Reason.SOURCE_UNKNOWN, f"nobody says whether {mount.bind.source} is there on {host}: it does not answer"
            )
    return tuple(m.bind for m in mounts if m.there == "missing" and not m.bind.optional)


def is_dropped(container: Container, bind: Bind) -> bool:
    """Whether the spec says to drop this mount where its source is missing."""
    return any(
        mount.target.rstrip("/") == bind.target.rstrip("/") and mount.when_missing is WhenMissing.DROP
        for mount in container.mounts
    )


def missing_block(container: Container, host: str, needed: Sequence[Bind]) -> Block:
    """What to do about mounts without which the container does not start."""
    return Block(
        Reason.SOURCE_MISSING,
        _told(host, needed),
        f"make it there, or write `mounts: [{{target: {needed[0].target}, when_missing: drop}}]` in the spec of "
        f"{container.name} to do without it",
    )


def _told(host: str, missing: Sequence[Bind]) -> str:
    what = ", ".join(f"{bind.source} (for {bind.target})" for bind in missing)
    return f"{what} is not there on {host}"


def _mounts(view: View, host: str, container: Container) -> tuple[Mount, ...]:
    mounts = view.fact(host, NAME, MountFacts).of(container.id)
    if mounts is None:
        raise NotKnown("not-seen", f"{host} did not see the config of CT {container.id}")
    return mounts


def _drop(container: Container, guest: Guest, missing: Sequence[Bind]) -> Step:
    """Take exactly the lines of these mounts out of the config."""
    gone = {(bind.key, bind.value) for bind in missing}
    points = {bind.key for bind in missing if bind.key.startswith("mp")}
    indexes = [
        line.index
        for line in main_lines(guest.text)
        if line.kind in (LineKind.KEY, LineKind.RAW) and ((line.key, line.value) in gone or line.key in points)
    ]
    if not indexes:
        raise NotKnown("changing", f"the config of CT {container.id} was changed while it was looked at")
    step = edit_config(container, guest, edit(guest.text, delete=indexes), NAME, Reason.SOURCE_MISSING)

    def effect(facts: FleetFacts) -> FleetFacts:
        return {name: _without(host, container.id, gone) for name, host in step.effect(facts).items()}

    return dataclasses.replace(step, effect=effect)


def _without(host: HostFacts, vmid: int, gone: Collection[tuple[str, str]]) -> HostFacts:
    """What a host tells of mounts, when a config has these no more."""
    seen = host.section(NAME)
    if not isinstance(seen, Known) or not isinstance(seen.value, MountFacts):
        return host
    guests = (
        (guest, tuple(m for m in mounts if guest != vmid or (m.bind.key, m.bind.value) not in gone))
        for guest, mounts in seen.value.guests
    )
    return host.with_section(NAME, MountFacts(tuple(guests)))


LAYER = Layer(
    name=NAME,
    kind="Container",
    reasons=Reason,
    check=check,
    probe=text("controller.layers.mounts", "probe.sh"),
    parse=parse,
    platforms=frozenset({"proxmox"}),
)
