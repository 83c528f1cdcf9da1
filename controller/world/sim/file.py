"""The file of a simulated fleet: its first world in YAML (``*.sim.yaml``), and any later state of it.

A file holds the truth of controller/layers/shared/truth.py under its own names; what equals the default is left out.
Four shorthands make a first world readable (``nvidia``, ``cards``, ``lxc``, ``qemu`` of a host); they are put into
full form here, by letting the machine do what it would: load the module, start the guests. docs/simulated-fleet.md
describes the whole format.
"""

from __future__ import annotations

import base64
import dataclasses
import difflib
import functools
import io
import types
import typing
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.scalarstring import LiteralScalarString

from controller.layers.shared import kernel_physics, pve_physics
from controller.layers.shared.boards import BOARDS, same_model
from controller.layers.shared.truth import (
    Cluster,
    File,
    Fleet,
    Function,
    Gpu,
    Host,
    Impossible,
    Module,
    Tree,
    refuse_impossible,
)

FORMAT = 1
_GIB_OF_MIB = 1024
# GA102's audio function, the same id on A6000 and 3090 cards
_COMPANION = ("10de", "1aef", "040300")


class SimFileError(ValueError):
    """A simulated fleet's file cannot be loaded; the message names the file, the place in it and what is allowed."""


# --- to and from plain values ----------------------------------------------------------------------------------------


def encode(value: Any) -> Any:
    """A truth as mappings, lists and scalars, without what equals its default."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = {}
        for field in dataclasses.fields(value):
            held = getattr(value, field.name)
            if field.compare and held != _default(field):
                kept[field.name] = f"0o{held:o}" if field.name == "mode" else encode(held)
        return kept
    if isinstance(value, Mapping):
        return {str(key): encode(held) for key, held in value.items()}
    if isinstance(value, list):
        return [encode(held) for held in value]
    if isinstance(value, str) and not _is_text(value):
        return {"base64": base64.b64encode(value.encode("utf-8", "surrogateescape")).decode("ascii")}
    return value


def _is_text(value: str) -> bool:
    """Whether YAML can carry the string; bytes outside UTF-8 and control characters go as base64."""
    return all(c >= " " or c in "\n\t" for c in value) and not any(
        "\x7f" <= c <= "\x9f" or "\ud800" <= c <= "\udfff" or c in "\ufeff\ufffe\uffff\u2028\u2029" for c in value
    )


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else dataclasses.MISSING


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def decode(kind: Any, value: Any, at: str) -> Any:
    """A value of a type of the truth from plain ones (numbers and truth values may be text). Raises SimFileError."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value in (None, "", "null", "~") else decode(args[0], value, at)
    if dataclasses.is_dataclass(kind):
        return _decode_object(typing.cast("type", kind), value, at)
    if origin is dict:
        return {_scalar(args[0], k, at): decode(args[1], v, f"{at}.{k}") for k, v in _mapping(value, at).items()}
    if origin is list:
        if not isinstance(value, list):
            raise SimFileError(f"{at}: cannot use {value!r}, a list is wanted")
        return [decode(args[0], held, f"{at}[{index}]") for index, held in enumerate(value)]
    return _scalar(kind, value, at)


def _decode_object(kind: type, value: Any, at: str) -> Any:
    if kind is File and (isinstance(value, str) or (isinstance(value, dict) and "base64" in value)):
        return File(_scalar(str, value, at))
    hints = _hints(kind)
    given = _mapping(value, at)
    _refuse_unknown(given, [f.name for f in dataclasses.fields(kind)], at)
    missing = [f.name for f in dataclasses.fields(kind) if _default(f) is dataclasses.MISSING and f.name not in given]
    if missing:
        raise SimFileError(f"{at}: {', '.join(missing)} is missing")
    return kind(**{name: decode(hints[name], held, f"{at}.{name}") for name, held in given.items()})


def _refuse_unknown(given: Mapping[str, Any], known: list[str], at: str) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
            raise SimFileError(f"{at}: there is no {name}{hint}")


def _mapping(value: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SimFileError(f"{at}: cannot use {value!r}, a mapping is wanted")
    return value


def _scalar(kind: Any, value: Any, at: str) -> Any:
    if isinstance(value, Mapping) and kind is str and list(value) == ["base64"]:
        return base64.b64decode(value["base64"]).decode("utf-8", "surrogateescape")
    if isinstance(value, Mapping | list):
        raise SimFileError(f"{at}: cannot use a {'mapping' if isinstance(value, Mapping) else 'list'} here")
    try:
        if kind is bool:
            return {"true": True, "false": False}[str(value).lower()]
        if kind is int:
            return int(value, 0) if isinstance(value, str) and value.startswith("0o") else int(value)
        return kind(value)
    except (KeyError, ValueError, TypeError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "text")
        raise SimFileError(f"{at}: cannot use {value!r}, {wanted} is wanted") from None


# --- the file --------------------------------------------------------------------------------------------------------


def load(text: str, name: str) -> Fleet:
    """The fleet that a file describes. ``name`` is the file's, for messages. Raises SimFileError."""
    try:
        # every scalar as text, so that 10:00.0 and 550.54 mean what they look like; the truth's types do the rest
        plain = YAML(typ="base", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{mark.line + 1}:{mark.column + 1}" if mark is not None else "?"
        raise SimFileError(f"{name}:{where}: cannot read the YAML: {error.problem}") from None
    if plain is None:
        raise SimFileError(f"{name}: the file is empty")
    try:
        return from_plain(plain)
    except (SimFileError, Impossible) as error:
        raise SimFileError(f"{name}: {error}") from None


def from_plain(plain: Any) -> Fleet:
    """The fleet that plain values describe. Raises SimFileError or Impossible."""
    given = dict(_mapping(plain, "the file"))
    version = given.pop("simulated_fleet", None)
    if str(version) != str(FORMAT):
        raise SimFileError(f"simulated_fleet: {FORMAT} has to be there, to say what this file is and in which format")
    listed = _mapping(given.get("hosts", {}), "hosts")
    hosts = {name: dict(_mapping(one, f"hosts.{name}")) for name, one in listed.items()}
    shorthands = {name: _take_shorthand(name, one) for name, one in hosts.items()}
    for name, one in hosts.items():
        one.setdefault("name", name)
    fleet: Fleet = decode(Fleet, {**given, "hosts": hosts}, "fleet")
    _complete_clusters(fleet)
    for host in fleet.hosts.values():
        _set_up(fleet, host, shorthands[host.name])
    refuse_impossible(fleet)
    return fleet


def to_plain(fleet: Fleet) -> dict[str, Any]:
    """A fleet as plain values that ``from_plain`` takes."""
    return {"simulated_fleet": FORMAT, **encode(fleet)}


def dump(fleet: Fleet) -> str:
    """A fleet as the text of a file. ``load(dump(fleet))`` equals the fleet."""
    yaml = YAML()
    yaml.width = 1 << 20
    out = io.StringIO()
    yaml.dump(_readable(to_plain(fleet)), out)
    return out.getvalue()


def _readable(value: Any) -> Any:
    """Texts of several lines as blocks."""
    if isinstance(value, dict):
        return {key: _readable(held) for key, held in value.items()}
    if isinstance(value, list):
        return [_readable(held) for held in value]
    return LiteralScalarString(value) if isinstance(value, str) and "\n" in value else value


# --- shorthands ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class NvidiaShorthand:
    """The driver that is installed, for the running kernel: loaded or not, with its nodes or without."""

    version: str
    flavour: str = "proprietary"
    loaded: bool = True
    uvm: bool = True
    userspace: bool = True
    nodes: bool = True
    uvm_major: int | None = None


@dataclasses.dataclass(slots=True)
class CardShorthand:
    """A GPU with its audio function; what is not given is known by its model."""

    pci: str
    model: str
    driver: str | None = None
    override: str | None = None
    iommu_group: int | None = None
    uuid: str = ""
    audio: bool = True
    audio_driver: str | None = "snd_hda_intel"


@dataclasses.dataclass(slots=True)
class GuestShorthand:
    """A guest of this node: its config file, and whether it runs."""

    config: str
    running: bool = False


@dataclasses.dataclass(slots=True)
class Shorthand:
    """All of a host's."""

    nvidia: NvidiaShorthand | None = None
    cards: list[CardShorthand] = dataclasses.field(default_factory=list)
    lxc: dict[int, GuestShorthand] = dataclasses.field(default_factory=dict)
    qemu: dict[int, GuestShorthand] = dataclasses.field(default_factory=dict)


def _take_shorthand(name: str, host: dict[str, Any]) -> Shorthand:
    names = [f.name for f in dataclasses.fields(Shorthand)]
    shorthand: Shorthand = decode(Shorthand, {k: host.pop(k) for k in names if k in host}, f"hosts.{name}")
    return shorthand


def _complete_clusters(fleet: Fleet) -> None:
    """A cluster that hosts name is there, with the hosts that name it as members."""
    for host in fleet.hosts.values():
        if host.cluster is None:
            continue
        cluster = fleet.clusters.setdefault(host.cluster, Cluster())
        if host.name not in cluster.nodes:
            cluster.nodes.append(host.name)
    for name, cluster in fleet.clusters.items():
        cluster.name = cluster.name or name


def _set_up(fleet: Fleet, host: Host, shorthand: Shorthand) -> None:
    """Let the machine come to the state that the shorthands name."""
    if not host.boot_id and host.powered:
        host.boot_id = fleet.draw_id(host)
        host.booted = host.booted or fleet.now - 86_400.0
    if shorthand.nvidia is not None:
        _install(host, shorthand.nvidia)
    for card in shorthand.cards:
        _insert(host, card)
    if shorthand.nvidia is not None and host.powered and shorthand.nvidia.loaded:
        _load_driver(fleet, host, shorthand.nvidia)
    unbound = {a: c.driver for c in shorthand.cards for a in [_address(c.pci)] if host.functions[a].driver != c.driver}
    if unbound and host.powered:
        raise SimFileError(f"hosts.{host.name}.cards: no loaded module would give {unbound} to their drivers")
    _add_guests(fleet, host, shorthand)


def _install(host: Host, nvidia: NvidiaShorthand) -> None:
    module = Module(nvidia.version, nvidia.flavour)
    host.modules.setdefault(host.kernel, {}).update({"nvidia": module, "nvidia-uvm": module})
    if nvidia.userspace:
        host.userspace = nvidia.version


def _address(pci: str) -> str:
    return pci if pci.count(":") == 2 else f"0000:{pci}"


def _insert(host: Host, card: CardShorthand) -> None:
    address = _address(card.pci)
    device_id, board = next(
        ((i, b) for i, b in BOARDS.items() if same_model(card.model, b.name) or card.model == b.name), (None, None)
    )
    if device_id is None or board is None:
        raise SimFileError(f"hosts.{host.name}.cards: cannot tell what a {card.model} is; describe it under functions")
    vendor, device = device_id.split(":")
    group = card.iommu_group if card.iommu_group is not None else 20 + len(host.functions)
    uuid = card.uuid or f"GPU-{sum(host.name.encode()):08x}-0000-4000-8000-{len(host.functions):012x}"
    gpu = Gpu(board.name, uuid, board.memory_gib * _GIB_OF_MIB, board.compute_capability)
    # NVIDIA's driver takes its cards when it is loaded; any other is bound already
    driver = None if card.driver == "nvidia" else card.driver
    host.functions[address] = Function(vendor, device, "030000", driver, card.override, group, gpu=gpu)
    if driver is not None:
        host.loaded.setdefault(driver, Module())
    if card.audio:
        audio = address.removesuffix(".0") + ".1"
        taken = "vfio-pci" if card.driver == "vfio-pci" else card.audio_driver
        host.functions[audio] = Function(*_COMPANION, driver=taken, iommu_group=group)


def _load_driver(fleet: Fleet, host: Host, nvidia: NvidiaShorthand) -> None:
    for name in ("nvidia", "nvidia-uvm") if nvidia.uvm else ("nvidia",):
        failed = kernel_physics.load_module(fleet, host, name)
        if failed:
            raise SimFileError(f"hosts.{host.name}.nvidia: {failed}")
    if nvidia.uvm_major is not None:
        host.majors["nvidia-uvm"] = host.last_majors["nvidia-uvm"] = nvidia.uvm_major
    if nvidia.nodes:
        kernel_physics.make_gpu_nodes(fleet, host, uvm=nvidia.uvm)
        kernel_physics.initialise(fleet, host)


def _add_guests(fleet: Fleet, host: Host, shorthand: Shorthand) -> None:
    kinds = (("lxc", shorthand.lxc, pve_physics.pct_start), ("qemu-server", shorthand.qemu, pve_physics.qm_start))
    for kind, guests, start in kinds:
        for vmid, guest in guests.items():
            at = f"hosts.{host.name}.{'lxc' if kind == 'lxc' else 'qemu'}.{vmid}"
            if host.cluster is None:
                raise SimFileError(f"{at}: {host.name} is in no cluster; name one under `cluster`")
            tree: Tree = pve_physics.tree(fleet.clusters[host.cluster], host.name)
            tree.files[f"nodes/{host.name}/{kind}/{vmid}.conf"] = File(guest.config, 0o640, int(fleet.now) - 86_400)
            if guest.running:
                said = start(fleet, host, vmid)
                if said.rc != 0 or said.out:
                    raise SimFileError(f"{at}: cannot run: {(said.err or said.out).strip()}")
