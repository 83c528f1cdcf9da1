"""Engines by name: those of this package and those of other packages, all through entry points."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import entry_points

from controller.engines.words import Engine
from controller.spec.values import nearest

GROUP = "reconcile.engines"


class NoEngine(LookupError):  # noqa: N818 - the name says what is wrong
    """There is no engine of this name; the message says which there are."""


@functools.cache
def engines() -> Mapping[str, Engine]:
    """All engines by name. An entry point is named as the engine and leads to an object like ``words.Engine``."""
    return {point.name: point.load() for point in sorted(entry_points(group=GROUP), key=lambda p: p.name)}


def engine(name: str) -> Engine:
    """An engine by its name. Raises NoEngine."""
    found = engines().get(name)
    if found is None:
        guess = nearest(name, engines())
        known = f"did you mean {guess}?" if guess else f"there are {', '.join(engines())}"
        raise NoEngine(f"cannot find an engine called {name}; {known}")
    return found
