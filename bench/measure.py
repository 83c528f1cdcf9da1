"""How long a command takes, and how much CPU time it and everything that it leaves behind has used."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/cpuacct")
_V2 = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Took:
    """Seconds."""

    wall: float
    cpu: float


class Meter:
    """A control group: its CPU time is exact, and counts daemons such as ControlPersist masters too."""

    def __init__(self) -> None:
        self._v1 = (_V1 / "cpuacct.usage").exists()
        self._group = (_V1 if self._v1 else _V2) / f"reconcile-bench-{os.getpid()}"
        self._group.mkdir()

    def run(self, command: list[str], env: dict[str, str], stdin: str = "") -> tuple[Took, str]:
        """Run a command, which has to succeed, and return what it took and what it said."""
        join = ["/bin/sh", "-c", f'echo $$ >{self._group}/cgroup.procs && exec "$@"', "sh"]
        before, began = self._used(), time.perf_counter()
        done = subprocess.run([*join, *command], env=env, input=stdin, capture_output=True, text=True, check=False)
        took = Took(time.perf_counter() - began, self._used() - before)
        if done.returncode != 0:
            raise SystemExit(f"bench: {' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return took, done.stdout

    def close(self) -> None:
        """Remove the group; what still runs in it goes back to the group above."""
        for pid in (self._group / "cgroup.procs").read_text().split():
            (self._group.parent / "cgroup.procs").write_text(pid)
        self._group.rmdir()

    def _used(self) -> float:
        if self._v1:
            return int((self._group / "cpuacct.usage").read_text()) / 1e9
        stat = dict(line.split() for line in (self._group / "cpu.stat").read_text().splitlines())
        return int(stat["usage_usec"]) / 1e6
