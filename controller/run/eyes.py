"""Looking at hosts and remembering what was seen, so that what did not change is not parsed again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from controller.core import observe
from controller.core.words import Layer
from controller.engines import registry
from controller.facts import hub
from controller.facts.words import FleetFacts, HostFacts, Known
from controller.spec.model import ModelServer, ServerState, Specs, Unreadable
from controller.world.port import Look, ModelAsked, World


class Eyes:
    """The facts of a fleet, as fresh as the last look."""

    def __init__(self, world: World, layers: Sequence[Layer], specs: Specs) -> None:
        self._world = world
        self._parsers = observe.parsers(layers)
        self._specs = specs
        self._facts: dict[str, HostFacts] = {}

    @property
    def facts(self) -> FleetFacts:
        """What is known now. A new mapping after each look; the old one stays as it was."""
        return self._facts

    def look(self, hosts: Iterable[str], max_age: float = 0.0) -> FleetFacts:
        """Look at these hosts at once. ``max_age`` in seconds is what slow tools may answer from memory."""
        guests = tuple(sorted({c.id for c in self._specs.containers.values()}))
        looks = [
            Look(name, max_age, guests if self._specs.hosts[name].platform == "proxmox" else ())
            for name in dict.fromkeys(hosts)
            if name in self._specs.hosts
        ]
        seen = self._world.observe(looks)
        facts = {
            **self._facts,
            **{name: observe.read(self._parsers, one, self._facts.get(name)) for name, one in seen.items()},
        }
        models = models_of(self._world, self._specs)
        self._facts = {name: with_models(one, models) for name, one in facts.items()}
        return self._facts


def models_of(world: World, specs: Specs) -> hub.HubFacts | None:
    """What the Hub says of the models of the specs; None when there are none."""
    told: dict[tuple[str, str], hub.Description | hub.NotDescribed] = {}
    asked: dict[tuple[str, str], ModelAsked] = {}
    for server in specs.servers.values():
        for repo, revision in _models(server):
            token = specs.secrets.get(server.model.token.secret) if server.model.token else None
            if isinstance(token, Unreadable):
                todo = "put the secret where Fleet.secrets says that it is"
                told[repo, revision] = hub.NotDescribed(hub.Trouble.UNAUTHORIZED, token.why, todo)
            elif token or (repo, revision) not in asked:
                asked[repo, revision] = ModelAsked(repo, revision, token)
    if not (asked or told):
        return None
    return hub.HubFacts({**told, **world.describe(tuple(asked.values()))})


def _models(server: ModelServer) -> list[tuple[str, str]]:
    """The models of a server that is looked after, by repository and revision."""
    engine = registry.engines().get(server.engine.name)
    if server.state is ServerState.ABSENT or (engine is not None and not engine.manages):
        return []
    draft = server.model.draft
    return [(server.model.repo, server.model.revision), *([(draft.repo, draft.revision)] if draft else [])]


def with_models(facts: HostFacts, models: hub.HubFacts | None) -> HostFacts:
    """What is known of a host, with what the Hub says of models."""
    if facts.failure is not None or models is None:
        return facts
    return dataclasses.replace(facts, sections={**facts.sections, hub.SECTION: Known(models)})
