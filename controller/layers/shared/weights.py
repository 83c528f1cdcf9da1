"""Where a server's models lie in its place, and which files of a revision are fetched."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from controller.core.view import View
from controller.core.words import NotKnown
from controller.facts.hub import SECTION, Description, HubFacts, NotDescribed, RepoFile
from controller.layers.shared.place import place_of
from controller.spec.model import ModelServer
from controller.spec.values import is_commit


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model of a server: its repository and revision as the spec names them, and where models lie in the place."""

    repo: str
    revision: str
    under: str
    draft: bool = False

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, and means the same for ever."""
        return is_commit(self.revision)

    def directory(self, commit: str) -> str:
        """Where it lies at a commit."""
        return f"{self.under.rstrip('/')}/{self.repo.replace('/', '--')}/{commit}"


def models_of(server: ModelServer) -> tuple[Wanted, ...]:
    """The models of a server: the one that it serves, and the one that drafts for it."""
    model = server.model
    main = Wanted(model.repo, model.revision, model.directory)
    if model.draft is None:
        return (main,)
    return main, Wanted(model.draft.repo, model.draft.revision, model.directory, draft=True)


def directory(view: View, server: ModelServer) -> str:
    """Where the files of the server's model lie in its place. Raises NotKnown: a branch that nobody can look up."""
    return directory_of(view, server, models_of(server)[0])


def draft_directory(view: View, server: ModelServer) -> str:
    """Where those of its draft model lie, "" when it has none. Raises NotKnown as ``directory`` does."""
    return "".join(directory_of(view, server, model) for model in models_of(server) if model.draft)


def directory_of(view: View, server: ModelServer, model: Wanted) -> str:
    """Where the files of one of the server's models lie. Raises NotKnown as ``directory`` does."""
    if model.pinned:
        return model.directory(model.revision)
    found = described(view, server, model)
    if isinstance(found, NotDescribed):
        raise NotKnown(found.reason, f"{model.repo}: {found.message}")
    return model.directory(found.commit)


def described(view: View, server: ModelServer, model: Wanted) -> Description | NotDescribed:
    """What the Hub says of a model. Raises NotKnown when it was not even asked."""
    host = place_of(view.specs, server).host
    return view.fact(host, SECTION, HubFacts).of(model.repo, model.revision)


def key_of(directory: str) -> str:
    """The key by which a model's directory is known in its place."""
    return hashlib.sha256(directory.encode()).hexdigest()[:16]


_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".tflite", ".ot")


def needed(files: Iterable[RepoFile]) -> tuple[RepoFile, ...]:
    """The files that are fetched: all but what says the same once more in a form that is not loaded.

    Where there are safetensors, weights in other formats, in ``original/`` and in ``consolidated`` files are left out:
    engines load the former.
    """
    files = sorted((file for file in files if not _is_hidden(file.path)), key=lambda file: file.path)
    if not any(file.path.endswith(".safetensors") and not _is_double(file.path) for file in files):
        return tuple(files)
    return tuple(file for file in files if not _is_double(file.path) and not file.path.endswith(_OTHER_FORMATS))


def _is_hidden(path: str) -> bool:
    """What is for git and for the Hub alone."""
    return any(part.startswith(".") for part in path.split("/"))


def _is_double(path: str) -> bool:
    return path.startswith(("original/", "metal/")) or path.rpartition("/")[2].startswith("consolidated")
