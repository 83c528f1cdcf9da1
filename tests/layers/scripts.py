"""Running an action's script for real, under a POSIX shell, with its files in a tree of the test's own.

Commands can be interrupted: before any one of them the script is killed, or somebody else does something.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from controller.core.words import Script

# Every external command that the scripts and their library run.
COMMANDS = (
    "sha256sum",
    "readlink",
    "cat",
    "stat",
    "date",
    "sync",
    "mv",
    "rm",
    "mkdir",
    "flock",
    "grep",
    "chmod",
    "chown",
)
PLACES = ("/etc/pve", "/run/lock/lxc", "/run/reconcile", "/proc/")


@dataclass
class Machine:
    """A tree that stands for a host, and stand-ins for its commands.

    ``interrupt`` is a shell command that runs before the ``at``-th external command, counted from 1.
    """

    root: Path
    shell: str = "dash"
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for folder in ("etc/pve/nodes/kpro5/lxc", "run/lock/lxc", "proc/net", "state", "bin"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        link = self.root / "etc/pve/lxc"
        if not link.is_symlink():
            link.symlink_to("nodes/kpro5/lxc")
        self.write("/proc/net/unix", "Num RefCount\n")
        self.write("/proc/uptime", "1234.56 1.00\n")

    def path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def write(self, path: str, text: str | bytes) -> None:
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text if isinstance(text, bytes) else text.encode())

    def command(self, name: str, body: str) -> None:
        """A stand-in for a command: the body of a shell script. Its calls are in ``calls``."""
        target = self.root / "bin" / name
        target.write_text(f'#!/bin/sh\necho "{name} $*" >>"{self.root}/calls"\n{body}\n')
        target.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        calls = self.root / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def starts(self, vmid: int, pid: int = 4711, ticks: int = 100000) -> None:
        """Play a container that runs."""
        self.write("/proc/net/unix", f"Num RefCount\n0: 2 0 10000 1 1 77 @/var/lib/lxc/{vmid}/command\n")
        self.write(f"/proc/{pid}/stat", f"{pid} (init (x) y) S 1 {' '.join('0' for _ in range(17))} {ticks} 0\n")
        self.command(
            "lxc-info",
            f'case "$*" in\n*-s*-H*) echo RUNNING ;;\n*-p*-H*) echo {pid} ;;\n'
            f"*) printf 'State:          RUNNING\\nPID:            {pid}\\n' ;;\nesac",
        )

    def run(
        self,
        script: Script,
        args: Sequence[str],
        stdin: bytes = b"",
        at: int = 0,
        interrupt: str = "kill -9 -$GROUP",
        timeout: float = 30,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run the script as a unit of its own process group."""
        library = files("controller.world.host").joinpath("lib.sh").read_text(encoding="utf-8")
        text = library + script.text
        for place in PLACES:
            text = text.replace(place, f"{self.root}{place}")
        target = self.root / "script"
        target.write_text(f"GROUP=$$\nexport GROUP\n{text}")
        return subprocess.run(
            [shutil.which(self.shell) or "sh", str(target), *args],
            input=stdin,
            capture_output=True,
            timeout=timeout,
            check=False,
            start_new_session=True,
            env=self._environment(at, interrupt),
        )

    def _environment(self, at: int, interrupt: str) -> Mapping[str, str]:
        counted = self.root / "counted"
        counted.mkdir(exist_ok=True)
        (self.root / "count").write_text("0")
        for name in COMMANDS:
            real = shutil.which(name)
            shim = counted / name
            shim.write_text(
                f'#!/bin/sh\nread -r n <"{self.root}/count"; n=$((n + 1)); echo "$n" >"{self.root}/count"\n'
                f'echo "$n {name}" >>"{self.root}/counted.log"\n'
                f'if [ "$n" = {at} ]; then {interrupt}; fi\nexec {real} "$@"\n'
            )
            shim.chmod(0o755)
        return {
            "PATH": f"{self.root}/bin:{counted}:{os.environ['PATH']}",
            "RECONCILE_STATE": f"{self.root}/state",
            "RECONCILE_STEP_DIR": f"{self.root}/state",
            "RECONCILE_STEP": "step",
            "RECONCILE_OBJECT": "Container/ct129",
            "RECONCILE_GENERATION": "7",
        }

    def steps(self) -> list[str]:
        """The external commands of the last run, in order."""
        log = self.root / "counted.log"
        found = [line.split()[1] for line in log.read_text().splitlines()] if log.exists() else []
        log.unlink(missing_ok=True)
        return found
