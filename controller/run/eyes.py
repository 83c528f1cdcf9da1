"""Looking at hosts and remembering what was seen, so that what did not change is not parsed again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from controller.core import observe
from controller.core.words import Layer
from controller.facts.words import FleetFacts, HostFacts
from controller.spec.model import Specs
from controller.world.port import Look, World


class Eyes:
    """The facts of a fleet, as fresh as the last look."""

    def __init__(self, world: World, layers: Sequence[Layer], specs: Specs) -> None:
        self._world = world
        self._parsers = observe.parsers(layers)
        self._specs = specs
        self._facts: dict[str, HostFacts] = {}

    @property
    def facts(self) -> FleetFacts:
        """What is known now. A new mapping after each look; the old one stays as it was."""
        return self._facts

    def look(self, hosts: Iterable[str], max_age: float = 0.0) -> FleetFacts:
        """Look at these hosts at once. ``max_age`` in seconds is what slow tools may answer from memory."""
        guests = tuple(sorted({c.id for c in self._specs.containers.values()}))
        looks = [
            Look(name, max_age, guests if self._specs.hosts[name].platform == "proxmox" else ())
            for name in dict.fromkeys(hosts)
            if name in self._specs.hosts
        ]
        seen = self._world.observe(looks)
        self._facts = {
            **self._facts,
            **{name: observe.read(self._parsers, one, self._facts.get(name)) for name, one in seen.items()},
        }
        return self._facts
