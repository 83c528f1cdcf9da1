"""What runs beside a server (``checks/``): its program as one file, its settings, its unit.

The program needs nothing but Python's standard library. It is brought to the server's place as a zip file, which Python
runs as it is, and is run by the Python of the server's own environment.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller.core.package import text
from controller.engines.words import Engine
from controller.facts.words import FleetFacts, Later
from controller.layers.server_process.facts import Process, ProcessesHere, ProcessFacts, ServerProcess
from controller.layers.server_unit.facts import Arguments, folder
from controller.layers.shared import inside
from controller.layers.shared.inside import UNITS, Place
from controller.layers.shared.server_wanted import digest
from controller.spec.model import ModelServer, Range

SCHEMA = 1
VERSION = 1
"""Raised when watches that older releases have installed have to be installed anew. Else they are left as they are."""
MODULES = ("asking", "canaries", "files", "good", "judging", "main", "output", "place", "watch")
SEVERAL = ("0.0.0.0", "::", "*")  # noqa: S104 - addresses to listen on, not to be asked at
LOOP = 3
"""Ends within an hour that nobody asked for, after which a server that is not up again is in a loop."""
ANSWER_SECONDS = 120
"""How long one answer to a short question may take."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What a watch is installed from. ``digest`` is that of its meaning, as its marker holds it."""

    settings: bytes
    unit: str
    python: str
    digest: str
    asked: str


@functools.cache
def program() -> bytes:
    """The program: the same bytes every time."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        files = {f"checks/{name}.py": text("controller.layers.shared", f"checks/{name}.py") for name in MODULES}
        main = "import sys\n\nfrom checks.main import main\n\nsys.exit(main())\n"
        for name, content in {"__main__.py": main, "checks/__init__.py": "", **files}.items():
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content)
    return made.getvalue()


def unit_path(name: str) -> str:
    """The file of the watch's unit in the server's place."""
    return f"{UNITS}/reconcile-{name}-watch.service"


def watch(server: ModelServer, arguments: Arguments, engine: Engine) -> Watch:
    """The watch of a server whose unit means ``arguments``."""
    canaries = _canaries(server, engine)
    metrics = engine.metrics(arguments.version)
    settings = {
        "schema": SCHEMA,
        "unit": f"reconcile-{server.name}.service",
        "host": _reached(arguments.address),
        "port": arguments.port,
        "model": engine.model_id(server, arguments.model_dir),
        # transformers serve lists what lies in a cache, or fails at it (run with 5.6.0); it refuses other models itself
        "lists_model": arguments.engine != "transformers",
        "key": server.serve.api_key is not None,
        "http": {"live": engine.http.live, "models": engine.http.models, "metrics": engine.http.metrics},
        "metrics": {name: getattr(metrics, name) for name in type(metrics).__dataclass_fields__},
        "canaries": {**canaries, "asked": asked(server, engine)},
    }
    python = f"{arguments.env_dir}/bin/python"
    unit = _unit(server.name, python)
    return Watch(
        (json.dumps(settings, indent=1, sort_keys=True) + "\n").encode(),
        unit,
        python,
        digest({"settings": settings, "unit": unit, "version": VERSION}),
        str(settings["canaries"]["asked"]),  # type: ignore[index]
    )


def asked(server: ModelServer, engine: Engine) -> str:
    """The digest of what a server is asked by its canaries, and of the bounds that it is judged against."""
    return digest(_canaries(server, engine))


def started_anew(facts: FleetFacts, place: Place, name: str, step: str) -> FleetFacts:
    """The facts after a step that starts a server anew."""

    def changed(here: ProcessesHere | None) -> ProcessesHere:
        known = here or ProcessesHere()
        was = known.of(name) or ServerProcess(name)
        main = dataclasses.replace(was.main, started=Later(step)) if was.main else Process(0, Later(step))
        now = dataclasses.replace(was, main=main, down=False, ends=())
        return dataclasses.replace(known, servers=(*(each for each in known.servers if each.name != name), now))

    return inside.after(facts, place, "server.process", ProcessFacts, changed)


def _canaries(server: ModelServer, engine: Engine) -> Mapping[str, Any]:
    checks = server.checks
    return {
        "checks": sorted(each.value for each in checks.output),
        # A template that knows no thinking takes no notice; a server that does not take it is asked without.
        "plainly": {"chat_template_kwargs": {"enable_thinking": False}},
        "timeout": ANSWER_SECONDS,
        "needle": checks.min_context * 3 // 4 if checks.min_context else 0,
        "tokens_per_second": _bounds(checks.tokens_per_second),
        "draft_acceptance": _bounds(checks.draft_acceptance),
    }


def _bounds(bounds: Range | None) -> list[float | None]:
    return [bounds.at_least, bounds.at_most] if bounds else [None, None]


def _reached(address: str) -> str:
    """Where a server that listens there is asked from the same machine."""
    if address in SEVERAL:
        return "::1" if address == "::" else "127.0.0.1"
    return address


def _unit(name: str, python: str) -> str:
    """It starts with the server and ends itself when that is stopped on purpose; a crash of the server it outlives."""
    here = folder(name)
    return "\n".join(
        (
            "# Written by reconcile.",
            "[Unit]",
            f"Description=reconcile: watch of {name}",
            f"After=reconcile-{name}.service",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            f"ExecStart={python} -I {here}/checks.pyz watch {here}",
            "Restart=on-failure",
            "RestartSec=15",
            "Nice=5",
            "",
            "[Install]",
            f"WantedBy=reconcile-{name}.service",
            "",
        )
    )
