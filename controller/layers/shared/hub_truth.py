"""The Hub of a simulated fleet: what it says of the models that the fleet's file has under ``hub``; and back again."""

from __future__ import annotations

import hashlib
import json

from controller.facts.hub import Description, NotDescribed, RepoFile, Trouble
from controller.layers.shared.truth import Fleet, Model, WeightFile

INDEX = "model.safetensors.index.json"


def described(fleet: Fleet, repo: str, revision: str) -> Description | NotDescribed:
    """What the Hub says of a model at a revision."""
    model = fleet.hub.get(f"{repo}@{revision}")
    if fleet.hub_trouble:
        return NotDescribed(Trouble.OFFLINE, f"the Hub cannot be asked for {repo}: {fleet.hub_trouble}", "try again")
    if model is None:
        if any(key.startswith(f"{repo}@") for key in fleet.hub):
            return NotDescribed(Trouble.NO_REVISION, f"{repo} has no revision {revision}", "correct the revision")
        return NotDescribed(Trouble.MISSING, f"the Hub has no model {repo}", "correct the name, or write model.token")
    files = manifest(model)
    config = json.loads(model.texts.get("config.json", "{}"))
    index = json.loads(model.texts.get(INDEX, "{}"))
    total = index.get("metadata", {}).get("total_size") or sum(f.size for f in files if f.path.endswith(".safetensors"))
    return Description(repo, revision, model.revision, files, config, int(total))


def as_truth(told: Description) -> Model:
    """A model of a simulated Hub that is described as this one is."""
    files = {file.path: WeightFile(file.size, file.size, sha256=file.sha256, blob=file.blob) for file in told.files}
    index = {"metadata": {"total_size": told.weight_bytes}}
    texts = {"config.json": json.dumps(told.config), INDEX: json.dumps(index)}
    return Model(told.repo, told.commit, files, texts if told.config else {INDEX: texts[INDEX]})


def manifest(model: Model) -> tuple[RepoFile, ...]:
    """The files of a model as the Hub lists them: those that are not text are in LFS, and have a SHA-256."""
    listed = [
        RepoFile(path, file.whole, file.sha256, file.blob)
        if file.sha256 or file.blob
        else _listed(model, path, file.whole)
        for path, file in model.files.items()
    ]
    written = [
        _listed(model, path, len(text.encode()))
        for path, text in model.texts.items()
        if path not in model.files and (path != INDEX or not _is_of_a_snapshot(model))
    ]
    return tuple(sorted((*listed, *written), key=lambda file: file.path))


def _is_of_a_snapshot(model: Model) -> bool:
    """Whether the manifest is a real one: an index that it lacks is there for its total alone."""
    return any(file.sha256 or file.blob for file in model.files.values())


def _listed(model: Model, path: str, size: int) -> RepoFile:
    content = f"{model.repo}@{model.revision}/{path}".encode()
    if path.endswith((".json", ".txt", ".md", ".jinja", ".py")):
        return RepoFile(path, size, blob=hashlib.sha1(content).hexdigest())  # noqa: S324 - git's own
    return RepoFile(path, size, sha256=hashlib.sha256(content).hexdigest())
