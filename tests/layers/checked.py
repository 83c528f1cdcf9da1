"""Servers in a small simulated fleet, looked after up to what they answer: for tests of health and output."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from controller.core.next_steps import Next, next_steps
from controller.core.permissions import Grants
from controller.core.plan import Plan, plan
from controller.core.view import View
from controller.facts.words import FleetFacts, HostFacts, Known
from controller.layers import server_health, server_output
from controller.layers.server_environment.facts import Environments, EnvironmentsHere
from controller.layers.server_health.facts import Health, HealthFacts
from controller.layers.server_output.facts import Judged, OutputFacts
from controller.layers.shared.truth import Environment, Process, Session
from controller.run.eyes import Eyes
from controller.run.once import Pass, Report
from tests.layers import servers
from tests.sim.controllers import Told

NAME = "qwen"
LAYERS = (*servers.LAYERS, server_health.LAYER, server_output.LAYER)


class Sight(Eyes):
    """Sees all of servers but their environments, which are as their shipped lists say."""

    def look(self, hosts: Iterable[str], max_age: float = 0.0) -> FleetFacts:
        facts = super().look(hosts, max_age)
        none = Environments(tuple((place, EnvironmentsHere()) for place in (None, 129, 130)))
        self._facts = {
            name: host if host.failure is not None else host.with_section("server.environment", none)
            for name, host in facts.items()
        }
        return self._facts


class Rig(servers.Rig):
    """A simulated fleet, and a controller that looks after servers up to what they answer."""

    def look(self) -> View:
        eyes = Sight(self.world, LAYERS, self.specs)
        eyes.look(self.specs.hosts)
        if not self.made:
            self.made = True
            for server in self.specs.servers.values():
                self._make_ready(View(self.specs, eyes.facts), server)
        self.eyes = eyes
        return View(self.specs, eyes.facts)

    def next(self) -> Next:
        return next_steps(LAYERS, self.look())

    def plan(self) -> Plan:
        view = self.look()
        return plan(LAYERS, view.specs, view.facts)

    def once(self, timeout: float = 3600.0) -> Report:
        self.look()
        grants = Grants(self.specs)
        return Pass(self.world, LAYERS, self.specs, grants, self.world.clock, Told(), timeout).run(self.eyes)

    def file(self, path: str) -> Any:
        """What a JSON file of the server holds."""
        return json.loads(self.image(129).files[f"/opt/reconcile/server/{NAME}/{path}"].text)

    @property
    def process(self) -> Process:
        """The server's process."""
        return next(each for each in self.processes(129) if each.unit == f"reconcile-{NAME}.service")

    @property
    def running(self) -> Session:
        """What runs in its container."""
        return self.session(129)

    @property
    def environment(self) -> Environment:
        """What the server's process runs from."""
        return self.image(129).environments[self.process.environment]


def seen(view: View, **changes: Any) -> View:
    """The same, with something else seen of the server's health."""
    return _changed(view, server_health.NAME, HealthFacts, Health, changes)


def judged(view: View, **changes: Any) -> View:
    """The same, with something else known of what it answered."""
    return _changed(view, server_output.NAME, OutputFacts, Judged, changes)


def _changed(view: View, section: str, kind: type[Any], one: type[Any], changes: dict[str, Any]) -> View:
    host: HostFacts = view.facts["kpro5"]
    known = host.section(section)
    assert isinstance(known, Known)
    assert isinstance(known.value, kind)
    was = known.value.server(129, NAME) or one(NAME)
    others = tuple(each for each in known.value.of(129) or () if each.server != NAME)
    now = known.value.having(129, (*others, dataclasses.replace(was, **changes)))
    return View(view.specs, {**view.facts, "kpro5": host.with_section(section, now)})
