"""The command line on the demo's simulated fleet, in a directory of the test's own."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from controller.cli import main
from controller.report import model

DEMO = Path(__file__).parents[2] / "specs/demo"


@dataclass(frozen=True)
class Ran:
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str

    def json(self, schema: str) -> Any:
        """All of stdout, which is JSON after that schema."""
        printed = json.loads(self.out)
        jsonschema.validate(printed, model.PRINTED[schema].model_json_schema(mode="serialization"))
        return printed


class Shell:
    """Somebody's shell: a working directory with ``specs`` and a fleet, and an environment."""

    def __init__(self, place: Path) -> None:
        self.place = place
        shutil.copytree(DEMO, place / "specs")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SSH_", "RECONCILE_", "NO_COLOR", "XDG_"))}
        self.env: dict[str, str | None] = dict.fromkeys(set(os.environ) - set(kept))
        self.env |= {"HOME": str(place), "RECONCILE_STATE": str(place / "state"), "COLUMNS": "80"}

    def command(self, *args: str, sim: bool = True) -> list[str]:
        fleet = ["--fleet", "sim:specs/fleet.sim.yaml"] if sim else []
        """The command line, for a process of its own."""
        return [sys.executable, "-m", "controller", *fleet, *args]

    def run(self, *args: str, sim: bool = True) -> Ran:
        """Run a command to its end, in this process. An exception that nobody turned into a message is a defect."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            done = CliRunner(env=self.env).invoke(main, self.command(*args, sim=sim)[3:], prog_name="reconcile")
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
        return Ran(done.exit_code, done.stdout, done.stderr)

    @property
    def process_env(self) -> dict[str, str]:
        """The environment of a process of its own."""
        return {name: value for name, value in {**os.environ, **self.env}.items() if value is not None}


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path)
