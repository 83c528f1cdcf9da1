"""Lists of options that come with this release, so that a spec is checked before anything is installed.

They are read out of the engines' wheels by ``scripts/engine-flags``, with the program that reads them out of an
installed engine: ``programs/read_flags.py``. The list of an installed engine counts before the shipped one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib.resources import files

from controller.core.package import text
from controller.engines.flags import FlagList, read_list

READER = text("controller.engines", "programs/read_flags.py")
"""A program for any Python 3.10 or newer, standard library only: ``python - ENGINE DIRECTORY`` prints the list of the
engine that lies in this directory (a ``site-packages``) as JSON, without importing it."""


@functools.cache
def flags(engine: str, version: str) -> FlagList | None:
    """The list of a version, None when this release has none."""
    file = files("controller.engines").joinpath("data", f"{engine}-{version}.json")
    return read_list(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


@functools.cache
def names() -> Mapping[tuple[str, str], FlagList]:
    """All lists, by engine and version."""
    found = {}
    for file in files("controller.engines").joinpath("data").iterdir():
        if file.name.endswith(".json"):
            listed = read_list(json.loads(file.read_text(encoding="utf-8")))
            found[listed.engine, listed.version] = listed
    return found
