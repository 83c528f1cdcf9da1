"""server.unit in the simulated fleet: the files of units in places, and writing them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from controller.facts.words import Section
from controller.layers.server_placement.sim import folders, units
from controller.layers.shared import inside_physics, server_physics
from controller.layers.shared.truth import File, Fleet, Host, Said, Work

FOLDER = "/opt/reconcile/server"


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host."""

    def names(vmid: int | None) -> list[str]:
        image = inside_physics.image_of(fleet, host, vmid)
        there = folders(image)
        return [*there, *(name for name in units(image) if name not in there)]

    def lines(vmid: int | None) -> Iterator[str]:
        image = inside_physics.image_of(fleet, host, vmid)
        for name in names(vmid):
            yield f"server {name}"
            if digest := server_physics.secret_digest(image, name):
                yield f"secrets {name} {digest}"
            if f"{FOLDER}/{name}/note.sh" in image.files:
                yield f"note {name}"
            there = f"/etc/systemd/system/reconcile-{name}.service.d/"
            yield from (f"dropin {name} {path.removeprefix(there)}" for path in sorted(image.files) if there in path)

    def wanted(vmid: int | None) -> Iterator[str]:
        for name in names(vmid):
            yield f"/etc/systemd/system/reconcile-{name}.service"
            yield from (f"{FOLDER}/{name}/{file}" for file in ("marker.json", "args.json", "salt"))

    return Section(0, inside_physics.answer(fleet, host, guests, lines, wanted))


def takes(_step: object) -> float:
    """Seconds that a step takes."""
    return 1.0


def act(fleet: Fleet, host: Host, work: Work) -> Said:
    """What ``install-unit.sh`` does in a place."""
    place, name, seen, *parts = work.args
    vmid = None if place == "-" else int(place)
    if vmid is not None and vmid not in host.containers:
        return Said(75, err=f"CT {vmid} does not run\n")
    image, unit = inside_physics.image_of(fleet, host, vmid), f"reconcile-{name}.service"
    path = f"/etc/systemd/system/{unit}"
    there = image.files.get(path)
    if (hashlib.sha256(there.text.encode()).hexdigest() if there is not None else "absent") != seen:
        return Said(75, err=f"{path} has changed since it was read\n")
    given, position = work.stdin.encode("utf-8", "surrogateescape"), 0
    written: dict[str, File] = {}
    for size, mode, target in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        content = given[position : position + int(size)].decode("utf-8", "surrogateescape")
        written[target] = File(content, int(mode, 8), int(fleet.now))
        position += int(size)
    here = f"{FOLDER}/{name}"
    secret = [f"{here}/{file}" for file in ("secrets.env", "config.yaml")]
    for file in secret:
        if file not in written:
            image.files.pop(file, None)
    if not any(file in written for file in secret):
        image.files.pop(f"{here}/salt", None)
    elif f"{here}/salt" not in image.files:
        image.files[f"{here}/salt"] = File(f"{fleet.draw_id(host)}\n", 0o600, int(fleet.now))
    image.files.update(written)
    image.withheld.pop(name, None)
    server_physics.daemon_reload(fleet, host, vmid)
    if unit not in image.enabled:
        image.enabled.append(unit)
    fleet.touch(host)
    return Said(0)
