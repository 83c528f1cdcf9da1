"""Which servers of ours are in which place: their units, and the folders that their markers lie in."""

from __future__ import annotations

import json
from dataclasses import dataclass

from controller.facts.words import ParseError, Section
from controller.layers.shared.inside import Inside, read

SCHEMA = 1
"""The version of a server's marker that this release writes; older ones are read, newer ones are not understood."""

UNREADABLE = "ModelServer/?"
"""Whose a server is whose marker cannot be read: somebody's."""


@dataclass(frozen=True, slots=True)
class Found:
    """One server in a place, by its name.

    ``object`` is whose it is (``ModelServer/NAME``) as its marker says, "" without a marker. ``unit`` is whether its
    unit's file is there, ``enabled`` whether that starts with the place, ``active`` whether it has processes now.
    ``size`` is not known here: environments and weights say theirs.
    """

    name: str
    object: str = ""
    unit: bool = False
    enabled: bool = False
    active: bool = False


@dataclass(frozen=True, slots=True)
class FoundFacts(Inside[tuple[Found, ...]]):
    """The servers of ours in every place of a host."""


def parse(section: Section) -> FoundFacts:
    """Read the section's text. Raises ParseError."""
    told, between = read(section.out)
    places: list[tuple[int | None, tuple[Found, ...]]] = []
    for where, one in told.items():
        servers: dict[str, dict[str, bool]] = {}
        for line in one.lines:
            match line.split(" "):
                case ["server", name]:
                    servers.setdefault(name, {})
                case ["unit" | "enabled" | "active" as what, name]:
                    servers.setdefault(name, {})[what] = True
                case _:
                    raise ParseError("garbage", f"cannot read {line[:80]!r}")
        markers = {path.split("/")[-2]: file.text for path, file in one.files.items() if path.endswith("/marker.json")}
        found = (Found(name, _object(markers.get(name, "")), **has) for name, has in sorted(servers.items()))
        places.append((where, tuple(found)))
    return FoundFacts(tuple(places), between)


def _object(marker: str) -> str:
    """Whose a server is. A marker that cannot be read is somebody's: it is not taken for none."""
    if not marker:
        return ""
    try:
        said = json.loads(marker)
        return str(said["object"])
    except (ValueError, KeyError, TypeError):
        return UNREADABLE
