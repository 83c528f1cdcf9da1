"""Why a server would not start with its model, flags and GPUs."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The closed list of reasons of ``server.fit``."""

    UNKNOWN_ENGINE = "unknown-engine"
    """There is no plug-in of that name."""
    NO_GPU = "no-gpu"
    """The GPUs that the server asks for are not those that its place has."""
    KNOWN_BAD = "known-bad"
    """This version of the engine is known not to serve such a model right."""
    HEADS_NOT_DIVISIBLE = "heads-not-divisible"
    """The model's heads do not divide over as many GPUs."""
    TOO_FEW_GPUS = "too-few-gpus"
    """Layers are to be split over more GPUs than the server has."""
    NO_MEMORY = "no-memory"
    """The weights are more than the GPUs have."""
    NO_CACHE_MEMORY = "no-cache-memory"
    """The weights leave no room for keys and values."""
    CONTEXT_TOO_LONG = "context-too-long"
    """One request of the longest context does not fit, and the engine does not start then."""
    DOES_NOT_FIT = "does-not-fit"
    """A plug-in says why in its own words."""
    CONTEXT_BELOW_MINIMUM = "context-below-minimum"
    """It would start, and hold fewer tokens than checks.min_context."""
    MODEL_NOT_FOUND = "model-not-found"
    """The Hub has no such model."""
    REVISION_NOT_FOUND = "revision-not-found"
    """The model has no such revision."""
    MODEL_GATED = "model-gated"
    """The model's terms have to be accepted first."""
    TOKEN_REFUSED = "hub-token-refused"  # noqa: S105 - no password
    """The Hub does not accept the token."""
