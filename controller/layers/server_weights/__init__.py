"""server.weights: every file of the pinned revision is there, with the right size and content; the draft model's too.

What the files should be is what the Hub says of the revision. Once they are there their marker says the same, so a Hub
that does not answer takes nothing from anybody.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from controller.core.package import text
from controller.core.view import View
from controller.core.words import Block, Drift, Effect, InSync, Layer, NotKnown, Skipped, Step, Verdict
from controller.facts.hub import Description, NotDescribed, RepoFile, Trouble
from controller.facts.units import UnitFacts
from controller.facts.words import FleetFacts
from controller.layers.server_weights.facts import (
    SCHEMA,
    AllWeights,
    Found,
    ManifestFile,
    State,
    Weights,
    WeightsHere,
    parse,
)
from controller.layers.server_weights.reasons import Reason
from controller.layers.shared import environments, inside, jobs, server_wanted, weights
from controller.layers.shared.inside import Place
from controller.layers.shared.programs import with_programs
from controller.layers.shared.weights import Wanted
from controller.spec.model import Mode, ModelServer, ServerState

NAME = "server.weights"
_PACKAGE = "controller.layers.server_weights"
_SCRIPT = with_programs(
    inside.script(_PACKAGE, "fetch.sh"),
    {name: text(_PACKAGE, f"programs/{name}") for name in ("weights.py", "worker.py")},
)


def check(view: View, server: ModelServer) -> Verdict:
    """Whether the files of the server's models are there and right."""
    if not server_wanted.is_managed(server):
        return Skipped("it is only watched")
    if server.state is ServerState.ABSENT:
        return Skipped("it is to be absent")
    if why := inside.why_not(view.specs, server):
        return Skipped(why)
    notes = []
    for model in weights.models_of(server):
        verdict = _model(view, server, model)
        if not isinstance(verdict, InSync):
            return verdict
        notes.append(verdict.note)
    return InSync("; ".join(note for note in (*notes, *_orphans(view, inside.place_of(view.specs, server))) if note))


def _model(view: View, server: ModelServer, model: Wanted) -> Drift | InSync:
    """The verdict on one model. Raises NotKnown."""
    place = inside.place_of(view.specs, server)
    seen = inside.look(view, place, NAME, AllWeights)
    told = weights.described(view, server, model)
    if isinstance(told, NotDescribed):
        return _by_what_is_there(model, seen.value, told)
    wanted = Want(model, told.commit, model.directory(told.commit), weights.needed(told.files), told.endpoint)
    if not wanted.files:
        message = f"{model.repo} at {model.revision} has no files"
        return Drift(Reason.NO_FILES, message, Block(Reason.NO_FILES, message, "correct model.repo and model.revision"))
    found = seen.value.of(wanted.key) if seen.value is not None else None
    if (odd := _odd(place, wanted, found)) is not None:
        return odd
    missing = [file for file in wanted.files if _state(found, file) is not State.RIGHT]
    if not missing and found is not None:
        return _complete(view, server, place, wanted, found)
    reason, message = _difference(server, place, wanted, found, missing)
    if seen.value is None:
        reason = Reason.NOT_KNOWN_YET
    step = _fetch(view, server, place, wanted, found, reason, certain=seen.certain)
    drift = jobs.drift(view, reason, message, step, _evidence(found, missing))
    if isinstance(drift.remedy, Step) and seen.value is not None and seen.certain:
        full = _no_space(view, server, place, seen.value, wanted.directory)
        if full is not None:
            return dataclasses.replace(drift, remedy=full)
    return drift


@dataclasses.dataclass(frozen=True, slots=True)
class Want:
    """A model as it is to be in a directory: the files of a commit, and the Hub that they are from."""

    model: Wanted
    commit: str
    directory: str
    files: tuple[RepoFile, ...]
    endpoint: str

    @property
    def key(self) -> str:
        """Its directory's key."""
        return weights.key_of(self.directory)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def _state(found: Weights | None, file: RepoFile) -> State:
    return State.MISSING if found is None else found.state(file.path, file.size, file.sha256, file.blob)


# What is there


def _by_what_is_there(model: Wanted, here: WeightsHere | None, told: NotDescribed) -> Drift | InSync:
    """The verdict while the Hub does not say what a model is: the marker of one that was wholly fetched does."""
    if model.pinned and here is not None:
        found = here.of(weights.key_of(model.directory(model.revision)))
        if found is not None and found.files and _all_right(found):
            return InSync(f"the Hub does not tell of {model.repo}, and what is there is whole: {told.message}")
    reasons = {
        Trouble.MISSING: Reason.NOT_FOUND,
        Trouble.NO_REVISION: Reason.NOT_FOUND,
        Trouble.GATED: Reason.GATED,
        Trouble.UNAUTHORIZED: Reason.TOKEN_REFUSED,
    }
    reason = reasons.get(told.reason)
    if reason is None:
        raise NotKnown(told.reason, told.message)
    return Drift(reason, told.message, Block(reason, told.message, told.todo))


def _all_right(found: Weights) -> bool:
    return all(found.state(f.path, f.size, f.sha256, f.blob) is State.RIGHT for f in found.files)


def _odd(place: Place, wanted: Want, found: Weights | None) -> Drift | None:
    """What keeps us from judging the files. Raises NotKnown."""
    if found is None:
        return None
    if found.schema > SCHEMA:
        message = f"{wanted.directory} in {place} was fetched by a newer release (schema {found.schema})"
        block = Block(Reason.NEWER_SCHEMA, message, f"use that release, or remove the marker of {found.key} there")
        return Drift(Reason.NEWER_SCHEMA, message, block)
    if found.found is None:
        raise NotKnown(Reason.DIRECTORY_HANGS, f"the disk of {wanted.directory} in {place} does not answer")
    if (found.repo, found.revision) != (wanted.model.repo, wanted.commit):
        message = f"in {wanted.directory} in {place} lies {found.repo} at {found.revision}"
        return Drift(Reason.ANOTHERS, message, Block(Reason.ANOTHERS, message, "choose another model.directory"))
    return None


def _complete(view: View, server: ModelServer, place: Place, wanted: Want, found: Weights) -> Drift | InSync:
    """All files are right: what is left to do about them."""
    if found.aside is not None:
        message = f"what a download left lies beside {wanted.model.repo} in {place}: {_amount(found.aside)}"
        step = _fetch(view, server, place, wanted, found, Reason.LEFTOVERS, certain=True)
        return jobs.drift(view, Reason.LEFTOVERS, message, step)
    if found.due and server.policy.mode is Mode.ENFORCE:
        job = view.fact(place.host, "world", UnitFacts).job(_job(place, wanted.key))
        if job is not None and job.running:
            return InSync(f"the files of {wanted.model.repo} are being compared once more")
        message = f"the files of {wanted.model.repo} in {place} were compared a month ago"
        return Drift(Reason.RECHECK_DUE, message, _recheck(view, server, place, wanted, found))
    return InSync()


def _difference(
    server: ModelServer, place: Place, wanted: Want, found: Weights | None, missing: list[RepoFile]
) -> tuple[Reason, str]:
    states = [_state(found, file) for file in missing]
    size = _amount(sum(file.size for file in missing))
    few = f"{len(missing)} of {len(wanted.files)} files of {wanted.model.repo}"
    if State.DAMAGED in states:
        damaged = [file.path for file, state in zip(missing, states, strict=True) if state is State.DAMAGED]
        return Reason.DAMAGED, f"{', '.join(damaged[:3])} of {wanted.model.repo} in {place} is damaged"
    if all(state is State.NOT_VERIFIED for state in states):
        return Reason.NOT_VERIFIED, f"{few} in {place} are there and were not compared yet: {size}"
    if all(state is State.OTHER_SIZE for state in states):
        return Reason.OTHER_SIZE, f"{few} in {place} have another size than they should have"
    return Reason.NOT_THERE, f"{few} are not there for {server.name} in {place}: {size} of {_amount(wanted.size)}"


def _evidence(found: Weights | None, missing: list[RepoFile]) -> dict[str, str]:
    return {file.path: str(_state(found, file)) for file in missing[:5]}


def _orphans(view: View, place: Place) -> Iterator[str]:
    """What lies in a place that no spec knows."""
    here = view.fact(place.host, NAME, AllWeights).of(place.vmid)
    wanted = {model.repo for server in view.specs.servers.values() for model in weights.models_of(server)}
    for found in here.weights if here is not None else ():
        if found.repo not in wanted:
            yield f"{found.repo} in {found.directory} in {place} is of no spec: {_amount(found.size)}"


# Space


def _no_space(view: View, server: ModelServer, place: Place, here: WeightsHere, directory: str) -> Block | None:
    """Why what is missing has no room, with what else is to be fetched to the same disk; None when it has."""
    disk = here.disk_of(directory)
    if disk is None:
        return None
    needed: dict[str, int] = {}
    for other in (server, *view.specs.servers.values()):
        there = inside.place_of(view.specs, other)
        if there.host != place.host or not server_wanted.is_managed(other) or other.state is ServerState.ABSENT:
            continue
        seen = view.fact(there.host, NAME, AllWeights).of(there.vmid)
        for path, size in _to_fetch(view, other, seen):
            on = seen.disk_of(path) if seen is not None else None
            if on is not None and on.id == disk.id:
                needed[f"{there.argument}:{path}"] = size
    total = sum(needed.values())
    if total <= disk.free:
        return None
    message = f"{disk.mount} in {place} has {_amount(disk.free)} free, and {_amount(total)} are to be fetched to it" + (
        f" for {len(needed)} models" if len(needed) > 1 else ""
    )
    return Block(Reason.NO_SPACE, message, "make room there, or choose another model.directory")


def _to_fetch(view: View, server: ModelServer, here: WeightsHere | None) -> Iterator[tuple[str, int]]:
    """Directories of a server's models, and bytes that are missing there."""
    for model in weights.models_of(server):
        told = weights.described(view, server, model)
        if isinstance(told, Description):
            directory = model.directory(told.commit)
            found = here.of(weights.key_of(directory)) if here is not None else None
            missing = sum(
                f.size for f in weights.needed(told.files) if _state(found, f) in (State.MISSING, State.OTHER_SIZE)
            )
            yield directory, max(0, missing - (found.aside or 0 if found is not None else 0))


# What is done


def _job(place: Place, key: str) -> str:
    return f"weights-{key}" + (f"-{place.argument}" if place.vmid is not None else "")


def _fetch(
    view: View, server: ModelServer, place: Place, wanted: Want, found: Weights | None, reason: Reason, *, certain: bool
) -> Step:
    token = server.model.token
    order = {
        "object": found.object if found is not None else str(server.ref),
        "repo": wanted.model.repo,
        "revision": wanted.commit,
        "directory": wanted.directory,
        "endpoint": wanted.endpoint,
        "token": view.secret(token) if token is not None else "",
        "stalled_after": server.model.stalled_after.total_seconds(),
        "peers": [],
        "files": [dataclasses.asdict(file) for file in wanted.files],
    }
    missing = sum(file.size for file in wanted.files if _state(found, file) in (State.MISSING, State.OTHER_SIZE))
    what = f"fetch {_amount(missing)} of {wanted.model.repo} to" if missing else f"compare {wanted.model.repo} in"
    return Step(
        action="fetch-weights",
        object=server.ref,
        layer=NAME,
        reason=reason,
        summary=f"{what} {wanted.directory} in {place}" + ("" if certain else ", unless it is there"),
        hosts=(place.host,),
        script=_SCRIPT,
        args=("fetch", place.argument, wanted.key, _python(view, server)),
        stdin=json.dumps(order).encode(),
        timeout=48 * 3600.0,
        job=_job(place, wanted.key),
        provisional=not certain,
        effect=_effect(server, place, wanted, found),
    )


def _recheck(view: View, server: ModelServer, place: Place, wanted: Want, found: Weights) -> Step:
    return Step(
        action="recheck-weights",
        object=server.ref,
        layer=NAME,
        reason=Reason.RECHECK_DUE,
        summary=f"compare the files of {wanted.model.repo} in {place} once more, slowly",
        hosts=(place.host,),
        script=_SCRIPT,
        args=("recheck", place.argument, wanted.key, _python(view, server)),
        timeout=48 * 3600.0,
        job=_job(place, wanted.key),
        effect=_effect(server, place, wanted, found),
    )


def _python(view: View, server: ModelServer) -> str:
    return f"{environments.wanted(view, server).directory}/bin/python"


def _effect(server: ModelServer, place: Place, wanted: Want, found: Weights | None) -> Effect:
    """Everything is there, and was compared."""
    made = Weights(
        key=wanted.key,
        object=found.object if found is not None else str(server.ref),
        repo=wanted.model.repo,
        revision=wanted.commit,
        directory=wanted.directory,
        files=tuple(ManifestFile(f.path, f.size, f.sha256, f.blob, mtime=0) for f in wanted.files),
        found=tuple((f.path, Found(f.size, 0)) for f in wanted.files),
    )

    def having(here: WeightsHere | None) -> WeightsHere:
        here = here or WeightsHere()
        others = (each for each in here.weights if each.key != made.key)
        disk = here.disk_of(made.directory)
        left = made.size - (found.size if found is not None else 0)
        disks = tuple(
            dataclasses.replace(each, free=max(0, each.free - left))
            if disk is not None and each.id == disk.id
            else each
            for each in here.disks
        )
        return WeightsHere(tuple(sorted((*others, made), key=lambda each: each.key)), disks)

    def effect(facts: FleetFacts) -> FleetFacts:
        return inside.after(facts, place, NAME, AllWeights, having)

    return effect


def _amount(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


LAYER = Layer(
    name=NAME,
    kind="ModelServer",
    reasons=Reason,
    check=check,
    probe=inside.probe(_PACKAGE, "probe.sh"),
    parse=parse,
)
