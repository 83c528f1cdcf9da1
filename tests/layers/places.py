"""A tree that stands for a host with a running container, for tests of fragments that look into places."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from controller.core import probe
from controller.facts.words import Section
from tests.layers.shell import write

PID = 4711  # the container's init, as the host counts


class Hosted:
    """Files of a host and of its CT 129 under one root; the real fragment is asked about both."""

    def __init__(self, root: Path) -> None:
        self.root = root
        write(
            root,
            {
                "/proc/net/unix": "Num RefCount\n0: 2 0 10000 1 1 77 @/var/lib/lxc/129/command\n",
                "/proc/uptime": "9999.00 1.00\n",
                f"/proc/{PID}/cgroup": "6:freezer:/\n1:cpu:/x\n0::/lxc/129/ns/init.scope\n",
                f"/proc/{PID}/root/usr/x": "",
                "/usr/x": "",
                "/bin/lxc-info": f"#!/bin/sh\necho {PID}\n",
                "/run/x": "",
            },
        )
        (root / "bin/lxc-info").chmod(0o755)

    def inside(self, path: str = "") -> str:
        """A path of the container, as the host sees it."""
        return f"/proc/{PID}/root{path}"

    def write(self, files: dict[str, str]) -> None:
        write(self.root, files)

    def path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def process(self, pid: int, ticks: int, parent: int = 1, **files: bytes) -> None:
        """A process: its stat, and more of its files by name."""
        fields = " ".join("0" for _ in range(17))
        self.write({f"/proc/{pid}/stat": f"{pid} (a (b) c) S {parent} {fields} {ticks} 0 0\n"})
        for name, content in files.items():
            self.path(f"/proc/{pid}/{name}").write_bytes(content)

    def ask(self, fragment: str, guests: tuple[int, ...] = (129,), shell: str = "dash") -> Section:
        """What the fragment answers."""
        text = (
            f"root={self.root}\n{probe.script({'section': fragment})}\n"
            f"PATH={self.root}/bin:$PATH run_dir={self.root}/run\n"
            'process_start() { [ -r "$root/proc/$1/stat" ] && read -r s <"$root/proc/$1/stat" && set -- ${s##*) } && '
            'shift 19 && printf %s "$1"; }\n' + probe.look("N", 0, guests)
        )
        done = subprocess.run(
            [shell], input=text.encode(), capture_output=True, timeout=60, check=False, env=dict(os.environ)
        )
        return probe.read(done.stdout, "N")["section"]
