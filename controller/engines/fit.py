"""Whether a model fits, as a sum that a person can check line by line. What each engine does with it is in its module.

All bytes are those of one GPU, the smallest that the server has: tensor parallel engines give each the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from controller.engines.shape import NotForetold, Shape

__all__ = ["Fit", "Line", "Model", "NotForetold", "Outcome", "Problem", "gib", "undivided"]

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Model:
    """A model: its shape, and the bytes of all its tensors."""

    shape: Shape
    weight_bytes: int


class Outcome(StrEnum):
    """What would become of a start."""

    FITS = "fits"
    SHORT = "short"
    """It starts, and cannot hold one request of the longest context."""
    DOUBTFUL = "doubtful"
    """By this sum it would not start, by less than the sum may be wrong."""
    REFUSES = "refuses"
    """It would not start."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the sum: what, how it comes about, and bytes (what is taken away is negative; None: no bytes)."""

    what: str
    how: str
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """Why it would not start, or what else is wrong, and what to do."""

    code: str
    message: str
    todo: str


@dataclass(frozen=True, slots=True)
class Fit:
    """The sum and what follows.

    ``pool_tokens`` is how many tokens the KV cache holds in all, None where the engine has no such pool.
    ``context`` is the longest context that was asked for, ``requests`` how many run at once at most (None: not
    limited, or not known), ``at_once`` how many of them can have ``context`` tokens each. ``kv_how`` and ``state_how``
    say how the bytes of a token and of a request come about.
    """

    outcome: Outcome
    split: int
    gpus: tuple[int, ...]
    weights: int
    kv_token: int
    state_request: int
    context: int
    pool_tokens: int | None = None
    requests: int | None = None
    lines: tuple[Line, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = field(default=())
    kv_how: str = ""
    state_how: str = ""

    @property
    def at_once(self) -> float | None:
        """How many requests of the longest context the KV cache holds."""
        return None if self.pool_tokens is None or not self.context else self.pool_tokens / self.context

    @property
    def tokens(self) -> int | None:
        """How many tokens one request can have."""
        return None if self.pool_tokens is None else min(self.pool_tokens, self.context or self.pool_tokens)


def gib(size: float) -> str:
    """Bytes in GiB, for people."""
    return f"{size / GIB:,.2f} GiB"


def undivided(shape: Shape, split: int, gpus: int) -> tuple[Problem, ...]:
    """The problem of heads that do not divide over the GPUs, if they do not."""
    wrong = shape.undivided(split)
    if not wrong:
        return ()
    possible = ", ".join(map(str, shape.splits(max(gpus, split))))
    return (
        Problem(
            "heads-not-divisible",
            f"{' and '.join(wrong)} do not divide over {split} GPUs",
            f"write serve.tensor_parallel: one of {possible}, or assign as many GPUs",
        ),
    )
