"""Servers in a small simulated fleet that begin with nothing: no environment, no weights, no unit."""

from __future__ import annotations

import json
from collections.abc import Mapping

from controller.core.next_steps import Next, next_steps
from controller.core.permissions import Grants
from controller.core.plan import Plan, plan
from controller.core.view import View
from controller.core.words import Drift, Step, Verdict
from controller.layers.order import ORDER
from controller.layers.shared.truth import Fleet, Host, Image, Model, WeightFile
from controller.run.eyes import Eyes
from controller.run.once import Pass, Report
from controller.spec.ref import Ref
from controller.world.port import Done, Order
from controller.world.sim import SimWorld
from tests.layers.servers import COMMIT, FLEET, document, specs
from tests.sim.controllers import Told
from tests.sim.fleets import fleet

GB = 10**9
CONFIG = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {
        "num_hidden_layers": 64,
        "full_attention_interval": 4,
        "hidden_size": 5120,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "max_position_embeddings": 262144,
        "vocab_size": 248320,
        "dtype": "bfloat16",
    },
}


def qwen() -> Model:
    """The story's model, on the Hub: 54 GB in eleven shards."""
    shards = {f"model-{n:05}-of-00011.safetensors": WeightFile(5 * GB, 5 * GB) for n in range(1, 12)}
    return Model("Qwen/Qwen3.6-27B", COMMIT, shards, {"config.json": json.dumps(CONFIG)})


def small() -> Model:
    """One of 5 GB, of the same shape, that fits any card."""
    weights = {"model.safetensors": WeightFile(5 * GB, 5 * GB)}
    return Model("a/small", COMMIT, weights, {"config.json": json.dumps(CONFIG)})


SMALL = f"{{repo: a/small, revision: {COMMIT}, directory: /models}}"
TWO = (
    document("one", gpus="[0]", model=SMALL),
    document("two", gpus="[1]", model=SMALL, serve="{port: 30001}"),
)
"""Two servers of the same in one container, with a card each."""


class Rig:
    """A simulated fleet, and a controller that knows every layer."""

    def __init__(self, *documents: str, secrets: Mapping[str, str] | None = None) -> None:
        self.fleet: Fleet = fleet(FLEET)
        self.fleet.hub[f"Qwen/Qwen3.6-27B@{COMMIT}"] = qwen()
        self.fleet.hub[f"a/small@{COMMIT}"] = small()
        self.secrets = dict(secrets or {})
        self.want(*documents)
        self.world = SimWorld(self.fleet, "one", "one", checked=True)

    def want(self, *documents: str) -> None:
        """Other servers are wanted now."""
        self.specs = specs(*documents, secrets=self.secrets)

    @property
    def kpro5(self) -> Host:
        return self.fleet.hosts["kpro5"]

    def image(self, place: int | None) -> Image:
        """What lies in a container's image, or on the plain host."""
        if place is None:
            return self.fleet.hosts["box1"].image
        return self.fleet.images.setdefault(f"rbd:vm-{place}-disk-0", Image())

    def look(self) -> View:
        """Look at all hosts."""
        self.eyes = Eyes(self.world, ORDER, self.specs)
        self.eyes.look(self.specs.hosts)
        return View(self.specs, self.eyes.facts)

    def next(self) -> Next:
        return next_steps(ORDER, self.look())

    def verdict(self, layer: str, name: str = "qwen") -> Verdict:
        found = self.next().verdict(Ref("ModelServer", name), layer)
        assert found is not None
        return found

    def drift(self, layer: str, name: str = "qwen") -> Drift:
        found = self.verdict(layer, name)
        assert isinstance(found, Drift), found
        return found

    def step(self, layer: str, name: str = "qwen") -> Step:
        found = self.drift(layer, name).remedy
        assert isinstance(found, Step), found
        return found

    def perform(self, step: Step) -> None:
        """Do a step, whatever was decided, and let it end."""
        host = self.fleet.hosts[step.hosts[0]]
        done = self.world.perform(Order(step, host.generation, host.boot_id))
        assert isinstance(done, Done), done
        self.world.clock.wait(7200.0)

    def plan(self) -> Plan:
        view = self.look()
        return plan(ORDER, view.specs, view.facts)

    def once(self, timeout: float = 7200.0) -> Report:
        """One pass, as ``--once`` makes it."""
        self.look()
        grants = Grants(self.specs)
        return Pass(self.world, ORDER, self.specs, grants, self.world.clock, Told(), timeout).run(self.eyes)

    def actions(self) -> list[str]:
        """What one pass does, each step by its action; it has to end with everything in order."""
        report = self.once()
        wrong = [j.verdict.message for j in report.upcoming.judged if isinstance(j.verdict, Drift)]
        assert report.upcoming.in_sync, (wrong, [(each.step.action, each.message) for each in report.ended])
        return [each.step.action for each in report.ended]
