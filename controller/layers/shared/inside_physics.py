"""Places where servers run, in the simulated fleet: what lies and runs in them, and what a fragment prints of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from controller.layers.shared import probe_text
from controller.layers.shared.truth import File, Fleet, Host, Image, Session


def image_of(fleet: Fleet, host: Host, vmid: int | None) -> Image:
    """What lies in the root file system of a place; that of a container goes with its volume."""
    if vmid is None:
        return host.image
    key = host.containers[vmid].image or f"{host.name}:{vmid}"
    return fleet.images.setdefault(key, Image())


def session_of(host: Host, vmid: int | None) -> Session:
    """What runs in a place of ours, gone with its power."""
    return host.session if vmid is None else host.containers[vmid].session


def places(host: Host, guests: Iterable[int]) -> Iterator[int | None]:
    """The places that ``places`` of places.sh goes through."""
    yield None
    yield from (vmid for vmid in guests if vmid in host.containers)


def answer(
    fleet: Fleet,
    host: Host,
    guests: Iterable[int],
    lines: Callable[[int | None], Iterable[str]],
    wanted: Callable[[int | None], Iterable[str]],
) -> str:
    """What a fragment prints that tells ``lines`` of each place, and reads the files ``wanted``, in its order."""
    told: list[str] = []
    files: dict[str, File] = {}
    for vmid in places(host, guests):
        pid = 0 if vmid is None else host.containers[vmid].pid
        told.append("place -" if vmid is None else f"place {vmid} {pid}")
        told += lines(vmid)
        root = "" if vmid is None else f"/proc/{pid}/root"
        there = image_of(fleet, host, vmid).files
        files.update({root + path: there[path] for path in wanted(vmid) if path in there})
    return "".join(f"{line}\n" for line in told) + "==files\n" + probe_text.files(files)
