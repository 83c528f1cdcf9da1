"""The page that programs read over HTTP: metrics, health, and the present state. Read only.

A thread for each connection, so many at once, and each only for so long, whatever the other side does: a client
that sends a byte a minute, or never reads, costs one of them for that time and cannot hold up the rest.
"""

from __future__ import annotations

import errno
import io
import ipaddress
import json
import logging
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from prometheus_client.exposition import choose_encoder

from controller.report.live import controller_report, is_healthy, lacks
from controller.report.metrics import registry
from controller.run.picture import Board

DEFAULT = "127.0.0.1:9797"
CONNECTION = 10.0  # seconds that a connection may take, from its first byte to its last
CONNECTIONS = 32  # at once; Prometheus, a probe and a few people need three
DRAINED = 65536  # bytes of a request that nobody wants, read so that the client sees the answer and no reset

_log = logging.getLogger(__name__)

PAGE = b"""<!doctype html>
<title>reconcile</title>
<p>This is a reconcile controller. What it knows can be read here; nothing can be changed.
<ul>
<li><a href="/status">/status</a>: every object, what differs from its spec, what it waits for (JSON)
<li><a href="/metrics">/metrics</a>: for Prometheus
<li><a href="/healthz">/healthz</a>: whether the loop moves
<li><a href="/readyz">/readyz</a>: whether specs are loaded and every host was looked at once
</ul>
"""
TEXT = "text/plain; charset=utf-8"


class CannotListen(Exception):  # noqa: N818 - the name says what is wrong
    """The page cannot be served at that address; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Where to listen. ``host`` is a name or an address, IPv6 without brackets; port 0 is any free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, given: str) -> Self:
        """Read ``HOST:PORT``, ``[IPv6]:PORT``, or a port alone, which is one of this machine's own programs only.

        Raises:
            ValueError: it is none of these; the message says what to write.
        """
        host, colon, port = given.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        bracketed = host == f"[{bare}]"
        well_formed = port.isascii() and port.isdigit() and int(port) < 65536 and bool(bare) == bool(colon)
        if not well_formed or (":" in bare) != bracketed or (bracketed and not _is_ipv6(bare)):
            raise ValueError(
                f"cannot listen on {given!r}: write HOST:PORT, for example {DEFAULT}, [::1]:9797 or 0.0.0.0:9797"
            )
        return cls(bare or "127.0.0.1", int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


class Server:
    """Serves what hangs on a board, from threads of its own, from ``start`` to ``close``."""

    def __init__(self, listen: Listen, board: Board) -> None:
        """Take the address. Raises CannotListen."""
        try:
            family, _, _, _, address = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0]
            self._http = _Http(family, address, board)
        except OSError as error:
            raise CannotListen(f"cannot listen on {listen}: {_why(error)}") from None
        self.listen = Listen(listen.host, self._http.server_address[1])
        self._thread = threading.Thread(target=self._http.serve_forever, name="page", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Give the address back. Answers under way are not waited for."""
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _why(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "no such host name; write an address of this machine"
    match error.errno:
        case errno.EADDRINUSE:
            return "another program has that port (`ss -ltnp` shows which); choose another with --listen HOST:PORT"
        case errno.EACCES:
            return "ports below 1024 need root; choose a higher one with --listen HOST:PORT"
        case errno.EADDRNOTAVAIL:
            return "this machine does not have that address (`ip address` shows those it has)"
    return os.strerror(error.errno) if error.errno else str(error)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, family: int, address: Any, board: Board) -> None:
        self.address_family = family
        self.board = board
        self.registry = registry(board)
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind, and do not ask the name service for the machine's own name as the base class does."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for the connection if one is free; else it is closed, and the other side may come again."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection, and free its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; everything else is a defect."""
        _log.debug("a connection of the page ended early", exc_info=True)


class _Until(socket.SocketIO):
    """What a connection says, as long as its time is not up."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        super().__init__(connection, "r")
        self.connection = connection
        self.until = until

    def readinto(self, buffer: Any) -> int | None:
        """Read what is there. Raises TimeoutError when the connection's time is up."""
        self.connection.settimeout(left(self.until))
        return super().readinto(buffer)


def left(until: float) -> float:
    """The seconds that are left. Raises TimeoutError when there are none: 0 would mean not to wait, and not that."""
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a path answers."""

    body: bytes
    kind: str = TEXT
    status: HTTPStatus = HTTPStatus.OK


def _unavailable(*why: str) -> _Answer:
    return _Answer("".join(f"{each}\n" for each in why).encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)


class _Handler(BaseHTTPRequestHandler):
    """One request, one answer, and the end of the connection (HTTP/1.0)."""

    server: _Http
    server_version = "reconcile"
    sys_version = ""
    timeout = CONNECTION

    def setup(self) -> None:
        """Read with one deadline for the whole request, and not with one for each byte."""
        super().setup()
        self.until = time.monotonic() + CONNECTION
        self.rfile = io.BufferedReader(_Until(self.connection, self.until))

    def finish(self) -> None:
        """Say that the answer is over, and read what the client still sends, so that it gets to read the answer."""
        try:
            self.connection.shutdown(socket.SHUT_WR)
            drained = 0
            while drained < DRAINED and (more := self.rfile.read1(DRAINED)):
                drained += len(more)
        except OSError:
            pass  # it is gone, or its time is up
        super().finish()

    def do_GET(self) -> None:
        """Answer with the path's content."""
        path = self.path.partition("?")[0]
        answers: Mapping[str, Callable[[], _Answer]] = {
            "/": lambda: _Answer(PAGE, "text/html; charset=utf-8"),
            "/metrics": self._metrics,
            "/healthz": self._health,
            "/readyz": self._ready,
            "/status": self._status,
        }
        if path not in answers:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            answer = answers[path]()
        except Exception:
            _log.exception("cannot answer %s", path)  # one of the paths above, and nothing that the client chose
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        self._send(answer)

    def do_HEAD(self) -> None:
        """The same without its body, which _send leaves out."""
        self.do_GET()

    def _metrics(self) -> _Answer:
        encode, kind = choose_encoder(self.headers.get("Accept") or "")
        return _Answer(encode(self.server.registry), kind)

    def _health(self) -> _Answer:
        if is_healthy(self.server.board):
            return _Answer(b"ok\n")
        still = self.server.board.stands_still
        return _unavailable(f"the loop has not moved for {still:.0f} seconds; see the controller's log")

    def _ready(self) -> _Answer:
        what = lacks(self.server.board.picture)
        return _unavailable(*what) if what else _Answer(b"ok\n")

    def _status(self) -> _Answer:
        report = controller_report(self.server.board).model_dump()
        return _Answer(json.dumps(report, indent=2).encode() + b"\n", "application/json")

    def _send(self, answer: _Answer, headers: Mapping[str, str] | None = None) -> None:
        self.connection.settimeout(left(self.until))  # of sendall, it is the time for all of it
        self.send_response(answer.status)
        for name, value in {
            "Content-Type": answer.kind,
            "Content-Length": str(len(answer.body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Content-Security-Policy": "default-src 'none'",
            "Connection": "close",
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Say what is wrong in words of our own: the base class would repeat what the client sent."""
        status = HTTPStatus(code)
        headers = {}
        if status is HTTPStatus.NOT_IMPLEMENTED:  # what the base class says of a method that it finds no do_… for
            status, headers = HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"}
        todo = {
            HTTPStatus.METHOD_NOT_ALLOWED: "this page can only be read (GET, HEAD); `reconcile approve` and the spec "
            "files are where things are changed",
            HTTPStatus.NOT_FOUND: "there is /, /status, /metrics, /healthz, /readyz",
            HTTPStatus.INTERNAL_SERVER_ERROR: "this is a defect of reconcile; its log has the rest",
        }.get(status, "")
        text = f"{status.value} {status.phrase}" + (f": {todo}" if todo else "")
        self._send(_Answer(f"{text}\n".encode(), status=status), headers)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        """Nothing: a scrape each few seconds is no news, and what a client sends is not put into a log."""
