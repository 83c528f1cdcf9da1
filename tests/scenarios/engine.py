"""An engine for tests: takes any arguments, answers on --port, and knows nothing of the controller."""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def option(name: str, default: str) -> str:
    """The value behind an option of the command line."""
    return next((value for key, value in zip(sys.argv, sys.argv[1:], strict=False) if key == name), default)


class Handler(BaseHTTPRequestHandler):
    """Health and models, as engines have them."""

    def do_GET(self) -> None:
        models = {"data": [{"id": option("--served-model-name", "model")}]}
        answer = b"" if self.path == "/health" else json.dumps(models).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    if any(argument.endswith("--fails") for argument in sys.argv):
        sys.exit("error: unrecognized arguments: --fails")
    time.sleep(float(option("--loads-for", "0")))
    address, port = option("--host", "127.0.0.1"), int(option("--port", "30000"))
    threading.Thread(target=ThreadingHTTPServer((address, port), Handler).serve_forever).start()


main()
