"""What is made ready for a server inside its container before that moves, so that the move alone is its gap."""

from __future__ import annotations

from controller.core.view import View
from controller.core.words import NotKnown
from controller.facts.hub import NotDescribed
from controller.layers.server_weights.facts import AllWeights, State
from controller.layers.shared import environments, inside, weights
from controller.layers.shared.inside import Place
from controller.layers.shared.server_wanted import is_managed
from controller.spec.model import ModelServer, ServerState
from controller.spec.policy import Mode


def missing(view: View, server: ModelServer) -> str:
    """What a server's container waits for before it moves, "" for nothing; it does not wait for what cannot be told."""
    _, ahead = inside.working_place(view, server)
    enforced = server.policy.mode is Mode.ENFORCE and server.state is ServerState.RUNNING and is_managed(server)
    if not ahead or not enforced:
        return ""
    try:
        found = environments.wanted(view, server).found
        if found is None or not found.whole:
            return f"its environment for the cards of {inside.place_of(view.specs, server).host} is not built yet"
        return next((f"{model.repo} is not wholly fetched yet" for model in _not_whole(view, server)), "")
    except NotKnown:
        return ""


def goes_along(view: View, place: Place, model: weights.Wanted) -> bool:
    """Whether a model's directory is on the disk that a container takes with it: on its root file system."""
    here = inside.look(view, place, "server.weights", AllWeights).value
    disk = here.disk_of(model.under) if here is not None else None
    return disk is not None and disk.mount == "/"


def _not_whole(view: View, server: ModelServer) -> list[weights.Wanted]:
    place, _ = inside.working_place(view, server)
    here = inside.look(view, place, "server.weights", AllWeights).value
    found = []
    for model in weights.models_of(server):
        told = weights.described(view, server, model)
        if isinstance(told, NotDescribed) or not goes_along(view, place, model) or here is None:
            continue
        there = here.of(weights.key_of(model.directory(told.commit)))
        files = weights.needed(told.files)
        if there is None or any(there.state(f.path, f.size, f.sha256, f.blob) is not State.RIGHT for f in files):
            found.append(model)
    return found
