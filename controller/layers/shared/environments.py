"""Which Python environment a server is to have: by what it is told apart from others, where it lies, what is in it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from controller.core.view import View
from controller.core.words import NotKnown
from controller.engines import registry
from controller.engines.flags import FlagList
from controller.engines.words import Requirements
from controller.layers.access.facts import AccessFacts
from controller.layers.server_environment.facts import Environment, Environments, cuda_home, directory
from controller.layers.shared.assignment import Unassigned
from controller.layers.shared.inside import look, place_of
from controller.layers.shared.server_gpus import Card, cards_of
from controller.spec.model import ModelServer

SECTION = "server.environment"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The environment of a server.

    ``arch`` is that of the machine (x86_64, aarch64), ``capabilities`` are those of its GPUs: 8.6. ``overrides`` are
    requirements that win over what other packages ask for: those that the spec writes itself. ``flags`` are the
    options of the installed engine, those shipped for its version while there is none, or None. ``cuda_home`` is the
    toolkit for what is compiled at start, "" for none. ``found`` is the environment in the place, None while it is
    not there.
    """

    digest: str
    engine: str
    arch: str
    capabilities: tuple[str, ...]
    requirements: Requirements
    overrides: tuple[str, ...]
    flags: FlagList | None
    cuda_home: str
    found: Environment | None

    @property
    def directory(self) -> str:
        """Where it lies in its place."""
        return directory(self.digest)


def wanted(view: View, server: ModelServer) -> Wanted:
    """The environment that the server is to have.

    Raises:
        NotKnown: what it depends on is not known, the generation of one of its GPUs for example.
        registry.NoEngine: there is no such engine.
        TypeError: the engine is only watched.
    """
    engine = registry.engine(server.engine.name)
    place = place_of(view.specs, server)
    arch = view.fact(place.host, "host.access", AccessFacts).arch
    cards = cards_of(view, server)
    if isinstance(cards, Unassigned):
        raise NotKnown(cards.reason, cards.message)
    capabilities = tuple(sorted({_capability(card) for card in cards}))
    requirements = engine.requirements(server, arch)
    digest = digest_of(server, requirements, arch, capabilities)
    here = look(view, place, SECTION, Environments).value
    found = here.of(digest) if here is not None else None
    flags = (
        found.flags if found is not None and found.flags is not None else engine.shipped_flags(server.engine.version)
    )
    return Wanted(
        digest=digest,
        engine=engine.name,
        arch=arch,
        capabilities=capabilities,
        requirements=requirements,
        overrides=server.engine.requirements,
        flags=flags,
        cuda_home=cuda_home(here, found) if here is not None and found is not None else "",
        found=found,
    )


def digest_of(server: ModelServer, requirements: Requirements, arch: str, capabilities: tuple[str, ...]) -> str:
    """By what environments are told apart: what is in them, and the machine they are for; not where it came from."""
    what = {
        "engine": server.engine.name,
        "version": requirements.version,
        "python": requirements.python,
        "requirements": sorted(requirements.lines),
        "arch": arch,
        "capabilities": list(capabilities),
        **({"prerelease": server.engine.prerelease.value} if server.engine.prerelease is not None else {}),
    }
    canonical = json.dumps(what, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _capability(card: Card) -> str:
    if card.capability is None:
        raise NotKnown("gpu-not-known", f"nobody knows yet for which generation of GPU {card.pci} kernels have to be")
    major, minor = card.capability
    return f"{major}.{minor}"
