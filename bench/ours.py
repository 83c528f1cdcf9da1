"""A process of its own that looks at hosts as the controller does. Prints what it took, as JSON.

python -m bench.ours '{"count": 100, "passes": 5, "port": …, "identity": …, "state": …, "work": "look", "idle": 0}'
"""

from __future__ import annotations

import gc
import json
import os
import resource
import shlex
import sys
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from bench.hosts import MAX_AGE, specs
from controller.core.words import InSync, Layer
from controller.layers.order import ORDER
from controller.run.eyes import Eyes
from controller.world.fleet import SshWorld


@dataclass(frozen=True)
class _Identity:
    id: str = "bench"
    name: str = "bench:1"


class _None(StrEnum):
    NONE = "none"


def _layers(work: str) -> tuple[Layer, ...]:
    """Return what is asked: ``look``, the real layers; a file of recorded answers, which are given without finding
    them out and parsed as the real ones are; else the output of a command.
    """
    if work == "look":
        return ORDER
    if work.endswith(".json"):
        said = json.loads(Path(work).read_text())
        return tuple(
            replace(one, probe=f"printf '%s' {shlex.quote(said[one.name])}") for one in ORDER if one.name in said
        )
    return (Layer("host.text", "Host", _None, lambda *_: InSync(), probe=work, parse=lambda section: section.out),)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _resident() -> int:
    """Bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Look so many times, then be idle for so many seconds."""
    asked = json.loads(sys.argv[1])
    wanted = specs(asked["count"], asked["port"], asked["identity"])
    layers = _layers(asked["work"])
    world = SshWorld(wanted, asked["state"], _Identity(), layers, user_config=None)
    eyes = Eyes(world, layers, wanted)
    if asked["idle"]:
        gc.collect()
    empty = _resident()
    passes = []
    for _ in range(asked["passes"]):
        before, wall, cpu = world.counts, time.perf_counter(), _cpu()
        facts = eyes.look(wanted.hosts, MAX_AGE)
        took = {"wall": time.perf_counter() - wall, "cpu": _cpu() - cpu}
        after = world.counts
        failed = [f"{name}: {one.failure}" for name, one in facts.items() if one.failure]
        unknown = [f"{name} {key}" for name, one in facts.items() for key in layers_unknown(one.sections)]
        if failed or unknown:
            raise SystemExit(f"cannot take a time of looks that failed: {(failed + unknown)[:3]}")
        passes.append(
            {
                **took,
                "rounds": after.rounds - before.rounds,
                "reads": after.reads - before.reads,
                "logins": after.logins - before.logins,
            }
        )
    told: dict[str, object] = {"passes": passes}
    if asked["record"]:
        one = facts["host0"].raw
        Path(asked["record"]).write_text(json.dumps({name: section.out for name, section in one.items()}))
    if asked["idle"]:
        gc.collect()
        used = resource.getrusage(resource.RUSAGE_SELF)
        told["resident"] = _resident() - empty
        cpu, switches = _cpu(), used.ru_nvcsw
        time.sleep(asked["idle"])
        told["idle_cpu"] = _cpu() - cpu
        told["idle_switches"] = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - switches
    print(json.dumps(told))
    world.close()


def layers_unknown(sections: object) -> list[str]:
    """Return the names of sections that could not be understood."""
    assert isinstance(sections, dict)
    return [name for name, one in sections.items() if type(one).__name__ == "Unknown"]


if __name__ == "__main__":
    main()
