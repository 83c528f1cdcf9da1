"""Who made a difference between spec and facts: the person who edited the spec, or the world."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from controller.spec.model import Specs
from controller.spec.ref import Ref


class Cause(StrEnum):
    """Who changed something."""

    INTENTIONAL = "intentional"
    """The spec changed since the object was last as its spec said; or it never was."""
    CORRECTIVE = "corrective"
    """The object was as this spec says, and the world changed."""


def cause_of(ref: Ref, specs: Specs, reached: Callable[[Ref], str | None]) -> Cause:
    """Who made an object differ from its spec.

    ``reached`` gives the digest of the spec that an object was last in sync with. A change to what the object stands on
    (a host's driver version) is as intentional for it as one of its own.
    """
    below = [each for each in specs.below(ref) if each in specs]
    edited = any(reached(each) != specs.digest_of(each) for each in below)
    return Cause.INTENTIONAL if edited else Cause.CORRECTIVE
