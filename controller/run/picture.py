"""What the loop shows to everybody who reads: the present state of everything, as one immutable value.

The loop pins a new ``Picture`` to its ``Board`` whenever something has changed; metrics, ``/status`` and the health
checks read what hangs there, from threads of their own, and never wait for the loop. Times are UNIX seconds.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from controller.core.next_steps import Next
from controller.core.suspension import Suspension
from controller.facts.words import FleetFacts
from controller.run.memory import Drifting, Kept
from controller.spec.errors import SpecError
from controller.spec.model import Specs
from controller.spec.ref import Ref


class WaitingFor(StrEnum):
    """What a layer that is not right waits for. The list is closed: it is a label of a metric."""

    PERMISSION = "permission"
    """Somebody has to agree, or ``mode: report`` says that nothing is to be done."""
    WINDOW = "window"
    """A maintenance window of what the step disrupts."""
    BACKOFF = "backoff"
    """It did not work, and is tried again later."""
    BUDGET = "budget"
    """Other disruptive steps are at work, or the last healthy server of a group would go."""
    JOB = "job"
    """A job, a step or a reboot that is at work."""
    BLOCKED = "blocked"
    """Something that only a person can change, a suspension or an open breaker among it."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A layer that is not right and is not being put right this moment. ``message`` says for what exactly it waits.

    What an earlier layer holds is not pending itself: the earlier layer is.
    """

    object: Ref
    layer: str
    waiting_for: WaitingFor
    message: str


@dataclass(frozen=True, slots=True)
class Looked:
    """How a host was last looked at: whether it answered, when it last did (None: never), how long the look took."""

    up: bool
    last_seen: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """The present state of everything.

    ``specs`` are those that are followed, last good readings of broken files among them; ``loaded`` says when they were
    last read without an error, and ``spec_errors`` what is wrong with those that are on disk now. ``upcoming`` and
    ``observed`` tell nothing before the first look at every host has ended. ``commit`` and ``dirty`` are of the git
    work tree of the specs, ``commit`` "" without one. ``notes`` are for people: an earlier memory that was kept
    aside, another controller that holds a host.
    """

    specs: Specs = field(default_factory=Specs)
    spec_errors: tuple[SpecError, ...] = ()
    loaded: float | None = None
    commit: str = ""
    dirty: bool = False
    facts: FleetFacts = field(default_factory=dict)
    hosts: Mapping[str, Looked] = field(default_factory=dict)
    observed: bool = False
    upcoming: Next = field(default_factory=lambda: Next((), (), (), (), ()))
    conditions: Mapping[Ref, tuple[Kept, ...]] = field(default_factory=dict)
    drifts: Mapping[tuple[Ref, str], Drifting] = field(default_factory=dict)
    pending: tuple[Pending, ...] = ()
    suspensions: Mapping[Ref, Suspension] = field(default_factory=dict)
    backoff: Mapping[Ref, float] = field(default_factory=dict)
    """The seconds that the last failed step of an object is left alone for; the longest, when there are several."""
    last_success: Mapping[Ref, float] = field(default_factory=dict)
    """When an object was last seen to be Ready."""
    notes: tuple[str, ...] = ()


class StepKind(NamedTuple):
    """What steps are counted by. ``cause`` is intentional or corrective, ``result`` how it ended."""

    layer: str
    action: str
    cause: str
    result: str


BUCKETS = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Upper bounds of step durations, in seconds: from an edit of a file to the build of a kernel module."""


@dataclass(frozen=True, slots=True)
class Durations:
    """How long steps of one kind took: so many up to each of ``BUCKETS`` and beyond (not cumulative), and the sum."""

    counts: tuple[int, ...] = (0,) * (len(BUCKETS) + 1)
    sum: float = 0.0

    def with_one(self, seconds: float) -> Durations:
        """These and one more."""
        at = bisect_left(BUCKETS, seconds)
        return Durations(tuple(n + (i == at) for i, n in enumerate(self.counts)), self.sum + seconds)


class Board:
    """Where the loop pins its picture and counts its steps. Safe to use from several threads; nobody waits on it.

    ``clock`` gives seconds that never go back: whether the loop moves must not depend on somebody setting the date.
    """

    def __init__(self, picture: Picture | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """An empty board; the loop counts as having moved just now."""
        self._picture = Picture() if picture is None else picture
        self._clock = clock
        self._moved = clock()
        self._last_pass: float | None = None
        self._lock = threading.Lock()
        self._steps: Counter[StepKind] = Counter()
        self._durations: dict[tuple[str, str], Durations] = {}

    @property
    def picture(self) -> Picture:
        """What hangs there now."""
        return self._picture

    def pin(self, picture: Picture) -> None:
        """Put up a new picture in place of the present one."""
        self._picture = picture

    def moved(self, at: float) -> None:
        """The loop has come round, at this date in UNIX seconds. To be called at least every ten seconds."""
        self._last_pass = at
        self._moved = self._clock()

    @property
    def last_pass(self) -> float | None:
        """When the loop last came round; None before the first time."""
        return self._last_pass

    @property
    def stands_still(self) -> float:
        """The seconds since the loop last came round."""
        return self._clock() - self._moved

    def step_ended(self, kind: StepKind, seconds: float) -> None:
        """Count a step that has ended, and how long it took."""
        key = (kind.layer, kind.action)
        with self._lock:
            self._steps[kind] += 1
            self._durations[key] = self._durations.get(key, Durations()).with_one(seconds)

    def steps(self) -> dict[StepKind, int]:
        """How many steps have ended since the controller was started."""
        with self._lock:
            return dict(self._steps)

    def durations(self) -> dict[tuple[str, str], Durations]:
        """How long they took, by layer and action."""
        with self._lock:
            return dict(self._durations)
