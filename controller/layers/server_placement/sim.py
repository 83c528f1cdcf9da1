"""server.placement in the simulated fleet: which units and folders are in places, and taking a server out of one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from controller.facts.words import Section
from controller.layers.shared import inside_physics, server_physics
from controller.layers.shared.truth import Fleet, Host, Image, Said, Work

FOLDER = "/opt/reconcile/server"


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host."""

    def lines(vmid: int | None) -> Iterator[str]:
        image, session = inside_physics.image_of(fleet, host, vmid), inside_physics.session_of(host, vmid)
        yield from (f"server {name}" for name in folders(image))
        for name in units(image):
            yield f"unit {name}"
            if any(process.unit == f"reconcile-{name}.service" for process in session.processes):
                yield f"active {name}"
        yield from (f"enabled {name}" for name in sorted(_names(image.enabled)))

    def wanted(vmid: int | None) -> Iterator[str]:
        yield from (f"{FOLDER}/{name}/marker.json" for name in folders(inside_physics.image_of(fleet, host, vmid)))

    return Section(0, inside_physics.answer(fleet, host, guests, lines, wanted))


def folders(image: Image) -> list[str]:
    """The names of servers that have a folder."""
    return sorted({path.split("/")[4] for path in image.files if path.startswith(f"{FOLDER}/")})


def units(image: Image) -> list[str]:
    """The names of servers that have a unit."""
    here = (path.removeprefix("/etc/systemd/system/") for path in image.files if path.count("/") == 4)
    return sorted(_names(here))


def _names(files: object) -> Iterator[str]:
    for file in files:  # type: ignore[attr-defined]
        match = re.fullmatch(r"reconcile-([a-z0-9._-]+)\.service", file)
        if match is not None and not match[1].endswith("-watch"):
            yield match[1]


def act(fleet: Fleet, host: Host, work: Work) -> Said:
    """What ``leave-place.sh`` does in a place."""
    return server_physics.leave(fleet, host, work)
