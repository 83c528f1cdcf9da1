"""The Hub as huggingface_hub asks it: a small HTTP server that answers as the Hub does, and fails as it does."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from controller.facts.hub import Description, NotDescribed, Trouble
from controller.world import hub
from controller.world.hub import Hub, weight_bytes
from controller.world.port import ModelAsked

REPO = "org/tiny"
COMMIT = "a" * 40
SHA256 = "5" * 64
CONFIG = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_attention_heads": 4}
INDEX = {"metadata": {"total_size": 123456}, "weight_map": {}}
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
}


class Answers(BaseHTTPRequestHandler):
    """What the Hub answers; ``trouble`` is an error code of the Hub's, ``asked`` the paths that were asked for."""

    trouble: ClassVar[tuple[int, str] | None] = None
    hangs: ClassVar[threading.Event | None] = None
    asked: ClassVar[list[str]] = []
    token: ClassVar[str] = ""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        if self.hangs is not None:
            self.hangs.wait(60)
        if self.trouble is not None:
            code, word = self.trouble
            self._send(code, b"{}", {"X-Error-Code": word} if word else {})
        elif self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif self.path.startswith(f"/api/models/{REPO}/revision/"):
            self._send(200, json.dumps({"id": REPO, "modelId": REPO, "sha": COMMIT}).encode())
        elif self.path.startswith(f"/api/models/{REPO}/tree/"):
            tree = [
                {"type": "directory", "oid": "d" * 40, "size": 0, "path": "extra"},
                *({"type": "file", "oid": "b" * 40, "size": len(c), "path": p} for p, c in FILES.items()),
                {
                    "type": "file",
                    "oid": "c" * 40,
                    "size": 200000,
                    "path": "model.safetensors",
                    "lfs": {"oid": SHA256, "size": 200000, "pointerSize": 134},
                },
            ]
            self._send(200, json.dumps(tree).encode())
        elif (name := self.path.partition(f"/{REPO}/resolve/{COMMIT}/")[2]) in FILES:
            self._send(200, FILES[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{"b" * 40}"'})
        else:
            self._send(404, b"{}")

    def _send(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Answers]]:
    class Fresh(Answers):
        asked: ClassVar[list[str]] = []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Fresh)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    yield Fresh
    server.shutdown()
    thread.join(10)
    server.server_close()


def ask(known: Hub, revision: str = COMMIT, token: str | None = None) -> Description | NotDescribed:
    return known.describe([ModelAsked(REPO, revision, token)])[REPO, revision]


def eventually(what: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def trouble(answer: Description | NotDescribed) -> Trouble:
    assert isinstance(answer, NotDescribed), answer
    assert answer.message
    assert answer.todo
    return answer.reason


def test_a_model_is_described_with_its_manifest_config_and_size(answers: type[Answers], tmp_path: Path) -> None:
    told = ask(Hub(tmp_path))
    assert isinstance(told, Description)
    assert told.commit == COMMIT
    assert told.config == CONFIG
    assert told.weight_bytes == 123456
    weights = next(file for file in told.files if file.path == "model.safetensors")
    assert (weights.size, weights.sha256, weights.blob) == (200000, SHA256, "")
    config = next(file for file in told.files if file.path == "config.json")
    assert (config.size, config.sha256, config.blob) == (len(FILES["config.json"]), "", "b" * 40)
    assert "extra" not in {file.path for file in told.files}


def test_a_commit_is_asked_for_once_and_kept_over_a_restart(answers: type[Answers], tmp_path: Path) -> None:
    known = Hub(tmp_path)
    first = ask(known)
    asked = len(answers.asked)
    assert asked > 0
    assert ask(known) == first
    assert ask(Hub(tmp_path)) == first
    assert len(answers.asked) == asked


def test_a_branch_is_looked_up_again_and_costs_one_question(answers: type[Answers], tmp_path: Path) -> None:
    now = 0.0
    known = Hub(tmp_path, clock=lambda: now)
    first = ask(known, "main")
    assert isinstance(first, Description)
    assert (first.revision, first.commit) == ("main", COMMIT)
    answers.asked.clear()
    assert ask(known, "main") == first
    assert not answers.asked
    now = hub.MOVES + 1
    assert ask(known, "main") == first
    eventually(lambda: answers.asked)
    assert [path for path in answers.asked if "agent-harnesses" not in path] == [f"/api/models/{REPO}/revision/main"]


@pytest.mark.parametrize(
    ("code", "word", "reason"),
    [
        (404, "RepoNotFound", Trouble.MISSING),
        (401, "RepoNotFound", Trouble.MISSING),
        (404, "RevisionNotFound", Trouble.NO_REVISION),
        (403, "GatedRepo", Trouble.GATED),
        (401, "GatedRepo", Trouble.GATED),
        (403, "", Trouble.UNAUTHORIZED),
        (503, "", Trouble.OFFLINE),
        (500, "", Trouble.OFFLINE),
    ],
)
def test_troubles_are_told_apart(answers: type[Answers], tmp_path: Path, code: int, word: str, reason: Trouble) -> None:
    answers.trouble = code, word
    assert trouble(ask(Hub(tmp_path))) is reason


def test_a_hub_that_is_not_there_is_no_missing_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: type[Answers]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # discard: nobody listens
    assert trouble(ask(Hub(tmp_path))) is Trouble.OFFLINE


def test_what_could_not_be_had_is_asked_for_again_a_while_later(answers: type[Answers], tmp_path: Path) -> None:
    now = 0.0
    known = Hub(tmp_path, clock=lambda: now)
    answers.trouble = 503, ""
    assert trouble(ask(known)) is Trouble.OFFLINE
    answers.trouble = None
    assert trouble(ask(known)) is Trouble.OFFLINE
    now = hub.AGAIN + 1
    eventually(lambda: isinstance(ask(known), Description))


def test_a_hub_that_hangs_holds_up_nobody_for_ever(
    answers: type[Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "PATIENCE", 0.5)
    answers.hangs = threading.Event()
    known = Hub(tmp_path)
    assert trouble(ask(known)) is Trouble.OFFLINE
    answers.hangs.set()
    answers.hangs = None
    eventually(lambda: isinstance(ask(known), Description))


def test_what_was_known_is_told_while_it_is_asked_for_again(
    answers: type[Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    known = Hub(tmp_path, clock=lambda: now)
    first = ask(known, "main")
    answers.hangs = threading.Event()
    now = hub.MOVES + 1
    began = time.monotonic()
    assert ask(known, "main") == first
    assert ask(known, "main") == first
    assert time.monotonic() - began < hub.PATIENCE / 2
    answers.hangs.set()


def test_the_same_model_is_asked_for_once_by_many(answers: type[Answers], tmp_path: Path) -> None:
    known = Hub(tmp_path)
    many = [ModelAsked(REPO, COMMIT), ModelAsked(REPO, COMMIT)]
    assert len(known.describe(many)) == 1
    assert len([path for path in answers.asked if "/revision/" in path]) == 1


def test_a_token_goes_to_the_hub_and_into_no_file(answers: type[Answers], tmp_path: Path) -> None:
    answers.token = "hf_abcdefghijklmnopqrstuvwxyz"
    assert trouble(ask(Hub(tmp_path / "without"))) is Trouble.MISSING
    assert isinstance(ask(Hub(tmp_path / "with"), token=answers.token), Description)
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert kept
    assert not any(answers.token in path.read_text() for path in kept)
    assert answers.token not in repr(ModelAsked(REPO, COMMIT, answers.token))


def test_a_damaged_memory_is_asked_for_anew(answers: type[Answers], tmp_path: Path) -> None:
    first = ask(Hub(tmp_path))
    (kept,) = (tmp_path / "hub").iterdir()
    kept.write_text('{"schema": 1, "repo": "org/other"}')
    assert ask(Hub(tmp_path)) == first


def test_without_an_index_the_files_that_are_loaded_count() -> None:
    from controller.facts.hub import RepoFile

    files = [
        RepoFile("model-1.safetensors", 5),
        RepoFile("model-2.safetensors", 6),
        RepoFile("original/consolidated.safetensors", 11),
        RepoFile("consolidated.safetensors", 11),
        RepoFile("pytorch_model.bin", 11),
    ]
    assert weight_bytes(files, {}) == 11
    assert weight_bytes(files, {"metadata": {"total_size": 7}}) == 7
