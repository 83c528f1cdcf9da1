"""The core's vocabulary: steps, verdicts, layers. Values only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from controller.facts.words import FleetFacts, Section
from controller.spec.policy import Permission
from controller.spec.ref import Ref

if TYPE_CHECKING:
    from controller.core.view import View

Effect = Callable[[FleetFacts], FleetFacts]


@dataclass(frozen=True, slots=True)
class Disruption:
    """What a step takes from an object for a while, and the permission class that allows it."""

    object: Ref
    permission: Permission

    def __str__(self) -> str:
        return f"{self.permission}:{self.object}"


@dataclass(frozen=True, slots=True)
class Script:
    """A POSIX sh script of the package: where it lies (for people and audits) and its text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    """An action at work, as data.

    The script runs on ``hosts[0]``; the other hosts are touched by it too (a migration's target), and facts of all
    of them are looked at afresh afterwards. ``timeout`` is in seconds. ``job`` names a long step that goes on beside
    others; None is short work, one at a time on a host. ``stdin`` is data for the script, never shown. ``effect``
    says what a plan expects of the step and is applied to a copy of the facts only.
    """

    action: str
    object: Ref
    layer: str
    reason: str
    summary: str
    hosts: tuple[str, ...]
    script: Script
    args: tuple[str, ...] = ()
    stdin: bytes = field(default=b"", repr=False)
    disrupts: tuple[Disruption, ...] = ()
    timeout: float = 120.0
    job: str | None = None
    provisional: bool = False
    independent: bool = False  # does not rest on the layers below (stopping a container)
    diff: str = ""  # what it changes in a file, for people
    effect: Effect = field(default=lambda facts: facts, repr=False, compare=False)

    @property
    def id(self) -> str:
        """Stable while the step is the same thing to do to the same state."""
        what = "\0".join((self.action, str(self.object), self.layer, *self.hosts, *self.args))
        digest = hashlib.sha256(what.encode("utf-8", "surrogateescape") + b"\0" + self.stdin).hexdigest()
        return f"{self.action}-{self.object.name}-{digest[:8]}"


@dataclass(frozen=True, slots=True)
class Block:
    """Why a drift cannot be put right now, and what would have to change (``needs``).

    ``holds`` says whether what comes after it has to wait; a shortcoming that is only told holds up nothing.
    """

    reason: str
    message: str
    needs: str
    holds: bool = True


@dataclass(frozen=True, slots=True)
class Wait:
    """A drift that is being put right already: a job at work, a reboot under way. It ends on one of ``hosts``."""

    what: str  # job | reboot
    message: str
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InSync:
    """The layer is as wanted; ``note`` says what is worth knowing all the same."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Drift:
    """A layer's difference between spec and facts, and what can be done about it."""

    reason: str
    message: str
    remedy: Step | Block | Wait
    evidence: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unseen:
    """The layer could not be judged; nothing that could hurt follows from it."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """The layer does not concern this object (no GPUs, another platform, a host that is gone as wanted)."""

    why: str = ""


Verdict = InSync | Drift | Unseen | Skipped


class NotKnown(Exception):  # noqa: N818 - it is no error, it is how "unknown" travels out of a check
    """Raised by ``View`` when a check asks for a fact that is not known; becomes ``Unseen``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Gate(StrEnum):
    """What of a host's containers and servers waits while one of the host's layers has drifted."""

    ALL = "all"
    GPUS = "gpus"  # what uses GPUs
    NOTHING = "nothing"  # the layer only reports


@dataclass(frozen=True)
class Layer:
    """One thing that has to be true, in dependency order.

    ``kind`` is whose it is: Host, Container or ModelServer. ``probe`` is the sh fragment whose output ``parse`` turns
    into the layer's facts (raises ParseError). ``check`` compares spec and facts. ``platforms`` says on which hosts
    the fragment is asked. ``gates`` says what waits while this layer of a host has drifted; while it is unknown,
    everything on the host does.
    """

    name: str
    kind: str
    reasons: type[StrEnum]
    check: Callable[[View, Any], Verdict]
    probe: str = ""
    parse: Callable[[Section], object] | None = None
    platforms: frozenset[str] = frozenset({"proxmox", "linux"})
    gates: Gate = Gate.GPUS
