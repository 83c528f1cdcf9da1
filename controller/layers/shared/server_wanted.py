"""What a server is asked to be, as a digest: what its spec says of how it serves, on which cards, in which environment.

Compared by what was asked and not by what was made of it, so that a new release, which may write other arguments for
the same spec, changes nothing that was as wanted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from controller.engines import registry
from controller.spec.model import ModelServer

ASKED = ("model", "engine", "serve", "gpus")
"""The fields of a ModelServer that its running process depends on."""


def asked(server: ModelServer, gpus: Sequence[str], environment: str) -> str:
    """The digest of what is asked: ``gpus`` are UUIDs, ``environment`` is the environment's digest. 64 hex digits."""
    spec = server.model_dump(mode="json", exclude_defaults=True, include=set(ASKED))
    if isinstance(model := spec.get("model"), dict):
        for way in ("token", "stalled_after"):
            model.pop(way, None)  # how it is fetched changes nothing of what runs
    if isinstance(engine := spec.get("engine"), dict):
        for way in ("allow_known_bad", "index_url", "wheels"):
            engine.pop(way, None)
    budget = server.checks.startup_budget.total_seconds()
    return digest({"spec": spec, "gpus": list(gpus), "environment": environment, "startup": budget})


def is_managed(server: ModelServer) -> bool:
    """Whether the server is installed and started by us; one of an engine that nobody knows is to be."""
    found = registry.engines().get(server.engine.name)
    return found is None or found.manages


def digest(what: object) -> str:
    """The digest of plain values: 64 hex digits."""
    canonical = json.dumps(what, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
