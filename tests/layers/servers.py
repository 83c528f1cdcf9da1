"""Servers in a small simulated fleet: a container with two cards and a plain host with one, all that they need there.

What stands in for the layers before and after is laid down by hand: an environment and weights that are ready.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping

from controller.core.next_steps import Next, next_steps
from controller.core.permissions import Grants
from controller.core.plan import Plan, plan
from controller.core.view import View
from controller.core.words import Drift, Step, Verdict
from controller.facts.words import FleetFacts
from controller.layers import server_placement, server_process, server_unit
from controller.layers.order import ORDER
from controller.layers.server_environment.facts import Environments, EnvironmentsHere
from controller.layers.server_health.facts import HealthFacts
from controller.layers.shared import environments
from controller.layers.shared.truth import Environment, Fleet, Host, Image, Model, Process, Session, WeightFile
from controller.run.eyes import Eyes
from controller.run.once import Pass, Report
from controller.spec.load import load
from controller.spec.model import ModelServer, Specs
from controller.spec.ref import Ref
from controller.world.port import Done, Order
from controller.world.sim import SimWorld
from tests.sim.controllers import Told
from tests.sim.fleets import fleet

MINE = (server_placement.LAYER, server_unit.LAYER, server_process.LAYER)
LAYERS = (*(layer for layer in ORDER if layer.kind != "ModelServer"), *MINE)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = (
    "hostname: llm\ndev0: /dev/nvidia0\ndev1: /dev/nvidia1\ndev2: /dev/nvidiactl\ndev3: /dev/nvidia-uvm\nonboot: 1\n"
)
FLEET = f"""\
hosts:
  kpro5:
    address: 10.1.2.5
    cluster: lab
    nvidia: {{version: 580.126.09}}
    persistenced: true
    files: {{/etc/modules-load.d/nvidia.conf: "nvidia\\nnvidia-uvm\\n"}}
    cards:
      - {{pci: "4f:00.0", model: RTX A6000, driver: nvidia, iommu_group: 41}}
      - {{pci: "ce:00.0", model: RTX A6000, driver: nvidia, iommu_group: 67}}
    lxc:
      129: {{running: true, config: {json.dumps(CONFIG + "rootfs: rbd:vm-129-disk-0,size=200G" + chr(10))}}}
      130: {{running: true, config: "hostname: other\\nonboot: 1\\nrootfs: rbd:vm-130-disk-0,size=200G\\n"}}
  box1:
    address: 10.1.2.9
    platform: linux
    nvidia: {{version: 580.126.09}}
    persistenced: true
    files: {{/etc/modules-load.d/nvidia.conf: "nvidia\\nnvidia-uvm\\n"}}
    cards:
      - {{pci: "01:00.0", model: RTX A6000, driver: nvidia, iommu_group: 11}}
userlands: {{"rbd:vm-129-disk-0": 580.126.09}}
"""
PLACES = """\
kind: Fleet
policy: {mode: enforce, allow: [restart-server, restart-container, edit-container-config, change-driver]}
secrets: {key: {from_env: TEST_KEY}}
---
kind: Host
name: kpro5
address: 10.1.2.5
platform: proxmox
nvidia:
  gpus:
    - {pci: "4f:00.0", model: RTX A6000, owner: containers}
    - {pci: "ce:00.0", model: RTX A6000, owner: containers}
---
kind: Host
name: box1
address: 10.1.2.9
platform: linux
nvidia: {gpus: [{pci: "01:00.0", model: RTX A6000, owner: host}]}
---
kind: Container
name: ct129
id: 129
host: kpro5
gpus: {count: 2}
---
kind: Container
name: ct130
id: 130
host: kpro5
"""


def document(name: str = "qwen", place: str = "container: ct129", **more: str) -> str:
    """A ModelServer; ``more`` are lines of its spec by key, in YAML."""
    lines = {
        "model": f"{{repo: Qwen/Qwen3.6-27B, revision: {COMMIT}, directory: /models}}",
        "engine": "{name: sglang, version: 0.5.11}",
        "serve": "{port: 30000, flags: {context-length: 262144, tool-call-parser: qwen3_coder}}",
        **more,
    }
    return f"---\nkind: ModelServer\nname: {name}\n{place}\n" + "".join(f"{k}: {v}\n" for k, v in lines.items())


def specs(*documents: str, secrets: Mapping[str, str] | None = None) -> Specs:
    """The specs of that fleet with these servers."""
    loaded = load({"specs.yaml": (PLACES + "".join(documents or (document(),))).encode()})
    return dataclasses.replace(loaded, secrets=dict(secrets or {}))


class Sight(Eyes):
    """Sees servers as far as these three layers do, and no environment anywhere: what its engine takes is shipped."""

    health: Mapping[str, HealthFacts]

    def look(self, hosts: Iterable[str], max_age: float = 0.0) -> FleetFacts:
        facts = super().look(hosts, max_age)
        none = Environments(tuple((place, EnvironmentsHere()) for place in (None, 129, 130)))
        self._facts = {
            name: host.with_section("server.environment", none).with_section(
                "server.health", self.health.get(name, HealthFacts())
            )
            if host.failure is None
            else host
            for name, host in facts.items()
        }
        return self._facts


class Rig:
    """A simulated fleet, and a controller that knows these three layers of servers only."""

    def __init__(self, *documents: str, secrets: Mapping[str, str] | None = None) -> None:
        self.fleet: Fleet = fleet(FLEET)
        self.secrets = dict(secrets or {})
        self.health: Mapping[str, HealthFacts] = {}
        self.want(*documents)
        self.world = SimWorld(self.fleet, "one", "one", checked=True)

    def want(self, *documents: str) -> None:
        """Other servers are wanted now; environments and weights for them are made ready."""
        self.specs = specs(*documents, secrets=self.secrets)
        self.made = False

    @property
    def kpro5(self) -> Host:
        return self.fleet.hosts["kpro5"]

    def image(self, place: int | None) -> Image:
        """What lies in a container's image, or on the plain host."""
        if place is None:
            return self.fleet.hosts["box1"].image
        return self.fleet.images.setdefault(f"rbd:vm-{place}-disk-0", Image())

    def session(self, place: int | None) -> Session:
        """What runs there."""
        return self.fleet.hosts["box1"].session if place is None else self.kpro5.containers[place].session

    def processes(self, place: int | None) -> list[Process]:
        """What runs there."""
        return self.session(place).processes

    def look(self) -> View:
        """Look at all hosts; environments and weights that servers want are there, as if other layers had made them."""
        eyes = Sight(self.world, ORDER, self.specs)
        eyes.health = self.health
        eyes.look(self.specs.hosts)
        if not self.made:
            self.made = True
            for server in self.specs.servers.values():
                self._make_ready(View(self.specs, eyes.facts), server)
        self.eyes = eyes
        return View(self.specs, eyes.facts)

    def _make_ready(self, view: View, server: ModelServer) -> None:
        image = self.image(self.specs.containers[server.container].id if server.container else None)
        wanted = environments.wanted(view, server)
        flags = list(wanted.flags.names) if wanted.flags is not None else []
        image.environments[wanted.directory] = Environment(
            wanted.engine, server.engine.version, capabilities=list(wanted.capabilities), flags=flags
        )
        directory = f"/models/{server.model.repo.replace('/', '--')}/{server.model.revision}"
        files = {"model.safetensors": WeightFile(10, 10)}
        image.models[directory] = Model(server.model.repo, server.model.revision, files)
        for host in self.fleet.hosts.values():
            self.fleet.touch(host)

    def next(self) -> Next:
        """What follows from what is seen."""
        return next_steps(LAYERS, self.look())

    def verdict(self, layer: str, name: str = "qwen") -> Verdict:
        """The verdict on a layer of a server."""
        found = self.next().verdict(Ref("ModelServer", name), layer)
        assert found is not None
        return found

    def drift(self, layer: str, name: str = "qwen") -> Drift:
        """The drift of a layer that has drifted."""
        found = self.verdict(layer, name)
        assert isinstance(found, Drift), found
        return found

    def step(self, layer: str, name: str = "qwen") -> Step:
        """The step that a drifted layer asks for."""
        found = self.drift(layer, name).remedy
        assert isinstance(found, Step), found
        return found

    def perform(self, step: Step) -> Done:
        """Do a step, whatever was decided."""
        host = self.fleet.hosts[step.hosts[0]]
        done = self.world.perform(Order(step, host.generation, host.boot_id))
        assert isinstance(done, Done), done
        return done

    def plan(self) -> Plan:
        """What is foretold."""
        view = self.look()
        return plan(LAYERS, view.specs, view.facts)

    def once(self) -> Report:
        """One pass, as ``--once`` makes it."""
        self.look()
        grants = Grants(self.specs)
        return Pass(self.world, LAYERS, self.specs, grants, self.world.clock, Told(), 600.0).run(self.eyes)

    def actions(self) -> list[str]:
        """What one pass does, each step by its action; it has to end with everything in order."""
        report = self.once()
        assert report.upcoming.in_sync, [j for j in report.upcoming.judged if isinstance(j.verdict, Drift)]
        assert all(each.result == "worked" for each in report.ended), report.ended
        return [each.step.action for each in report.ended]
