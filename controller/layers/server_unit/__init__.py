"""server.unit: the systemd unit and its files mean what the spec says, with flags that the installed engine knows.

What runs is not touched: a unit is only written, and read by systemd. ``server.process`` brings in what it says.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from controller.core.package import text
from controller.core.view import View
from controller.core.words import Block, Disruption, Drift, Effect, InSync, Layer, NotKnown, Skipped, Step, Verdict
from controller.engines import registry
from controller.engines.words import Engine, tensor_parallel
from controller.engines.words import Place as EnginePlace
from controller.facts.files import File
from controller.facts.words import FleetFacts
from controller.layers.server_placement.facts import Found, FoundFacts
from controller.layers.server_unit.facts import (
    SCHEMA,
    Arguments,
    Marker,
    ServerUnit,
    ServerUnits,
    UnitsHere,
    as_plain,
    folder,
    parse,
    unit_path,
)
from controller.layers.server_unit.reasons import Reason
from controller.layers.server_unit.unit_file import Supervision, secrets_text, unit_text
from controller.layers.shared import environments, inside, server_wanted, weights
from controller.layers.shared.assignment import Unassigned
from controller.layers.shared.inside import Place
from controller.layers.shared.server_gpus import cards_of
from controller.spec.model import ModelServer, SecretRef, ServerState
from controller.spec.policy import Permission

NAME = "server.unit"
_PACKAGE = "controller.layers.server_unit"
NOTE = text(_PACKAGE, "note.sh")


@dataclass(frozen=True)
class Wanted:
    """What a unit is to be. ``secrets`` and ``config`` are the texts of its two secret files, None without them."""

    arguments: Arguments
    asked: str
    digest: str
    text: str
    secrets: str | None = field(repr=False)
    config: str | None = field(repr=False)
    notes: tuple[str, ...] = ()

    def secret_digest(self, salt: str) -> str:
        """What a look tells of the two files when they are as wanted."""
        if self.secrets is None and self.config is None:
            return ""
        return hashlib.sha256(f"{salt}\n{self.secrets or ''}{self.config or ''}".encode()).hexdigest()


def check(view: View, server: ModelServer) -> Verdict:
    """Whether the unit is there, as we wrote it, for what the spec asks."""
    try:
        engine = registry.engine(server.engine.name)
    except registry.NoEngine as error:
        needs = "correct engine.name, or install a plug-in for it beside the controller"
        return Drift(Reason.UNKNOWN_ENGINE, str(error), Block(Reason.UNKNOWN_ENGINE, str(error), needs))
    if not engine.manages:
        return Skipped("it is only watched")
    if server.state is ServerState.ABSENT:
        return Skipped("it is to be absent")
    if why := inside.why_not(view.specs, server):
        return Skipped(why)
    place = inside.place_of(view.specs, server)
    seen = inside.look(view, place, NAME, ServerUnits)
    wanted = _wanted(view, server, place, engine)
    if isinstance(wanted, Drift):
        return wanted
    unit = seen.value.of(server.name) if seen.value is not None else None
    found = _difference(server, unit, wanted)
    if found is None:
        return InSync("; ".join((*wanted.notes, *_worth_knowing(unit, wanted))))
    reason, message = found
    if unit is not None and unit.marker is not None and unit.marker.schema > SCHEMA:
        message = f"the unit of {server.name} was written by a newer release (schema {unit.marker.schema})"
        needs = "use that release, or remove the folder of the server there"
        return Drift(Reason.NEWER_SCHEMA, message, Block(Reason.NEWER_SCHEMA, message, needs))
    step = _install(server, place, unit, wanted, reason, certain=seen.certain)
    return Drift(reason, message, step, _evidence(unit, wanted))


def _difference(server: ModelServer, unit: ServerUnit | None, wanted: Wanted) -> tuple[Reason, str] | None:
    """What is wrong with the unit that is there, None when it is as wanted."""
    if unit is None or (unit.text is None and unit.marker is None):
        return Reason.NO_UNIT, f"{server.name} has no unit"
    marker = unit.marker
    if marker is None and unit.arguments is None and not unit.note:
        return Reason.NOT_OURS, f"there is a unit reconcile-{server.name}.service that was made by hand"
    if marker is None or unit.text is None or unit.arguments is None or not unit.note:
        return Reason.EDITED, f"the unit of {server.name} was not wholly written"
    if unit.text.sha256 != marker.unit:
        return Reason.EDITED, f"the unit of {server.name} was edited by somebody"
    if marker.instead_of == wanted.digest:
        return None
    as_asked = marker.asked == wanted.asked or (marker.digest == wanted.digest and unit.text.text == wanted.text)
    if not as_asked:
        return Reason.OTHER_MEANING, f"the unit of {server.name} is not what its spec asks"
    if unit.secret_digest != wanted.secret_digest(unit.salt):
        return Reason.OTHER_SECRETS, f"the secrets of {server.name} are not those that its spec names now"
    return None


def _worth_knowing(unit: ServerUnit | None, wanted: Wanted) -> tuple[str, ...]:
    if unit is None or unit.marker is None:
        return ()
    told = []
    if unit.marker.instead_of == wanted.digest:
        told.append("the last good unit is there in place of the one that failed")
    if unit.dropins:
        told.append(f"somebody's {', '.join(unit.dropins)} change it")
    return tuple(told)


def _evidence(unit: ServerUnit | None, wanted: Wanted) -> dict[str, str]:
    """What differs in the arguments, without what may be secret: those are in no argument."""
    if unit is None or unit.arguments is None:
        return {}
    old, new = as_plain(unit.arguments), as_plain(wanted.arguments)
    return {name: _change(old.get(name), new[name]) for name in new if old.get(name) != new[name]}


def _change(old: object, new: object) -> str:
    """What is no more, and what is there in its place."""
    if isinstance(old, list) and isinstance(new, list):
        gone, come = [each for each in old if each not in new], [each for each in new if each not in old]
        if gone or come:
            return f"{_short(gone)} -> {_short(come)}"
    if isinstance(old, dict) and isinstance(new, dict):
        differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        return f"{_short({k: old.get(k) for k in differing})} -> {_short({k: new.get(k) for k in differing})}"
    return f"{_short(old)} -> {_short(new)}"


def _short(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)[:300]


# What it is to be


def _wanted(view: View, server: ModelServer, place: Place, engine: Engine) -> Wanted | Drift:
    """The unit that the spec asks for, or why there can be none. Raises NotKnown."""
    cards = cards_of(view, server)
    if isinstance(cards, Unassigned):
        return Drift(Reason.NO_GPU, cards.message, Block(Reason.NO_GPU, cards.message, cards.needs))
    environment = environments.wanted(view, server)
    untold = [card.pci for card in cards if not card.uuid and not card.later]
    if untold:
        raise NotKnown("gpu-not-known", f"the UUID of {', '.join(untold)} on {place.host} is not known yet")
    gpus = tuple(card.uuid or f"UUID-of-{card.pci}" for card in cards)
    resolved = engine.resolve(server, environment.flags, len(cards))
    if resolved.faults:
        reason = Reason.UNKNOWN_FLAG if any("no such flag" in f.message for f in resolved.faults) else Reason.BAD_FLAG
        message = "; ".join(fault.message for fault in resolved.faults)
        needs = "; ".join(dict.fromkeys(fault.todo for fault in resolved.faults))
        return Drift(reason, message, Block(reason, message, needs), {f.flag: f.message for f in resolved.faults})
    here = folder(server.name)
    where = EnginePlace(
        env_dir=environment.directory,
        weights_dir=weights.directory(view, server),
        draft_dir=weights.draft_directory(view, server),
        config=f"{here}/config.yaml",
        gpus=gpus,
        cuda_home=environment.cuda_home,
    )
    command = engine.command(server, where, environment.flags)
    secret = {name: view.secret(SecretRef(secret=name)) for name in command.secret_names}
    arguments = Arguments(
        argv=command.argv,
        environment=tuple(sorted(command.environment.items())),
        secrets=tuple(sorted(command.secrets)),
        config=command.has_config,
        engine=engine.name,
        version=server.engine.version,
        env_digest=environment.digest,
        env_dir=environment.directory,
        model_dir=where.weights_dir,
        draft_dir=where.draft_dir,
        model=server.model.repo,
        revision=server.model.revision,
        served_model_name=engine.model_id(server, where.weights_dir),
        address=server.serve.address,
        port=server.serve.port,
        gpus=gpus,
        tensor_parallel=tensor_parallel(server, len(cards)),
        flags=tuple((option.name, _short(option.value)) for option in resolved.options),
    )
    meaning = server_wanted.digest(as_plain(arguments))
    how = Supervision(
        restart=engine.restart.policy,
        prevent=engine.restart.prevent,
        success=engine.restart.success,
        stop_seconds=engine.restart.stop_seconds,
        kill_mode=engine.restart.kill_mode,
        startup_seconds=int(server.checks.startup_budget.total_seconds()),
    )
    description = f"{server.name}: {server.model.repo} on {engine.name} {server.engine.version}"
    return Wanted(
        arguments=arguments,
        asked=server_wanted.asked(server, gpus, environment.digest),
        digest=meaning,
        text=unit_text(server.name, description, arguments, meaning, how),
        secrets=secrets_text({name: secret[value] for name, value in command.secrets.items()})
        if command.secrets
        else None,
        config=command.config_text(secret) if command.has_config else None,
        notes=tuple(f"{note.message}: {note.todo}" for note in resolved.notes),
    )


# What is done about it


def _install(
    server: ModelServer, place: Place, unit: ServerUnit | None, wanted: Wanted, reason: Reason, *, certain: bool
) -> Step:
    here = folder(server.name)
    marker = Marker(
        str(server.ref),
        wanted.digest,
        hashlib.sha256(wanted.text.encode()).hexdigest(),
        wanted.asked,
        wanted.arguments.env_digest,
    )
    files = {
        f"{here}/note.sh": ("0755", NOTE),
        **({f"{here}/secrets.env": ("0600", wanted.secrets)} if wanted.secrets is not None else {}),
        **({f"{here}/config.yaml": ("0600", wanted.config)} if wanted.config is not None else {}),
        f"{here}/args.json": ("0644", f"{json.dumps(as_plain(wanted.arguments), indent=1, ensure_ascii=False)}\n"),
        unit_path(server.name): ("0644", wanted.text),
        f"{here}/marker.json": ("0644", f"{json.dumps(_plain(marker))}\n"),
    }
    step = Step(
        action="install-unit",
        object=server.ref,
        layer=NAME,
        reason=reason,
        summary=f"write the unit of {server.name} in {place}" + ("" if certain else ", unless it is there"),
        hosts=(place.host,),
        script=inside.script(_PACKAGE, "install-unit.sh"),
        args=(
            place.argument,
            server.name,
            unit.text.sha256 if unit is not None and unit.text is not None else "absent",
            *(part for path, (mode, content) in files.items() for part in (str(_size(content)), mode, path)),
        ),
        stdin=b"".join(content.encode() for _, content in files.values()),
        disrupts=(Disruption(server.ref, Permission.ADOPT),) if reason is Reason.NOT_OURS else (),
        timeout=300.0,
        provisional=not certain or any(gpu.startswith("UUID-of-") for gpu in wanted.arguments.gpus),
        diff=_diff(unit, wanted),
    )
    return dataclasses.replace(step, effect=_effect(server, place, unit, wanted, marker))


def _effect(server: ModelServer, place: Place, unit: ServerUnit | None, wanted: Wanted, marker: Marker) -> Effect:
    salt = unit.salt if unit is not None else ""
    now = ServerUnit(
        server.name,
        File(wanted.text, 0),
        marker,
        wanted.arguments,
        salt,
        wanted.secret_digest(salt),
        note=True,
        dropins=unit.dropins if unit is not None else (),
    )

    def units(here: UnitsHere | None) -> UnitsHere:
        others = tuple(each for each in (here.units if here is not None else ()) if each.name != server.name)
        return UnitsHere(tuple(sorted((*others, now), key=lambda each: each.name)))

    def found(here: tuple[Found, ...] | None) -> tuple[Found, ...]:
        was = next((each for each in here or () if each.name == server.name), Found(server.name))
        made = dataclasses.replace(was, object=str(server.ref), unit=True)
        others = tuple(each for each in here or () if each.name != server.name)
        return tuple(sorted((*others, made), key=lambda each: each.name))

    def effect(facts: FleetFacts) -> FleetFacts:
        return inside.after(
            inside.after(facts, place, NAME, ServerUnits, units), place, "server.placement", FoundFacts, found
        )

    return effect


def _plain(marker: Marker) -> Mapping[str, object]:
    return {
        "schema": marker.schema,
        "object": marker.object,
        "digest": marker.digest,
        "unit": marker.unit,
        "asked": marker.asked,
        "environment": marker.environment,
    }


def _size(content: str) -> int:
    return len(content.encode())


def _diff(unit: ServerUnit | None, wanted: Wanted) -> str:
    """The change of the unit's file, as people read changes; there is no secret in it. A new one is no change."""
    if unit is None or unit.text is None:
        return ""
    lines = difflib.unified_diff(
        unit.text.text.splitlines(), wanted.text.splitlines(), "unit as it is", "unit", lineterm="", n=1
    )
    return "\n".join(lines)


LAYER = Layer(
    name=NAME,
    kind="ModelServer",
    reasons=Reason,
    check=check,
    probe=inside.probe(_PACKAGE, "probe.sh"),
    parse=parse,
)
