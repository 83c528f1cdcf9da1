"""What was observed: known, unknown, or known only after a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


class ParseError(ValueError):
    """A probe's answer could not be understood: ``reason`` is a closed code, the text is for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class Known(Generic[T]):
    """A section that was read and understood."""

    value: T


@dataclass(frozen=True, slots=True)
class Unknown:
    """A section that could not be had. It is never read as "absent"."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Later:
    """A value in a predicted fact that is known only after a step (a device minor, a rebooted host).

    ``step`` is that step's id. What depends on such a value is provisional in a plan.
    """

    step: str


@dataclass(frozen=True, slots=True)
class Section:
    """One layer's raw answer from a host: text (bytes outside UTF-8 as surrogates), stderr, exit code."""

    rc: int
    out: str
    err: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at one host: its sections, or why there are none.

    ``at`` is when the answer came, in seconds of the controller's clock. ``failure`` is set when the host gave no
    usable answer at all (unreachable, host key changed, garbage, too long); ``sections`` is then empty.
    """

    host: str
    at: float
    sections: Mapping[str, Section] = field(default_factory=dict)
    failure: Unknown | None = None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """All that is known of one host, by section name (a layer's name, or ``world`` for units and leases).

    ``at`` and ``raw`` do not take part in comparison: two looks that saw the same are equal.
    """

    host: str
    sections: Mapping[str, Known[object] | Unknown]
    failure: Unknown | None = None
    at: float = field(default=0.0, compare=False)
    raw: Mapping[str, Section] = field(default_factory=dict, compare=False, repr=False)

    def section(self, name: str) -> Known[object] | Unknown:
        """The named section; a host that did not answer has none that is known."""
        if self.failure is not None:
            return self.failure
        return self.sections.get(name, Unknown("not-asked", f"{self.host} was not asked for {name}"))

    def with_section(self, name: str, value: object) -> HostFacts:
        """A copy in which the named section is known to be ``value``. For predictions."""
        return HostFacts(self.host, {**self.sections, name: Known(value)}, self.failure, self.at)


FleetFacts = Mapping[str, HostFacts]
