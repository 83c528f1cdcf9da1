"""How servers are, as the watches beside them saw it last.

A watch is a program of ours that runs in the server's place. It asks the server now and then, and leaves what it saw in
``/opt/reconcile/server/NAME/health.json``; nothing but that file is read here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from controller.facts.files import File
from controller.facts.words import Section
from controller.layers.shared.inside import ROOT, Inside, Told, read

SCHEMA = 1
"""The version of ``health.json`` that this release reads and writes."""


class Level(StrEnum):
    """How far up a server has come, each step on the one before it."""

    NO_ANSWER = "no-answer"
    """Nothing answers on its port, or not in time."""
    WRONG_MODEL = "wrong-model"
    """Something answers that serves another model."""
    WRAPPER_ONLY = "wrapper-only"
    """The HTTP server answers, and says itself that the engine behind it is not ready or gone."""
    GENERATION_FAILS = "generation-fails"
    """It says that it is well, and generates nothing."""
    GENERATES = "generates"
    """It generates tokens."""
    INCONCLUSIVE = "inconclusive"
    """It could not be told: it is busy, and has been asked nothing."""


@dataclass(frozen=True, slots=True)
class Crash:
    """An end of the server's process that nobody asked for: how (systemd's words), and its log's telling lines."""

    how: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Health:
    """Of one server, as its watch saw it last.

    ``process`` tells one run of the server from another: process id and start in clock ticks, "" when none runs.
    ``unit`` is systemd's ActiveState. ``starting`` are the seconds since its start, while it has not been ready since;
    ``took`` those that it took. ``stuck`` are the seconds for which requests have waited or run and nothing moved.
    ``ends`` counts the ends of its process that nobody asked for in the last hour; ``crashes`` are the last of them.
    ``watch`` is the digest of what its watch was installed from, "" when none is; ``silent`` that it has not been heard
    of for longer than it ever takes. ``unreadable`` says why what it left cannot be read: nothing else is known then.
    """

    server: str
    level: Level = Level.NO_ANSWER
    evidence: str = ""
    process: str = ""
    unit: str = ""
    starting: float = 0.0
    took: float | None = None
    stuck: float = 0.0
    running: int | None = None
    waiting: int | None = None
    ends: int = 0
    crashes: tuple[Crash, ...] = ()
    watch: str = ""
    silent: bool = False
    unreadable: str = ""

    @property
    def started(self) -> int | None:
        """When the run that was seen was started, in clock ticks since boot; None when none was."""
        return int(self.process.split()[1]) if self.process else None


@dataclass(frozen=True, slots=True)
class HealthFacts(Inside[tuple[Health, ...]]):
    """The servers of each place that have a watch, or have had one."""

    def server(self, vmid: int | None, name: str) -> Health | None:
        """What is known of a server in a place, None when there is no watch of it."""
        return next((each for each in self.of(vmid) or () if each.server == name), None)


def parse(section: Section) -> HealthFacts:
    """Read the section's text. Raises ParseError."""
    places, between = read(section.out)
    return HealthFacts(tuple((vmid, _servers(told)) for vmid, told in places.items()), between)


def _servers(told: Told) -> tuple[Health, ...]:
    silent = {line.removeprefix("silent ") for line in told.lines if line.startswith("silent ")}
    files = by_server(told.files)
    return tuple(_server(of, name, name in silent) for name, of in sorted(files.items()))


def by_server(files: Mapping[str, File]) -> dict[str, dict[str, File]]:
    """The files of servers' folders by server, and in each by their path in it."""
    found: dict[str, dict[str, File]] = {}
    for path, file in files.items():
        _, ours, rest = path.rpartition(f"{ROOT}/server/")
        if ours:
            name, _, inner = rest.partition("/")
            found.setdefault(name, {})[inner] = file
    return found


def _server(files: Mapping[str, File], name: str, silent: bool) -> Health:
    marker, found = files.get("watch.marker"), files.get("health.json")
    try:
        watch = str(_object(marker).get("digest", "")) if marker else ""
        return _health(_object(found), name, watch, silent) if found else Health(name, watch=watch, silent=silent)
    except (KeyError, TypeError, ValueError, OverflowError, IndexError) as error:
        # A container's own file: what it writes there must not keep others of the host from being seen.
        return Health(name, unreadable=f"cannot read the health of {name}: {error!r}")


def _health(said: Mapping[str, Any], name: str, watch: str, silent: bool) -> Health:
    if said["schema"] != SCHEMA:
        raise ValueError(f"schema {said['schema']!r}, this release knows {SCHEMA}")
    health = Health(
        server=name,
        level=Level(said["level"]),
        evidence=str(said["evidence"])[:1000],
        process=str(said["process"]),
        unit=str(said["unit"]),
        starting=_seconds(said["starting"]),
        took=None if said["took"] is None else _seconds(said["took"]),
        stuck=_seconds(said["stuck"]),
        running=None if said["running"] is None else int(said["running"]),
        waiting=None if said["waiting"] is None else int(said["waiting"]),
        ends=int(said["ends"]),
        crashes=tuple(Crash(str(each["how"]), tuple(map(str, each["lines"]))) for each in said["crashes"]),
        watch=watch,
        silent=silent,
    )
    _ = health.started  # raises what is caught above
    return health


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} are no seconds")
    return float(value)


def _object(file: File) -> Mapping[str, Any]:
    said = json.loads(file.text)
    if not isinstance(said, Mapping):
        raise TypeError("no object")
    return said
