"""A server that speaks OpenAI's interface and answers as it is told to: right, wrong, damaged, slow, not at all."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from controller.layers.shared.checks import canaries, files
from controller.layers.shared.checks.place import Place, UnitState

PROSE = (
    "A lighthouse is a tall tower by the sea. A lamp at its top shines at night. Lenses gather the light into a beam. "
    "The lenses turn, so that sailors see flashes. Each tower has flashes of its own. Charts tell sailors which tower "
    "they see. In fog a horn sounds as well. Most of them work without people today."
)
NAME = "m"
HTTP = {"live": "/health", "models": "/v1/models", "metrics": "/metrics"}


def answers() -> dict[str, str]:
    """What a sound model answers, by what it is asked."""
    return {
        **{f"What is the capital of {country}?{canaries.SHORT}": good[0] for country, good in canaries.CAPITALS},
        **{question + canaries.NUMBER: str(result) for question, result in canaries.SUMS},
        canaries.PROSE: PROSE,
        canaries.PERSON: '{"name": "Ann", "age": 31}',
        "Say OK.": "OK",
    }


@dataclass
class Engine:
    """How the server is. ``wrong`` replaces the answer to what contains its key; ``*`` is every question."""

    wrong: dict[str, str] = field(default_factory=dict)
    models: list[str] = field(default_factory=lambda: [NAME])
    context: int | None = None
    key: str = ""
    status: int = 200  # of completions
    models_status: int = 200
    refuses: tuple[str, ...] = ()  # fields of a request that it answers with 400
    silent: threading.Event = field(default_factory=threading.Event)  # while it is set, nothing is answered
    thinks: bool = True
    parses_tools: bool = True
    parses_thoughts: bool = True
    streams_other: str = ""
    has_metrics: bool = True
    piece_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafts: tuple[int, int] = (0, 0)  # drafted, accepted, of each token
    drafted: int = 0
    accepted: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    asked_once: dict[str, int] = field(default_factory=dict)

    def message(self, body: dict[str, Any]) -> dict[str, Any]:
        """The message that answers a request."""
        question = body["messages"][0]["content"]
        self.asked_once[question] = self.asked_once.get(question, 0) + 1
        for part, said in self.wrong.items():
            if part == "*" or part in question:
                return {"content": said}
        if question == canaries.WEATHER:
            call = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
            if not body.get("tools"):
                return {"content": "I cannot know that."}
            if not self.parses_tools:
                return {"content": f"<tool_call>{json.dumps(call)}</tool_call>"}
            return {"content": None, "tool_calls": [{"id": "1", "type": "function", "function": call}]}
        if question == canaries.PUZZLE:
            if not self.thinks or body.get("chat_template_kwargs"):
                return {"content": "7"}
            if not self.parses_thoughts:
                return {"content": "<think>3 + 4 is 7</think>7"}
            return {"content": "7", "reasoning_content": "3 + 4 is 7"}
        if canaries.ASK_NEEDLE in question:
            return {"content": str(canaries.SECRET) if canaries.NEEDLE in question else "unknown"}
        return {"content": answers().get(question, "I do not know.")}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._wait()
        if self.path == "/metrics" and self.engine.has_metrics:
            engine = self.engine
            lines = {
                "running": engine.running, "waiting": engine.waiting, "prompt_tokens_total": engine.prompt_tokens,
                "generation_tokens_total": engine.generation_tokens, "drafted_tokens_total": engine.drafted,
                "accepted_tokens_total": engine.accepted,
            }  # fmt: skip
            self._answer(200, "".join(f'{name}{{model="m"}} {value}\n' for name, value in lines.items()).encode())
        elif self.path == "/v1/models":
            if self.engine.key and self.headers.get("Authorization") != f"Bearer {self.engine.key}":
                self._answer(401, b"{}")
                return
            length = {"max_model_len": self.engine.context} if self.engine.context else {}
            listed = {"data": [{"id": name, **length} for name in self.engine.models]}
            self._answer(self.engine.models_status, json.dumps(listed).encode())
        else:
            self._answer(404, b"{}")

    def do_POST(self) -> None:
        engine = self.engine
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        engine.requests.append(body)
        self._wait()
        if engine.key and self.headers.get("Authorization") != f"Bearer {engine.key}":
            self._answer(401, b'{"error": "no"}')
            return
        if engine.status != 200:
            self._answer(engine.status, b'{"error": "engine is dead"}')
            return
        if any(name in body for name in engine.refuses) or body["max_tokens"] >= (engine.context or 1 << 30):
            self._answer(400, b'{"error": "unexpected field"}')
            return
        message = engine.message(body)
        words = (message["content"] or "").split(" ")
        tokens = len(words)
        with engine.lock:
            engine.prompt_tokens += 5
            engine.generation_tokens += tokens
            engine.drafted += tokens * engine.drafts[0]
            engine.accepted += tokens * engine.drafts[1]
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
            self._answer(200, json.dumps({"choices": [choice], "usage": {"completion_tokens": tokens}}).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for number, word in enumerate(words):
            text = (engine.streams_other or word) + (" " if number < tokens - 1 else "")
            self._event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})
            time.sleep(engine.piece_seconds)
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self._event({"choices": [], "usage": {"completion_tokens": tokens}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, piece: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\n\n")

    def _wait(self) -> None:
        while self.engine.silent.is_set():
            time.sleep(0.02)

    def _answer(self, status: int, body: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            pass  # whoever asked has given up


class Played(Place):
    """A server's folder, with a systemd that is told what to say."""

    said = UnitState("active", 0, "1 1", "success: exited 0")

    def state(self) -> UnitState:
        return self.said


@contextmanager
def playing(folder: Path, engine: Engine, **more: Any) -> Iterator[Played]:
    """A server that plays this engine, and its folder with settings; ``more`` are changes of what is asked."""
    handler = type("Handler", (Handler,), {"engine": engine})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield place(folder, server.server_address[1], engine, **more)
    finally:
        engine.silent.clear()
        server.shutdown()
        server.server_close()
        thread.join(timeout=30)


def place(folder: Path, port: int, engine: Engine, **more: Any) -> Played:
    """A server's folder with its settings."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {
        "running": "running", "waiting": "waiting", "prompt_tokens": "prompt_tokens_total",
        "generation_tokens": "generation_tokens_total", "drafted": "drafted_tokens_total",
        "accepted": "accepted_tokens_total",
    }  # fmt: skip
    asked = {
        "asked": "a", "checks": ["arithmetic", "tool-call", "reasoning"], "needle": 0, "timeout": 20,
        "plainly": {"chat_template_kwargs": {"enable_thinking": False}},
        "tokens_per_second": [None, None], "draft_acceptance": [None, None],
    }  # fmt: skip
    settings = {
        "schema": 1, "host": "127.0.0.1", "port": port, "model": NAME, "key": bool(engine.key),
        "unit": "reconcile-qwen.service", "lists_model": True, "http": HTTP,
        "metrics": names, "canaries": {**asked, **more},
    }  # fmt: skip
    files.write(folder / "checks.json", settings)
    files.write(folder / "marker.json", {"digest": "u1", "object": "ModelServer/qwen"})
    files.write(folder / "args.json", {"env_digest": "e1"})
    units = folder.parent / "units"
    units.mkdir(exist_ok=True)
    (units / "reconcile-qwen.service").write_text("[Service]\nExecStart=one\n")
    return Played(folder, units)
