"""What the units of servers say, in every place: the unit's file, what it was made from, and its secrets' digest.

In a place, a server NAME has the unit ``/etc/systemd/system/reconcile-NAME.service`` and the folder
``/opt/reconcile/server/NAME``:

=============== ======================================================================================================
marker.json     whose it is, the digest of what it means, those of the files that were written with it (``Marker``)
args.json       what it means, for people and for the programs that look after it (``Arguments``)
secrets.env     its secrets, 0600; an EnvironmentFile of the unit
config.yaml     the engine's own config file, 0600, for engines that take a secret only there
salt            for the digest of secrets.env and config.yaml that a look tells, 0600
note.sh         what the unit runs before each start and after each end, see ``server.process``
=============== ======================================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from controller.facts.files import File
from controller.facts.words import ParseError, Section
from controller.layers.shared.inside import ROOT, UNITS, Inside, read

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Marker:
    """What we noted when we wrote the unit.

    ``digest`` is that of its meaning, ``unit`` the SHA-256 of its text, ``asked`` what was asked for (``server_wanted``
    of the shared layers), ``environment`` the digest of its environment. ``instead_of`` is the digest of a unit
    that failed its checks and that this one, the last good one, was put back for.
    """

    object: str
    digest: str
    unit: str
    asked: str = ""
    environment: str = ""
    schema: int = SCHEMA
    instead_of: str = ""


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a unit means: everything that the running process depends on.

    ``environment`` holds no secret; ``secrets`` are the names of the variables that secrets.env sets, ``config`` is
    whether there is a config.yaml. ``gpus`` are UUIDs, in the order in which the process counts them. ``env_dir`` and
    ``model_dir`` are directories in the place, ``env_digest`` is the environment's. ``address`` is where to ask it.
    """

    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()
    config: bool = False
    engine: str = ""
    version: str = ""
    env_digest: str = ""
    env_dir: str = ""
    model_dir: str = ""
    draft_dir: str = ""
    model: str = ""
    revision: str = ""
    served_model_name: str = ""
    address: str = "127.0.0.1"
    port: int = 0
    gpus: tuple[str, ...] = ()
    tensor_parallel: int = 1
    flags: tuple[tuple[str, str], ...] = ()
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class ServerUnit:
    """One server's unit. What is None is not there.

    ``secret_digest`` is the SHA-256 of the salt, secrets.env and config.yaml one after the other, as they are now.
    ``note`` is whether note.sh is there; ``dropins`` are the names of files that change the unit from outside it.
    """

    name: str
    text: File | None = None
    marker: Marker | None = None
    arguments: Arguments | None = None
    salt: str = ""
    secret_digest: str = ""
    note: bool = False
    dropins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UnitsHere:
    """All of a place."""

    units: tuple[ServerUnit, ...] = ()

    def of(self, name: str) -> ServerUnit | None:
        """The unit of the server of that name."""
        return next((unit for unit in self.units if unit.name == name), None)


@dataclass(frozen=True, slots=True)
class ServerUnits(Inside[UnitsHere]):
    """The units of servers in every place of a host."""


def folder(name: str) -> str:
    """The folder of a server in its place."""
    return f"{ROOT}/server/{name}"


def unit_path(name: str) -> str:
    """The file of a server's unit in its place."""
    return f"{UNITS}/reconcile-{name}.service"


def parse(section: Section) -> ServerUnits:
    """Read the section's text. Raises ParseError."""
    told, between = read(section.out)
    places: list[tuple[int | None, UnitsHere]] = []
    for where, one in told.items():
        names: list[str] = []
        secrets: dict[str, str] = {}
        notes: set[str] = set()
        dropins: dict[str, list[str]] = {}
        for line in one.lines:
            match line.split(" "):
                case ["server", name]:
                    names.append(name)
                case ["secrets", name, digest]:
                    secrets[name] = digest
                case ["note", name]:
                    notes.add(name)
                case ["dropin", name, file]:
                    dropins.setdefault(name, []).append(file)
                case _:
                    raise ParseError("garbage", f"cannot read {line[:80]!r}")
        units = (
            ServerUnit(
                name,
                one.files.get(unit_path(name)),
                _marker(one.files.get(f"{folder(name)}/marker.json")),
                _arguments(one.files.get(f"{folder(name)}/args.json")),
                _line(one.files.get(f"{folder(name)}/salt")),
                secrets.get(name, ""),
                name in notes,
                tuple(dropins.get(name, ())),
            )
            for name in names
        )
        places.append((where, UnitsHere(tuple(units))))
    return ServerUnits(tuple(places), between)


def _line(file: File | None) -> str:
    return file.text.strip() if file is not None else ""


def _marker(file: File | None) -> Marker | None:
    """A marker; one that cannot be read says nothing, and the unit is then not as we wrote it."""
    said = _json(file)
    if said is None:
        return None
    try:
        return Marker(
            str(said["object"]),
            str(said["digest"]),
            str(said["unit"]),
            str(said.get("asked", "")),
            str(said.get("environment", "")),
            int(str(said["schema"])),
            str(said.get("instead_of", "")),
        )
    except (KeyError, ValueError):
        return None


def _arguments(file: File | None) -> Arguments | None:
    """What a unit means; None when that is not there or cannot be read."""
    said = _json(file)
    if said is None:
        return None
    try:
        return arguments(said)
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def arguments(said: Mapping[str, object]) -> Arguments:
    """Arguments from what ``as_plain`` made of them. Raises KeyError, ValueError, TypeError, AttributeError."""
    known = Arguments.__dataclass_fields__
    values: dict[str, object] = {name: value for name, value in said.items() if name in known}
    for name in ("argv", "secrets", "gpus"):
        values[name] = tuple(str(each) for each in _list(values.get(name, [])))
    for name in ("environment", "flags"):
        pairs = values.get(name, {})
        if not isinstance(pairs, dict):
            raise TypeError(f"{name} is no mapping")
        values[name] = tuple((str(key), str(value)) for key, value in pairs.items())
    if not values["argv"]:
        raise ValueError("no arguments")
    return Arguments(**values)  # type: ignore[arg-type]


def as_plain(what: Arguments) -> dict[str, object]:
    """Arguments as args.json holds them."""
    fields = {name: getattr(what, name) for name in Arguments.__dataclass_fields__}
    lists = {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
    return {**fields, **lists, "environment": dict(what.environment), "flags": dict(what.flags)}


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError("no list")
    return value


def _json(file: File | None) -> Mapping[str, object] | None:
    if file is None:
        return None
    try:
        said = json.loads(file.text)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None
