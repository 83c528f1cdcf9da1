"""The small port between those who decide and the world: look at hosts, perform a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from controller.core.words import Step
from controller.facts.hub import Description, NotDescribed
from controller.facts.words import Observation
from controller.spec.model import Specs


@dataclass(frozen=True, slots=True)
class Look:
    """What is asked of one host: answers of slow tools at most ``max_age`` seconds old, and the guests of interest."""

    host: str
    max_age: float = 0.0
    guests: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelAsked:
    """A model to be described: its repository on the Hub, a revision (a commit, branch or tag), and the Hub's token."""

    repo: str
    revision: str
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Order:
    """A step to perform, with what it was decided on.

    ``generation`` and ``boot_id`` are those of the facts of ``step.hosts[0]``: a host that has begun another step or
    has booted since refuses the order as stale.
    """

    step: Step
    generation: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class Done:
    """The script ran to its end (or, for a job, was started: rc is 0 then). ``out`` and ``err`` are cut to 64 KiB."""

    rc: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was started. ``message`` says by whom or what.

    ``reason``: stale | busy | lease | rights | unreachable | unable (the host cannot run units: no systemd,
    a full disk, state of a newer release; or the order did not wholly arrive).
    """

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Lost:
    """It is not known whether or how the step ended: look again. ``message`` says what happened to the connection."""

    message: str


Outcome = Done | Refused | Lost


class World(Protocol):
    """One fleet of hosts. Methods do not raise for what a host does: that is in what they return."""

    def observe(self, looks: Sequence[Look]) -> Mapping[str, Observation]:
        """Look at hosts, all at once. A host that does not answer in time has an Observation with a failure."""
        ...

    def ask(self, looks: Sequence[Look]) -> None:
        """Begin to look at hosts: for who cannot wait for the slowest one. A host is asked once at a time."""
        ...

    def hear(self, seconds: float) -> Sequence[Observation]:
        """Wait so long for an answer to ``ask``; return those that have come."""
        ...

    def use(self, specs: Specs) -> None:
        """Go on with other specs. A look that is under way goes on, or is begun anew."""
        ...

    def perform(self, order: Order) -> Outcome:
        """Start the step's script as a unit on its host and wait until it ends (a job: until it is started)."""
        ...

    def describe(self, asked: Sequence[ModelAsked]) -> Mapping[tuple[str, str], Description | NotDescribed]:
        """What the Hub says of models, all at once, by repository and revision. What was learned is kept."""
        ...

    def close(self) -> None:
        """Give back leases and close connections."""
        ...
