"""What the Hugging Face Hub says of models, through huggingface_hub, kept in the state directory.

A commit means the same for ever, so what was learned of one is asked once. ``HF_ENDPOINT`` names another Hub.
Downloads are none of this module's business: the controller reads a manifest and a few small files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from controller.facts.hub import Description, NotDescribed, RepoFile, Trouble
from controller.spec.values import is_commit
from controller.world.port import ModelAsked

SCHEMA = 1
PATIENCE = 45.0  # seconds for all that is asked at once: huggingface_hub waits for ever on a connection that trickles
AGAIN = 60.0  # seconds until what could not be had is asked for once more
MOVES = 300.0  # seconds after which a branch may have moved
_SMALL = 32 * 1024 * 1024  # bytes: no config or index is bigger
_INDEX = "model.safetensors.index.json"
_OTHER_COPIES = ("original/", "consolidated")

Answer = Description | NotDescribed


class Hub:
    """The Hub as one controller knows it. Safe to be asked from several threads.

    Who asks for a model for the first time waits for the answer. Later, what has grown old is told once more while it
    is asked for again beside, so that a Hub that hangs holds up no look at hosts.
    """

    def __init__(self, state: str | os.PathLike[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._kept = Path(state) / "hub"
        self._clock = clock
        self._news = threading.Condition()
        self._known: dict[tuple[str, str], tuple[Answer, float]] = {}
        self._asking: set[tuple[str, str]] = set()

    def describe(self, asked: Sequence[ModelAsked]) -> Mapping[tuple[str, str], Answer]:
        """Describe models, all at once; returns within ``PATIENCE`` seconds."""
        keys = [(one.repo, one.revision) for one in asked]
        with self._news:
            for key, one in zip(keys, asked, strict=True):
                if not self._is_fresh(key, one) and key not in self._asking:
                    self._asking.add(key)
                    # A daemon: one that hangs must not keep the program from ending
                    threading.Thread(target=self._learn, args=(key, one), daemon=True).start()
            self._news.wait_for(lambda: all(key in self._known for key in keys), PATIENCE)
            return {key: self._known[key][0] if key in self._known else _late(key[0]) for key in keys}

    def _is_fresh(self, key: tuple[str, str], asked: ModelAsked) -> bool:
        """Whether what is known needs not be asked for; what is kept of a commit is taken for known."""
        if key not in self._known and is_commit(asked.revision):
            kept = self._read(asked.repo, asked.revision)
            if kept is not None:
                self._known[key] = kept, self._clock()
        if key not in self._known:
            return False
        answer, when = self._known[key]
        if isinstance(answer, Description) and is_commit(asked.revision):
            return True
        return self._clock() - when < (AGAIN if isinstance(answer, NotDescribed) else MOVES)

    def _learn(self, key: tuple[str, str], asked: ModelAsked) -> None:
        answer = self._ask(asked)
        with self._news:
            self._known[key] = answer, self._clock()
            self._asking.discard(key)
            self._news.notify_all()

    def _ask(self, asked: ModelAsked) -> Answer:
        answer = _asked_of_hub(asked, self._read)
        if isinstance(answer, Description):
            self._keep(answer)
        return answer

    # What is kept

    def _path(self, repo: str, commit: str) -> Path:
        return self._kept / f"{hashlib.sha256(f'{repo}@{commit}'.encode()).hexdigest()[:32]}.json"

    def _read(self, repo: str, commit: str) -> Description | None:
        """What is kept of a commit, None when there is nothing, or nothing that can be understood."""
        try:
            data = json.loads(self._path(repo, commit).read_text(encoding="utf-8"))
            if data["schema"] != SCHEMA or (data["repo"], data["commit"]) != (repo, commit):
                return None
            files = tuple(RepoFile(**file) for file in data["files"])
            return Description(repo, commit, commit, files, data["config"], data["weight_bytes"], endpoint())
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _keep(self, told: Description) -> None:
        """Keep a description. A disk that does not take it costs another question, no more."""
        data = {"schema": SCHEMA, **dataclasses.asdict(dataclasses.replace(told, revision=told.commit))}
        path = self._path(told.repo, told.commit)
        with contextlib.suppress(OSError):
            self._kept.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile("w", dir=self._kept, delete=False, encoding="utf-8") as file:
                json.dump(data, file)
            os.replace(file.name, path)


def _late(repo: str) -> NotDescribed:
    return NotDescribed(
        Trouble.OFFLINE,
        f"the Hub ({endpoint()}) has not told of {repo} within {PATIENCE:.0f} s",
        "look at the controller's network and at HF_ENDPOINT; it is still being asked",
    )


def endpoint() -> str:
    """Where the Hub is."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _asked_of_hub(asked: ModelAsked, kept: Callable[[str, str], Description | None]) -> Answer:
    """Ask the Hub itself. Every failure becomes an answer."""
    # Imported when it is needed first: it takes a third of a second
    from huggingface_hub import HfApi
    from huggingface_hub import errors as hub_errors
    from huggingface_hub.utils.logging import set_verbosity_error
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    set_verbosity_error()  # type: ignore[no-untyped-call]  # what goes wrong is in the answer
    api = HfApi(endpoint=endpoint(), token=asked.token or False)
    which = f"{asked.repo} at {asked.revision}"
    try:
        commit = str(api.model_info(asked.repo, revision=asked.revision, timeout=15).sha or "")
        if not is_commit(commit):
            return NotDescribed(Trouble.GARBAGE, f"the Hub gives {which} no commit", "look at HF_ENDPOINT")
        before = kept(asked.repo, commit)
        if before is not None:
            return dataclasses.replace(before, revision=asked.revision)
        files = _files(api.list_repo_tree(asked.repo, revision=commit, recursive=True))
        config = _small_json(api, asked.repo, commit, files, "config.json")
        index = _small_json(api, asked.repo, commit, files, _INDEX)
        return Description(asked.repo, asked.revision, commit, files, config, weight_bytes(files, index), endpoint())
    except hub_errors.GatedRepoError:
        return NotDescribed(
            Trouble.GATED,
            f"{asked.repo} is gated: its terms have to be accepted",
            f"accept them at {endpoint()}/{asked.repo} as the owner of the token, and write model.token"
            + ("; the token that is given has no access" if asked.token else ""),
        )
    except hub_errors.RevisionNotFoundError:
        return NotDescribed(
            Trouble.NO_REVISION, f"{asked.repo} has no revision {asked.revision}", "correct the revision"
        )
    except hub_errors.RepositoryNotFoundError:
        # The Hub does not tell a private repository from one that there is not
        todo = "correct the name" + (
            ", or let the token's owner have access" if asked.token else ", or write model.token: it may be private"
        )
        return NotDescribed(Trouble.MISSING, f"the Hub has no model {asked.repo}", todo)
    except hub_errors.HfHubHTTPError as error:
        return _http_trouble(which, error)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        return NotDescribed(
            Trouble.GARBAGE, f"what the Hub says of {which} cannot be understood: {error!r}", "try again"
        )
    except Exception as error:  # its HTTP library differs from version to version, and so do its errors
        return NotDescribed(
            Trouble.OFFLINE,
            f"the Hub ({endpoint()}) cannot be asked for {which}: {type(error).__name__}: {str(error)[:200]}",
            "look at the controller's network and at HF_ENDPOINT; it is asked again",
        )


def _http_trouble(which: str, error: Any) -> NotDescribed:
    code = getattr(getattr(error, "response", None), "status_code", None)
    if code is None:
        return NotDescribed(
            Trouble.OFFLINE,
            f"the Hub ({endpoint()}) cannot be asked for {which}: {str(error)[:200]}",
            "it is asked again",
        )
    if code in (401, 403):
        return NotDescribed(
            Trouble.UNAUTHORIZED, f"the Hub does not accept the token for {which} ({code})", "write a valid model.token"
        )
    wait = "give a token, which has more requests free; it is asked again" if code == 429 else "it is asked again"
    return NotDescribed(Trouble.OFFLINE, f"the Hub ({endpoint()}) answers {code} to {which}", wait)


def _files(tree: Any) -> tuple[RepoFile, ...]:
    """The manifest, in order of paths; folders are none of it."""
    files = []
    for entry in tree:
        if not hasattr(entry, "size"):
            continue
        lfs = getattr(entry, "lfs", None)
        files.append(RepoFile(entry.path, int(entry.size), lfs.sha256 if lfs else "", "" if lfs else entry.blob_id))
    return tuple(sorted(files, key=lambda file: file.path))


def _small_json(api: Any, repo: str, commit: str, files: Sequence[RepoFile], name: str) -> Mapping[str, Any]:
    """A JSON file of the repository, {} when there is none."""
    file = next((f for f in files if f.path == name), None)
    if file is None:
        return {}
    if file.size > _SMALL:
        raise TypeError(f"{name} has {file.size} bytes")
    with tempfile.TemporaryDirectory() as folder:
        path = api.hf_hub_download(repo, name, revision=commit, local_dir=folder)
        data = json.loads(Path(path).read_bytes())
    if not isinstance(data, dict):
        raise TypeError(f"{name} holds no object")
    return data


def weight_bytes(files: Sequence[RepoFile], index: Mapping[str, Any]) -> int:
    """Bytes of the tensors: as the index says, else of the safetensors files that engines load."""
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if isinstance(total, int | float) and total > 0:
        return int(total)
    loaded = (f for f in files if f.path.endswith(".safetensors") and not f.path.startswith(_OTHER_COPIES))
    return sum(file.size for file in loaded)
