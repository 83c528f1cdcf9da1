"""What engines say of a server before anything is looked at: by the lists and tables that come with this release."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from controller.engines import registry
from controller.engines.words import Engine, KnownBad, tensor_parallel
from controller.spec.model import ModelServer
from controller.spec.values import Problem, nearest


def problems(server: ModelServer, gpus: int | None) -> Iterator[Problem]:
    """What the server's engine refuses. ``gpus`` is how many it has, None when nobody can say."""
    engine = registry.engines().get(server.engine.name)
    if engine is None:
        yield Problem(
            f"cannot find an engine called {server.engine.name}",
            allowed=", ".join(registry.engines()),
            todo="correct the name, or install the plug-in",
            nearest=nearest(server.engine.name, registry.engines()),
            field=("engine", "name"),
        )
        return
    resolved = engine.resolve(server, engine.shipped_flags(server.engine.version), gpus or 1)
    for fault in resolved.faults:
        yield Problem(fault.message, todo=fault.todo, nearest=fault.nearest, field=fault.where)


def warnings(server: ModelServer, gpus: int | None) -> Iterator[Problem]:
    """What a person should know and that keeps nothing from being done."""
    engine = registry.engines().get(server.engine.name)
    if engine is None:
        return
    resolved = engine.resolve(server, engine.shipped_flags(server.engine.version), gpus or 1)
    for note in resolved.notes:
        yield Problem(note.message, todo=note.todo, field=("serve", "flags", note.flag))
    bad = known_bad(engine, server, None, gpus)
    if bad is not None:
        yield Problem(
            f"{engine.name} {server.engine.version} does not serve this model right{_split(bad)}: {bad.what}"
            f" ({_references(bad)})",
            todo="it is started all the same, as allow_known_bad says"
            if server.engine.allow_known_bad
            else f"write version: {bad.fixed} or later",
            field=("engine", "version"),
        )


def _split(bad: KnownBad) -> str:
    return f" over more than {bad.tensor_parallel_above} GPU" if bad.tensor_parallel_above else ""


def _references(bad: KnownBad) -> str:
    return ", ".join(re.findall(r"\S+#\d+", bad.source)) or bad.source


def known_bad(
    engine: Engine, server: ModelServer, architectures: tuple[str, ...] | None, gpus: int | None
) -> KnownBad | None:
    """The row that says that this combination does not work.

    ``architectures`` are those of the model's config; None as long as nobody has seen it: then its name tells.
    ``gpus`` is how many the server has, over which its layers are split unless the spec says it.
    """
    try:
        version = Version(server.engine.version)
    except InvalidVersion:
        return None
    split = tensor_parallel(server, gpus or 1)
    for row in engine.known_bad:
        if version not in SpecifierSet(row.versions, prereleases=True) or split <= row.tensor_parallel_above:
            continue
        if architectures is None:
            if row.repos.search(server.model.repo):
                return row
        elif not row.architectures or set(row.architectures) & set(architectures):
            return row
    return None
