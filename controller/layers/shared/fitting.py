"""What can be foretold of a server's start: its model as the Hub tells of it, its cards, and the engine's sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controller.core.view import View
from controller.core.words import NotKnown
from controller.engines import registry
from controller.engines.fit import Fit, Model, Outcome
from controller.engines.shape import NotForetold, shape_of
from controller.engines.words import Engine
from controller.facts.hub import SECTION, Description, HubFacts, NotDescribed
from controller.layers.shared.assignment import Unassigned
from controller.layers.shared.place import place_of
from controller.layers.shared.server_gpus import Card, cards_of
from controller.spec.model import ModelServer, ServerState


@dataclass(frozen=True, slots=True)
class Unfitted:
    """No sum can be made, and why."""

    why: str


def described(view: View, server: ModelServer) -> tuple[Description | NotDescribed, Description | NotDescribed | None]:
    """What the Hub says of the server's model, and of the one that drafts for it. Raises NotKnown."""
    models = view.fact(place_of(view.specs, server).host, SECTION, HubFacts)
    draft = server.model.draft
    return (
        models.of(server.model.repo, server.model.revision),
        models.of(draft.repo, draft.revision) if draft is not None else None,
    )


def fitted(
    engine: Engine,
    server: ModelServer,
    model: Description,
    draft: Description | None,
    cards: Sequence[Card],
) -> Fit | Unfitted:
    """The engine's sum, or why there is none."""
    try:
        main, drafting = _model(model), None if draft is None else _model(draft)
        flags = engine.shipped_flags(server.engine.version)
        return engine.fit(server, flags, main, drafting, [card.memory or 0 for card in cards])
    except NotForetold as error:
        return Unfitted(str(error))


def refusal(view: View, server: ModelServer) -> tuple[str, str] | None:
    """Why the server would certainly not start where its spec wants it, and what to do. None too when nobody knows.

    For whoever is about to move what it runs in: nothing is stopped for a place where it cannot serve.
    """
    engine = registry.engines().get(server.engine.name)
    if engine is None or not engine.manages or server.state is not ServerState.RUNNING:
        return None
    try:
        cards = cards_of(view, server)
        if isinstance(cards, Unassigned):
            return None
        model, draft = described(view, server)
    except NotKnown:
        return None
    if not isinstance(model, Description) or isinstance(draft, NotDescribed):
        return None
    fit = fitted(engine, server, model, draft, cards)
    if isinstance(fit, Unfitted) or fit.outcome is not Outcome.REFUSES:
        return None
    return "; ".join(p.message for p in fit.problems), "; ".join(p.todo for p in fit.problems)


def _model(told: Description) -> Model:
    if not told.weight_bytes:
        raise NotForetold(f"{told.repo} has no safetensors, whose size would be known")
    if not told.config:
        raise NotForetold(f"{told.repo} has no config.json")
    return Model(shape_of(told.config), told.weight_bytes)
