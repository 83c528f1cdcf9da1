"""server.weights: every file of the pinned revision is there, with the right size and content; the draft model's too.

What the files should be is what the Hub says of the revision. Once they are there their marker says the same, so a Hub
that does not answer takes nothing from anybody.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping

from controller.core.package import text
from controller.core.view import View
from controller.core.words import Block, Drift, Effect, InSync, Layer, NotKnown, Skipped, Step, Verdict, Wait
from controller.facts.hub import Description, NotDescribed, RepoFile, Trouble
from controller.facts.units import UnitFacts
from controller.facts.words import FleetFacts, Known
from controller.layers.server_weights.facts import (
    FOLDER,
    SCHEMA,
    AllWeights,
    Found,
    ManifestFile,
    Offer,
    State,
    Weights,
    WeightsHere,
    parse,
)
from controller.layers.server_weights.reasons import Reason
from controller.layers.shared import environments, inside, jobs, preparing, server_wanted, weights
from controller.layers.shared.inside import Place
from controller.layers.shared.programs import with_programs
from controller.layers.shared.weights import Wanted
from controller.spec.model import Lifecycle, Mode, ModelServer, ServerState

NAME = "server.weights"
_PACKAGE = "controller.layers.server_weights"
_SCRIPT = with_programs(
    inside.script(_PACKAGE, "fetch.sh"),
    {name: text(_PACKAGE, f"programs/{name}") for name in ("weights.py", "worker.py")},
)


_OFFER = with_programs(inside.script(_PACKAGE, "offer.sh"), {"offer.py": text(_PACKAGE, "programs/offer.py")})


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
    place, ahead = _place(view, server, model)
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
    full = _no_space(view, server, place, seen.value, wanted.directory) if seen.value and seen.certain else None
    peers: tuple[Mapping[str, str], ...] = ()
    has_to_come = any(_state(found, file) in _TO_FETCH for file in missing)
    if seen.value is not None and seen.certain and not ahead and not full and has_to_come:
        coming = _from_another_host(view, server, place, wanted, seen.value)
        if isinstance(coming, Step | Wait):
            return Drift(reason, message, coming, _evidence(found, missing))
        peers = coming
    step = _fetch(view, server, place, wanted, found, reason, certain=seen.certain, peers=peers)
    drift = inside.made_ahead(jobs.drift(view, reason, message, step, _evidence(found, missing)), ahead=ahead)
    if isinstance(drift.remedy, Step) and full is not None:
        return dataclasses.replace(drift, remedy=full)
    return drift


def _place(view: View, server: ModelServer, model: Wanted) -> tuple[Place, bool]:
    """Where a model is fetched to: into a container that is still to move only if its disk goes with it."""
    place, ahead = inside.working_place(view, server)
    if ahead and not preparing.goes_along(view, place, model):
        return inside.place_of(view.specs, server), False
    return place, ahead


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


_TO_FETCH = (State.MISSING, State.OTHER_SIZE)


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
            missing = sum(f.size for f in weights.needed(told.files) if _state(found, f) in _TO_FETCH)
            yield directory, max(0, missing - (found.aside or 0 if found is not None else 0))


# From another host of the fleet


def _from_another_host(
    view: View, server: ModelServer, place: Place, wanted: Want, here: WeightsHere
) -> tuple[Mapping[str, str], ...] | Step | Wait:
    """Where else the files can be had, what makes that possible, or nothing: they come from the Hub then.

    The place that wants them makes a token; the host that has them is told its digest and offers them to who shows it.
    """
    fetching = view.fact(place.host, "world", UnitFacts).job(_job(place, wanted.key))
    source = _source(view, place, wanted)
    if source is None or (fetching is not None and fetching.running):
        return ()
    token = next((digest for key, digest in here.asked if key == wanted.key), None)
    if token is None:
        return _ask(server, place, wanted, source[0])
    step = _offer(server, *source, token)
    job = view.fact(source[0].host, "world", UnitFacts).job(str(step.job))
    offers = view.fact(source[0].host, NAME, AllWeights).offers
    offer = next((each for each in offers if (each.key, each.token_digest) == (source[1].key, token)), None)
    if offer is not None and (job is None or job.running):
        url = f"http://{view.host(source[0].host).address}:{offer.port}"
        return ({"url": url, "token_file": f"{FOLDER}/{wanted.key}.token"},)
    if job is not None and job.id == step.id:
        message = f"{source[0]} is about to offer {wanted.model.repo}"
        return Wait("job", message, (source[0].host,)) if job.running else ()
    return () if job is not None and job.running else step


def _source(view: View, place: Place, wanted: Want) -> tuple[Place, Weights] | None:
    """A place on another host that has every file, compared and right."""
    for name in sorted(view.facts):
        host = view.specs.hosts.get(name)
        known = view.facts[name].section(NAME)
        if name == place.host or host is None or host.lifecycle is not Lifecycle.ACTIVE:
            continue
        if isinstance(known, Known) and isinstance(known.value, AllWeights):
            for vmid, there in known.value.places:
                for each in there.weights:
                    same = (each.repo, each.revision) == (wanted.model.repo, wanted.commit)
                    if same and all(_state(each, file) is State.RIGHT for file in wanted.files):
                        return Place(name, vmid), each
    return None


def _ask(server: ModelServer, place: Place, wanted: Want, source: Place) -> Step:
    def asked(here: WeightsHere | None) -> WeightsHere:
        here = here or WeightsHere()
        return dataclasses.replace(here, asked=(*here.asked, (wanted.key, "of a token that is made then")))

    return Step(
        action="ask-for-weights",
        object=server.ref,
        layer=NAME,
        reason=Reason.NOT_THERE,
        summary=f"make a token in {place} with which it may have {wanted.model.repo} from {source}",
        hosts=(place.host,),
        script=inside.script(_PACKAGE, "ask.sh"),
        args=(place.argument, wanted.key),
        effect=lambda facts: inside.after(facts, place, NAME, AllWeights, asked),
    )


def _offer(server: ModelServer, source: Place, weights: Weights, token: str) -> Step:
    """A job of the host that has the files; it ends when they have been taken."""

    def effect(facts: FleetFacts) -> FleetFacts:
        known = facts[source.host].section(NAME)
        if not isinstance(known, Known) or not isinstance(known.value, AllWeights):
            return facts
        offers = (*known.value.offers, Offer(weights.key, 0, token))
        offering = dataclasses.replace(known.value, offers=offers)
        return {**facts, source.host: facts[source.host].with_section(NAME, offering)}

    return Step(
        action="offer-weights",
        object=server.ref,
        layer=NAME,
        reason=Reason.NOT_THERE,
        summary=f"offer {weights.repo} of {source} to who holds the token",
        hosts=(source.host,),
        script=_OFFER,
        args=(source.argument, weights.key, weights.directory, token),
        stdin=json.dumps([{"path": file.path, "size": file.size} for file in weights.files]).encode(),
        timeout=48 * 3600.0,
        job=f"offer-{weights.key}",
        effect=effect,
    )


# What is done


def _job(place: Place, key: str) -> str:
    return f"weights-{key}" + (f"-{place.argument}" if place.vmid is not None else "")


def _fetch(
    view: View,
    server: ModelServer,
    place: Place,
    wanted: Want,
    found: Weights | None,
    reason: Reason,
    *,
    certain: bool,
    peers: tuple[Mapping[str, str], ...] = (),
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
        "peers": [dict(peer) for peer in peers],
        "files": [dataclasses.asdict(file) for file in wanted.files],
    }
    missing = sum(file.size for file in wanted.files if _state(found, file) in _TO_FETCH)
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
        asked = tuple(each for each in here.asked if each[0] != made.key)
        return WeightsHere(tuple(sorted((*others, made), key=lambda each: each.key)), disks, asked)

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
