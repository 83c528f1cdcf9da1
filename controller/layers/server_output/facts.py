"""What servers answered when they were asked last, what they were good with, and what failed.

All of it lies in ``/opt/reconcile/server/NAME/`` in the server's place:

``checks/output.json``
    The result of the canaries, tagged with what it was measured on.
``state.json``
    What outlives a restart and the controller: ``good``, the last unit that passed its checks, and ``failed``, those
    that did not. ``{"schema": 1, "good": {"unit": DIGEST, "environment": DIGEST} or null, "failed": [{"unit": DIGEST,
    "environment": DIGEST, "spec": DIGEST, "reasons": [...], "evidence": "..."}, ...]}``, the newest failure last, ten
    of them at most. Unit and environment are the digests of ``marker.json``.
``good/``
    Copies of the files that the good unit is made of, with ``good/marker.json`` the marker that they had. Nobody
    removes the environment of the good one.
``marker.json``
    The unit's own, written by whoever writes the unit. When the good one was put back in place of a failed one, it has
    one more field: ``"instead_of": DIGEST``, of the unit that failed. Whoever writes a unit anew leaves it out. A unit
    is as wanted while that is what is wanted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from controller.facts.files import File
from controller.facts.words import Section
from controller.layers.server_health.facts import by_server
from controller.layers.shared.inside import Inside, Told, read

SCHEMA = 1
"""The version of ``output.json`` and ``state.json`` that this release reads and writes."""


class Result(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: how it ended, what was said that it was judged by, and the code of what is wrong ("" for nothing)."""

    name: str
    result: Result
    evidence: str = ""
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured; None where it could not be. ``usual`` is the median speed of earlier runs of the same unit."""

    tokens_per_second: float | None = None
    first_token_seconds: float | None = None
    draft_acceptance: float | None = None
    accepted_length: float | None = None
    usual_tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """The last run of the canaries, and what it was measured on.

    ``unit`` and ``environment`` are those of ``marker.json`` then, ``process`` tells one run of the server from another
    (as in the facts of its health), ``asked`` is the digest of what was asked for. ``at`` is in Unix seconds.
    ``failures`` counts how often each check has failed for each reason, of all runs there were.
    """

    unit: str
    environment: str
    process: str
    asked: str
    checks: tuple[Check, ...]
    figures: Figures = Figures()
    at: float = 0.0
    failures: tuple[tuple[str, str, int], ...] = ()

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that found something wrong."""
        return tuple(check for check in self.checks if check.result is Result.FAILED)

    @property
    def undecided(self) -> tuple[Check, ...]:
        """The checks that could not tell."""
        return tuple(check for check in self.checks if check.result is Result.INCONCLUSIVE)


@dataclass(frozen=True, slots=True)
class Good:
    """A unit that passed its checks."""

    unit: str
    environment: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A unit that failed them. ``spec`` is the digest of what the spec meant by it (``asked`` in server_wanted.py)."""

    unit: str
    environment: str
    spec: str
    reasons: tuple[str, ...] = ()
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Judged:
    """All of it of one server. What is not there is None, or empty; ``unreadable`` says why nothing of it is known."""

    server: str
    output: Output | None = None
    good: Good | None = None
    failed: tuple[Failed, ...] = ()
    unreadable: str = ""

    def failure(self, unit: str) -> Failed | None:
        """The failure of a unit, None when it has not failed."""
        return next((each for each in reversed(self.failed) if each.unit == unit), None)


@dataclass(frozen=True, slots=True)
class OutputFacts(Inside[tuple[Judged, ...]]):
    """The servers of each place."""

    def server(self, vmid: int | None, name: str) -> Judged | None:
        """What is known of a server in a place, None when nothing of ours is there of it."""
        return next((each for each in self.of(vmid) or () if each.server == name), None)


def parse(section: Section) -> OutputFacts:
    """Read the section's text. Raises ParseError."""
    places, between = read(section.out)
    return OutputFacts(tuple((vmid, _servers(told)) for vmid, told in places.items()), between)


def _servers(told: Told) -> tuple[Judged, ...]:
    return tuple(_server(of, name) for name, of in sorted(by_server(told.files).items()))


def _server(files: Mapping[str, File], name: str) -> Judged:
    try:
        state = _read(files, "state.json", SCHEMA) or {"good": None, "failed": []}
        output = _read(files, "checks/output.json", SCHEMA)
        good = state["good"]
        return Judged(
            name,
            _output(output) if output else None,
            Good(str(good["unit"]), str(good["environment"])) if good else None,
            tuple(
                Failed(
                    str(each["unit"]),
                    str(each["environment"]),
                    str(each["spec"]),
                    tuple(map(str, each["reasons"])),
                    str(each["evidence"])[:2000],
                )
                for each in state["failed"]
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        # A container's own files: what it writes there must not keep others of the host from being seen.
        return Judged(name, unreadable=f"cannot read what {name} was judged by: {error!r}")


def _output(said: Mapping[str, Any]) -> Output:
    on, figures = said["measured_on"], said["figures"]
    return Output(
        unit=str(on["unit"]),
        environment=str(on["environment"]),
        process=str(on["process"]),
        asked=str(on["asked"]),
        checks=tuple(
            Check(
                str(each["name"]),
                Result(each["result"]),
                str(each["evidence"])[:2000],
                float(each["seconds"]),
                str(each["reason"]),
            )
            for each in said["checks"]
        ),
        figures=Figures(**{name: _figure(figures.get(name)) for name in Figures.__slots__}),
        at=float(said["at"]),
        failures=tuple(_counted(*each) for each in sorted(said.get("failures", {}).items())),
    )


def _counted(name: str, count: object) -> tuple[str, str, int]:
    check, reason = name.split(" ")
    return check, reason, int(str(count))


def _figure(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no figure")
    return float(value)


def _read(files: Mapping[str, File], name: str, schema: int) -> Mapping[str, Any] | None:
    if name not in files:
        return None
    said = json.loads(files[name].text)
    if not isinstance(said, Mapping):
        raise TypeError(f"{name} holds no object")
    if said.get("schema") != schema:
        raise ValueError(f"{name} has schema {said.get('schema')!r}, this release knows {schema}")
    return said
