"""A host whose weights are looked at and fetched for real, from the tests' own Hub."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from controller.core.view import View
from controller.core.words import Drift, Step, Verdict
from controller.facts.hub import SECTION, HubFacts
from controller.facts.units import UnitFacts
from controller.facts.words import HostFacts, Known
from controller.layers import server_weights
from controller.layers.access.facts import AccessFacts
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.power.facts import PowerFacts
from controller.layers.server_environment.facts import Environments, EnvironmentsHere
from controller.layers.server_weights.facts import AllWeights, Weights, parse
from controller.spec.load import load
from controller.spec.model import Specs
from tests.hub.server import COMMIT, Hub, Repo, content
from tests.layers.inside import Ground

REPO = "org/tiny"
SHARDS = tuple(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))
SHARD = 3 << 20


def model() -> Repo:
    """A model of three shards and some small files."""
    return Repo(
        {
            "config.json": b'{"architectures": ["Qwen3ForCausalLM"]}',
            "tokenizer.json": content("tokenizer", 20_000),
            "empty.txt": b"",
            "sub/vocab.txt": b"a\nb\n",
            **{name: content(name, SHARD) for name in SHARDS},
        }
    )


@dataclass
class Box:
    """A plain host with one server. ``models`` is where its models lie, ``stalled_after`` is in seconds."""

    ground: Ground
    hub: Hub
    stalled_after: int = 20
    token: str = ""
    models: Path | None = None

    @property
    def under(self) -> Path:
        return self.models or self.ground.root / "models"

    @property
    def specs(self) -> Specs:
        token = ", token: {secret: hf}" if self.token else ""
        text = f"""\
kind: Fleet
policy: {{mode: enforce}}
secrets: {{hf: {{from_env: NOWHERE}}}}
---
kind: Host
name: box1
address: 192.0.2.1
platform: linux
---
kind: ModelServer
name: served
host: box1
model:
  {{repo: {REPO}, revision: {COMMIT}, directory: "{self.under}", stalled_after: {self.stalled_after}s{token}}}
engine: {{name: transformers, version: 5.24.0}}
serve: {{port: 8000}}
"""
        loaded = load({"specs.yaml": text.encode()})
        return Specs(loaded.fleet, loaded.hosts, loaded.containers, loaded.servers, loaded.places, {"hf": self.token})

    @property
    def directory(self) -> Path:
        """Where the model lies."""
        return self.under / REPO.replace("/", "--") / COMMIT

    def with_hub_ways(self) -> None:
        """Let the server's environment have huggingface_hub, as engines' environments do."""
        (python,) = {step.args[3] for step in (self.step(),)}
        wrapper = self.ground.path(python)
        wrapper.parent.mkdir(parents=True)
        wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        wrapper.chmod(0o755)

    def look(self, *, hub: HubFacts | None = None) -> View:
        sections = {
            "host.access": AccessFacts(0, "box1", "6.8.12", "x86_64", (), None),
            "host.gpu-health": GpuFacts((), None, (), (), (), ()),
            "container.power": PowerFacts(()),
            "world": UnitFacts(1, "0" * 36),
            "server.environment": Environments(((None, EnvironmentsHere()),)),
            "server.weights": parse(self.ground.ask(server_weights.LAYER.probe)),
            SECTION: hub or HubFacts({(REPO, COMMIT): self.hub.describe(REPO)}),
        }
        return View(self.specs, {"box1": HostFacts("box1", {name: Known(each) for name, each in sections.items()})})

    def check(self) -> Verdict:
        view = self.look()
        return server_weights.check(view, view.specs.servers["served"])

    def drift(self) -> Drift:
        found = self.check()
        assert isinstance(found, Drift), found
        return found

    def step(self) -> Step:
        found = self.drift().remedy
        assert isinstance(found, Step), found
        return found

    @property
    def here(self) -> Weights:
        found = self.look().fact("box1", "server.weights", AllWeights).of(None)
        assert found is not None
        (weights,) = found.weights
        return weights

    def is_whole(self) -> bool:
        """Whether every file is there, byte for byte, and nothing else."""
        there = {
            str(path.relative_to(self.directory)): path.read_bytes()
            for path in self.directory.rglob("*")
            if path.is_file()
        }
        return there == self.hub.repos[REPO].files

    def bytes_there(self) -> int:
        return sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file())


def wait(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Until it is so."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it has not come about in time"
        time.sleep(0.02)


def kill(running: subprocess.Popen[bytes], root: Path) -> None:
    """Kill all of a unit, and wait until what it ran inside is gone too."""
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    wait(lambda: not at_work(root))


def at_work(root: Path) -> list[str]:
    """The command lines of what works in a test's tree."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            said = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{root}/" in said:
            found.append(said)
    return found
