"""Offers a model's files to who holds a token, read only, until that one says that it has them, or asks no more.

    python offer.py PID DIRECTORY TOKEN_DIGEST FILE <FILES

PID is that of a container's init, or -; DIRECTORY lies in there. FILES are the paths that may be had, with their sizes,
JSON. FILE is where the port and the token's SHA-256 are written. Standard library only; it runs on the host, since a
container's address is nobody's to know, and reads in the container's own mounts, where a link leads nowhere outside.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import os
import re
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

IDLE = 600.0  # seconds without a request until nobody is thought to come any more
PIECE = 1 << 20
CLONE_NEWNS = 0x00020000


class Offer(BaseHTTPRequestHandler):
    """One file for each request, from the byte that is asked for."""

    directory: str
    digest: str
    files: dict[str, int]
    asked_at = time.monotonic()
    taken = threading.Event()
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """Answer with a file, or what stands in the way."""
        type(self).asked_at = time.monotonic()
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(hashlib.sha256(token.encode()).hexdigest(), self.digest):
            self.refuse(403)
            return
        path = urllib.parse.unquote(self.path).removeprefix("/")
        if path == ".taken":
            self.refuse(200)
            self.taken.set()
        elif path in self.files:
            self.send(path, self.files[path])
        else:
            self.refuse(404)

    def refuse(self, status: int) -> None:
        """An answer without content."""
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send(self, path: str, size: int) -> None:
        """The file, if it is still what it was."""
        try:
            opened = os.open(os.path.join(self.directory, path), os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            self.refuse(404)
            return
        with os.fdopen(opened, "rb") as file:
            if os.fstat(opened).st_size != size:
                self.refuse(404)
                return
            match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            begin = int(match[1]) if match else 0
            if match and begin >= size:
                self.refuse(416)
                return
            self.send_response(206 if match else 200)
            if match:
                self.send_header("Content-Range", f"bytes {begin}-{size - 1}/{size}")
            self.send_header("Content-Length", str(size - begin))
            self.end_headers()
            file.seek(begin)
            while piece := file.read(PIECE):
                self.wfile.write(piece)
                type(self).asked_at = time.monotonic()

    def log_message(self, *args: object) -> None:
        """Say nothing: the one who fetches does."""


def main() -> None:
    """Offer, and take the offer back at the end."""
    pid, directory, digest, told = sys.argv[1:5]
    Offer.directory, Offer.digest = directory, digest
    Offer.files = {file["path"]: file["size"] for file in json.load(sys.stdin)}
    server = ThreadingHTTPServer(("", 0), Offer)
    server.daemon_threads = True
    folder = os.open(os.path.dirname(told), os.O_RDONLY | os.O_DIRECTORY)
    name = os.path.basename(told)
    with open(f"{told}.new", "w", encoding="ascii") as file:
        file.write(f"{server.server_address[1]} {digest}\n")
    # Nothing of Python's own is read after this; threads come later, a process with some may not enter.
    if pid != "-":
        enter(pid)
    os.rename(f"{name}.new", name, src_dir_fd=folder, dst_dir_fd=folder)
    try:
        threading.Thread(target=server.serve_forever, args=(0.5,), daemon=True).start()
        while not Offer.taken.wait(1.0) and time.monotonic() - Offer.asked_at < IDLE:
            pass
    finally:
        os.unlink(name, dir_fd=folder)
    print("taken" if Offer.taken.is_set() else "nobody has asked any more", flush=True)


def enter(pid: str) -> None:
    """See the mounts of a container, and nothing else. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/mnt", "rb") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the mounts of process {pid}")


if __name__ == "__main__":
    main()
