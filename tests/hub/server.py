"""The Hub's interface as far as downloads use it, over HTTP on this machine, with faults on demand.

What it answers is what huggingface_hub 0.36 to 2.4 were seen to need: the revision, its tree, and files, of which those
in LFS are redirected to another host (a CDN) that refuses whoever shows it a token. Everything it sends is counted.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from controller.facts.hub import Description, RepoFile

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIECE = 16 << 10


def content(seed: str, size: int) -> bytes:
    """Bytes that nothing compresses and that are the same for the same seed."""
    made = bytearray()
    number = 0
    while len(made) < size:
        made += hashlib.sha256(f"{seed}{number}".encode()).digest()
        number += 1
    return bytes(made[:size])


@dataclass
class Repo:
    """A model: its files, which of them lie in LFS, who may have it."""

    files: dict[str, bytes]
    commit: str = COMMIT
    token: str = ""
    gated: bool = False

    def is_lfs(self, path: str) -> bool:
        return path.endswith((".safetensors", ".bin", ".gguf"))


@dataclass
class Fault:
    """What goes wrong with answers that send the content of files whose path matches.

    ``kind``: stall (nothing more comes), trickle (a byte now and then), cut (the connection ends), wrong (a byte is
    another), status (an error). ``after`` is how many bytes of an answer come before it. ``times`` is how often it
    happens, and ``agent`` to whom alone.
    """

    kind: str
    path: str = ""
    after: int = 0
    times: int = 1_000_000
    agent: str = ""
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sent:
    """One answer with content: of which file, from which byte on, how many bytes went out, to whom."""

    path: str
    begin: int
    size: int
    agent: str


class Hub:
    """The server. ``sent`` has one entry for each answer, also for those that were cut."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address = address
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.sent: list[Sent] = []
        self.sending = 0  # answers with content that are at work
        self.tokens_shown_to_cdn = 0
        self.pace = 0.0  # seconds for a piece, of every answer
        self.lock = threading.Lock()
        self.closing = threading.Event()

        class Handler(_Handler):
            hub = self

        self._server = ThreadingHTTPServer((address, 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}:{self.port}"

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def describe(self, repo: str) -> Description:
        """What the controller learns of a model, without asking for it over HTTP."""
        found = self.repos[repo]
        files = tuple(
            RepoFile(path, len(data), sha256=hashlib.sha256(data).hexdigest())
            if found.is_lfs(path)
            else RepoFile(path, len(data), blob=git_blob(data))
            for path, data in sorted(found.files.items())
        )
        weights = sum(len(data) for path, data in found.files.items() if path.endswith(".safetensors"))
        config = json.loads(found.files.get("config.json", b"{}"))
        return Description(repo, found.commit, found.commit, files, config, weights, self.endpoint)

    def bytes_of(self, path: str, agent: str = "") -> int:
        """How many bytes of a file went out in all."""
        with self.lock:
            return sum(sent.size for sent in self.sent if sent.path == path and agent in sent.agent)

    def fault(self, path: str, agent: str) -> Fault | None:
        """The fault that this answer has, used up by one."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.path, path) and fault.agent in agent:
                    fault.times -= 1
                    return fault
        return None


@contextmanager
def running(address: str = "127.0.0.1") -> Iterator[Hub]:
    """A Hub that answers at an address of this machine until the block ends."""
    hub = Hub(address)
    hub.begin()
    try:
        yield hub
    finally:
        hub.end()


def git_blob(data: bytes) -> str:
    """How git names this content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *args: object) -> None:
        pass

    @property
    def agent(self) -> str:
        return self.headers.get("User-Agent", "")

    def _answer(self) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        if path.startswith("/cdn/"):
            self._cdn(path.removeprefix("/cdn/"))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._api(*match.groups())
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups())
        else:
            self._error(404)

    def _error(self, status: int, code: str = "", headers: dict[str, str] | None = None) -> None:
        body = json.dumps({"error": code or f"HTTP {status}"}).encode()
        self.send_response(status)
        for name, value in {**({"X-Error-Code": code} if code else {}), **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _repo(self, name: str, revision: str | None) -> Repo | None:
        """The model, or an error and None."""
        repo = self.hub.repos.get(name)
        shown = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repo is None or (repo.token and not shown):
            self._error(401 if not shown else 404, "RepoNotFound")
        elif repo.token and shown != repo.token:
            self._error(401)
        elif repo.gated:
            self._error(403, "GatedRepo")
        elif revision not in (None, "main", repo.commit):
            self._error(404, "RevisionNotFound")
        else:
            return repo
        return None

    def _api(self, name: str, what: str | None, revision: str | None) -> None:
        repo = self._repo(name, revision)
        if repo is None:
            return
        told: Any = {
            "id": name,
            "modelId": name,
            "sha": repo.commit,
            "siblings": [{"rfilename": p} for p in repo.files],
        }
        if what == "tree":
            told = []
            for path, data in sorted(repo.files.items()):
                entry: dict[str, Any] = {"type": "file", "oid": git_blob(data), "size": len(data), "path": path}
                if repo.is_lfs(path):
                    sha256 = hashlib.sha256(data).hexdigest()
                    entry["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": 134}
                told.append(entry)
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repo = self._repo(name, revision)
        if repo is None:
            return
        data = repo.files.get(path)
        if data is None:
            self._error(404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        if repo.is_lfs(path):
            sha256 = hashlib.sha256(data).hexdigest()
            # Another host, by name: what is signed there for a while needs no token, and refuses one.
            host = "localhost" if self.hub.address == "127.0.0.1" else self.hub.address
            location = f"http://{host}:{self.hub.port}/cdn/{name}/{path}?X-Amz-Signature=1"
            headers |= {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(data)), "ETag": f'"{sha256}"'}
            self._error(302, headers={**headers, "Location": location})
        else:
            self._content(path, data, {**headers, "ETag": f'"{git_blob(data)}"'})

    def _cdn(self, rest: str) -> None:
        owner, name, path = rest.split("/", 2)
        if "Authorization" in self.headers:
            with self.hub.lock:
                self.hub.tokens_shown_to_cdn += 1
            self._error(400, "InvalidArgument")
            return
        self._content(path, self.hub.repos[f"{owner}/{name}"].files[path], {"Accept-Ranges": "bytes"})

    def _content(self, path: str, data: bytes, headers: dict[str, str]) -> None:
        fault = self.hub.fault(path, self.agent) if self.command == "GET" else None
        if fault is not None and fault.kind == "status":
            self._error(fault.status, headers=fault.headers)
            return
        begin = 0
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            begin = int(match[1])
            if begin >= len(data):
                self._error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data) - begin)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        sent = 0
        with self.hub.lock:
            self.hub.sending += 1
        try:
            for piece in self._pieces(data[begin:], fault):
                self.wfile.write(piece)
                sent += len(piece)
        except OSError:
            self.close_connection = True
        finally:
            with self.hub.lock:
                self.hub.sending -= 1
                self.hub.sent.append(Sent(path, begin, sent, self.agent))

    def _pieces(self, data: bytes, fault: Fault | None) -> Iterator[bytes]:
        """What goes out, as the fault has it."""
        if fault is not None and fault.kind == "wrong":
            at = min(fault.after, len(data) - 1)
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            fault = None
        whole = data if fault is None else data[: fault.after]
        for at in range(0, len(whole), PIECE):
            if self.hub.pace:
                time.sleep(self.hub.pace)
            yield whole[at : at + PIECE]
        if fault is None:
            return
        self.close_connection = True
        rest = iter(data[fault.after :])
        while fault.kind in ("stall", "trickle") and not self.hub.closing.wait(0.5):
            # A stalled connection is told from one that the other side has closed.
            yield bytes([next(rest)]) if fault.kind == "trickle" else b""
            if fault.kind == "stall" and self._is_closed():
                return

    def _is_closed(self) -> bool:
        import select
        import socket

        readable, _, _ = select.select([self.connection], [], [], 0)
        try:
            return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True
