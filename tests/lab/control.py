"""The control sockets of the lab's file systems: one JSON object a line there, one a line back.

A reply is ``{"ok": VALUE}`` or ``{"error": TEXT}``.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

Request = dict[str, Any]


def ask(path: Path, request: Request, timeout: float = 30.0) -> Any:
    """Send one request and return the value of its reply.

    Raises RuntimeError with the other side's words when it refuses, OSError when nobody listens.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(str(path))
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as replies:
            line = replies.readline()
    reply = json.loads(line)
    if "error" in reply:
        raise RuntimeError(reply["error"])
    return reply["ok"]


def serve(path: Path, answer: Callable[[Request], Any]) -> None:
    """Answer requests at ``path`` from a thread of its own, each connection from another one."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                try:
                    reply = {"ok": answer(json.loads(line))}
                except (ValueError, KeyError, TypeError, OSError) as error:
                    reply = {"error": f"{type(error).__name__}: {error}"}
                self.wfile.write(json.dumps(reply).encode() + b"\n")

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    path.unlink(missing_ok=True)
    server = Server(str(path), Handler)
    threading.Thread(target=server.serve_forever, name=f"control {path.name}", daemon=True).start()
