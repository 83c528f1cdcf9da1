"""What a check may look at: the specs, and facts that are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from controller.core.words import NotKnown
from controller.facts.words import FleetFacts, Known
from controller.spec.model import Container, Host, SecretRef, Specs, Unreadable

T = TypeVar("T")


@dataclass(frozen=True)
class View:
    """Specs and facts together, as values."""

    specs: Specs
    facts: FleetFacts

    def fact(self, host: str, section: str, kind: type[T]) -> T:
        """The named section of the host; raises NotKnown (so the layer is Unseen) when it is not known."""
        facts = self.facts.get(host)
        if facts is None:
            raise NotKnown("not-observed", f"{host} has not been observed")
        found = facts.section(section)
        if not isinstance(found, Known):
            raise NotKnown(found.reason, found.message)
        if not isinstance(found.value, kind):
            raise TypeError(f"section {section} of {host} holds {type(found.value).__name__}, not {kind.__name__}")
        return found.value

    def host(self, name: str) -> Host:
        """The spec of a host; specs are cross-checked when loaded, so it is there."""
        return self.specs.hosts[name]

    def secret(self, ref: SecretRef) -> str:
        """A secret's value; raises NotKnown (so the layer is Unseen) when it cannot be read: it is not empty then."""
        found = self.specs.secrets.get(ref.secret, Unreadable(f"nobody has read the secret {ref.secret}"))
        if isinstance(found, Unreadable):
            raise NotKnown("secret-unreadable", found.why)
        return found

    def containers_on(self, host: str) -> tuple[Container, ...]:
        """The containers that the specs want on a host, in order of id."""
        return tuple(sorted((c for c in self.specs.containers.values() if c.host == host), key=lambda c: c.id))
