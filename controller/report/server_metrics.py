"""What layers of servers know, for Prometheus: downloads, what servers answered, how fast they are."""

from __future__ import annotations

from collections.abc import Iterator

from controller.core import observe
from controller.facts.units import How
from controller.facts.words import Known
from controller.layers.server_output.facts import Judged, OutputFacts, Result
from controller.layers.server_weights.facts import AllWeights, State, WeightsHere
from controller.layers.shared import inside
from controller.run.picture import Picture
from controller.spec.model import ModelServer

Labelled = tuple[tuple[str, ...], float]


def judged(picture: Picture) -> Iterator[tuple[ModelServer, Judged]]:
    """Each server of the specs of which something was seen in the place where it is to run."""
    for server in picture.specs.servers.values():
        place = inside.place_of(picture.specs, server)
        facts = picture.facts.get(place.host)
        section = facts.section("server.output") if facts is not None else None
        if isinstance(section, Known) and isinstance(section.value, OutputFacts):
            found = section.value.server(place.vmid, server.name)
            if found is not None:
                yield server, found


def checks(picture: Picture) -> tuple[list[Labelled], list[Labelled], list[Labelled], list[Labelled]]:
    """Of each check of each server: whether it passed, when, how long it took; and failures by reason."""
    passed: list[Labelled] = []
    at: list[Labelled] = []
    seconds: list[Labelled] = []
    failures: list[Labelled] = []
    for server, found in judged(picture):
        if found.output is None:
            continue
        for check in found.output.checks:
            labels = (server.name, check.name)
            at.append((labels, found.output.at))
            seconds.append((labels, check.seconds))
            if check.result is not Result.INCONCLUSIVE:
                passed.append((labels, check.result is Result.PASSED))
        failures += (((server.name, name, reason), count) for name, reason, count in found.output.failures)
    return passed, at, seconds, failures


def speeds(picture: Picture) -> tuple[list[Labelled], list[Labelled]]:
    """Of each server: tokens per second, and the share of drafts that were accepted."""
    fast: list[Labelled] = []
    accepted: list[Labelled] = []
    for server, found in judged(picture):
        figures = found.output.figures if found.output is not None else None
        if figures is not None and figures.tokens_per_second is not None:
            fast.append(((server.name,), figures.tokens_per_second))
        if figures is not None and figures.draft_acceptance is not None:
            accepted.append(((server.name,), figures.draft_acceptance))
    return fast, accepted


def downloads(picture: Picture) -> tuple[list[Labelled], list[Labelled], list[Labelled]]:
    """Of each model of ours on a host: bytes that are there, bytes it has, and whether its download stands still."""
    there: list[Labelled] = []
    sizes: list[Labelled] = []
    stalled: list[Labelled] = []
    for name, facts in picture.facts.items():
        section = facts.section("server.weights")
        if not (isinstance(section, Known) and isinstance(section.value, AllWeights)):
            continue
        units = observe.units(facts)
        stuck = {job.name for job in units.jobs if job.how is How.STALLED} if units is not None else set()
        for vmid, here in section.value.places:
            for weights in here.weights:
                labels = (name, weights.repo)
                there.append((labels, _there(here, weights.key)))
                sizes.append((labels, sum(file.size for file in weights.files)))
                job = f"weights-{weights.key}" + (f"-{vmid}" if vmid is not None else "")
                stalled.append((labels, job in stuck))
    return there, sizes, stalled


def _there(here: WeightsHere, key: str) -> int:
    """Bytes of whole files, and of what is not whole yet."""
    weights = here.of(key)
    if weights is None:
        return 0
    whole = (file for file in weights.files if _whole(weights.state(file.path, file.size, file.sha256, file.blob)))
    return sum(file.size for file in whole) + (weights.aside or 0)


def _whole(state: State) -> bool:
    return state in (State.RIGHT, State.NOT_VERIFIED)
