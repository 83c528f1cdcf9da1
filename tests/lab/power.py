"""LXC runs this before a host starts and after it stopped, however that came about: it is the host's power button.

``power.py STATE HOST on|off``. The cluster file system and the kernel's stand-in are told, and a start is a boot of
its own: a new boot id, and the kernel release that the host has installed.
"""

from __future__ import annotations

import json
import socket
import sys
import uuid
from pathlib import Path


def tell(path: Path, request: dict[str, object]) -> None:
    """Send one request to a control socket and wait for its reply."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(path))
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as replies:
            reply = json.loads(replies.readline())
    if "error" in reply:
        raise RuntimeError(reply["error"])


def main() -> None:
    """Tell both sides of the change."""
    state, host, on = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "on"
    if on:
        (state / "hosts" / host / "boot_id").write_text(f"{uuid.uuid4()}\n")
    for name in ("kernel", "pmxcfs"):
        try:
            tell(state / "control" / f"{name}.sock", {"op": "power", "host": host, "on": on})
        except OSError:
            if on:  # with the lab going down nobody listens any more, and nobody needs to know
                raise


if __name__ == "__main__":
    main()
