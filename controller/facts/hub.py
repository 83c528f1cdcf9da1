"""What the Hub says of models: the files of a revision, the model's config, and its index. Values only.

The section ``hub`` of every host has them, put there by whoever looks: the Hub is asked by the controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

SECTION = "hub"


@dataclass(frozen=True, slots=True)
class RepoFile:
    """A file of a revision: its path in the repository, bytes, and what its content hashes to.

    ``sha256`` is "" for a small file that lies in git itself; ``blob`` is then git's sha1 of it.
    """

    path: str
    size: int
    sha256: str = ""
    blob: str = ""


@dataclass(frozen=True, slots=True)
class Description:
    """A model at a revision. ``commit`` is the 40 hexadecimal digits that the revision stands for.

    ``config`` is config.json, {} when there is none. ``weight_bytes`` are the bytes of the tensors as the index of
    the safetensors says, or of the safetensors files when there is no index; 0 when there are neither. ``endpoint`` is
    the Hub that the controller asks, and that the files come from.
    """

    repo: str
    revision: str
    commit: str
    files: tuple[RepoFile, ...]
    config: Mapping[str, Any]
    weight_bytes: int
    endpoint: str = "https://huggingface.co"


class Trouble(StrEnum):
    """Why a model could not be described."""

    NOT_ASKED = "hub-not-asked"
    OFFLINE = "hub-unreachable"
    MISSING = "model-not-found"
    NO_REVISION = "revision-not-found"
    GATED = "model-gated"
    UNAUTHORIZED = "hub-token-refused"
    GARBAGE = "hub-answer-not-understood"


@dataclass(frozen=True, slots=True)
class NotDescribed:
    """Why nothing is known of a model, and what to do about it."""

    reason: Trouble
    message: str
    todo: str


@dataclass(frozen=True, slots=True)
class HubFacts:
    """What was learned of each (repository, revision) that the specs name."""

    models: Mapping[tuple[str, str], Description | NotDescribed]

    def of(self, repo: str, revision: str) -> Description | NotDescribed:
        """A model, or why it is not known."""
        return self.models.get((repo, revision)) or NotDescribed(
            Trouble.NOT_ASKED, f"nobody has asked the Hub for {repo} at {revision}", "look again"
        )
