"""Run the benchmark and write ``bench/results.json``: ``make bench``, or ``bench/run --rounds N``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.contenders import TOOLS, Contender, Ours, all_of
from bench.hosts import CONTAINERS, MAX_AGE, NUMBER, Hosts, fragments
from bench.measure import Meter, Took
from controller.core import probe

RESULTS = Path(__file__).parent / "results.json"
MANY = 100


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="bench")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each; the best one counts, all are written")
    parser.add_argument("--idle-seconds", type=int, default=60)
    asked = parser.parse_args()
    before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "hosts").mkdir()
        hosts, meter = Hosts(folder / "hosts"), Meter()
        answers, answer, text = folder / "answers.json", folder / "answer", folder / "text"
        contenders: dict[str, list[Contender]] = {}
        try:
            hosts.ask_slow_tools()
            Ours(hosts, meter, folder, "look").record(answers)
            answer.write_text("".join(json.loads(answers.read_text()).values()))
            text.write_text((("0123456789abcdef" * 4)[:63] + "\n") * 64)
            contenders = all_of(hosts, meter, folder, answers, answer, text)
            results: dict[str, Any] = {
                "machine": {**_machine(), "load_before": before},
                "work": {
                    "look": "the real probe of a Proxmox host with 12 containers and 8 virtual machines, "
                    "slow tools from memory",
                    "answer": f"what that probe says ({answer.stat().st_size} bytes), without the work to find it out",
                    "text": f"cat of a file of {text.stat().st_size} bytes, as in published comparisons",
                },
                "hosts_own_seconds": _floor(hosts),
                "runs": {work: _runs(those, asked.rounds) for work, those in contenders.items()},
                "cost": _cost(contenders["look"][0]),
                "idle": {
                    "small answers": Ours(hosts, meter, folder, "printf ok").idle(NUMBER, asked.idle_seconds),
                    "real answers": Ours(hosts, meter, folder, "look").idle(NUMBER, 10),
                },
            }
        finally:
            for those in contenders.values():
                for contender in those:
                    contender.end()
            hosts.stop()
            meter.close()
    results["machine"]["load_after"] = os.getloadavg()
    results["best"] = _best(results["runs"])
    results["ratios"] = _ratios(results["best"])
    results["bars"] = _bars(results)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    _show(results)


def _machine() -> dict[str, object]:
    model = next(
        (line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    ansible = _said(str(TOOLS / "ansible"), "--version").split("\n")[0]
    pyinfra = _said(str(TOOLS / "pyinfra"), "--version")
    ssh = _said("ssh", "-V")
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "openssh": ssh,
        "paramiko": version("paramiko"),
        "ansible": ansible,
        "pyinfra": pyinfra,
        "note": "client and hosts share these cores: wall time has the hosts' own work in it, CPU time is the client's",
    }


def _said(*command: str) -> str:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout.strip()


def _floor(hosts: Hosts) -> float:
    """Return the seconds that a look's own work takes for a hundred hosts on the cores of this machine."""
    script = probe.script(fragments())

    def used(number: int) -> float:
        looks = "".join(probe.look(f"bench-{n}", MAX_AGE, CONTAINERS) for n in range(number))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(hosts.shell(0), input=script + looks, text=True, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return round((used(MANY + 1) - used(1)) / (os.cpu_count() or 1), 4)


def _runs(contenders: list[Contender], rounds: int) -> dict[str, dict[str, list[list[float]]]]:
    """Measure each contender in turn, several times over, so that noise falls on all alike."""
    runs: dict[str, dict[str, list[list[float]]]] = {}
    for count in (1, MANY):
        for number in range(rounds):
            for contender in contenders:
                cells = runs.setdefault(contender.name, {})
                print(f"{contender.name}, {count} hosts, round {number + 1}", file=sys.stderr, flush=True)
                cells.setdefault(f"cold {count}", []).append(_pair(contender.cold(count)))
                times = 5 if isinstance(contender, Ours) else 1
                cells.setdefault(f"warm {count}", []).extend(map(_pair, contender.warm(count, times)))
                contender.end()
    return runs


def _pair(took: Took) -> list[float]:
    return [round(took.wall, 5), round(took.cpu, 5)]


def _cost(ours: Contender) -> dict[str, float]:
    assert isinstance(ours, Ours)
    passes = ours.passes
    return {
        "round_trips_per_host": max(one["rounds"] for one in passes) / MANY,
        "answers_parsed": sum(one["reads"] for one in passes),
        "logins": sum(one["logins"] for one in passes),
    }


def _best(runs: dict[str, Any]) -> dict[str, Any]:
    """Return the least wall and the least CPU time of each cell, and the median of both."""
    return {
        work: {
            name: {
                cell: {
                    "wall": min(wall for wall, _ in took),
                    "cpu": min(cpu for _, cpu in took),
                    "median_wall": statistics.median(wall for wall, _ in took),
                    "median_cpu": statistics.median(cpu for _, cpu in took),
                }
                for cell, took in cells.items()
            }
            for name, cells in those.items()
        }
        for work, those in runs.items()
    }


def _ratios(best: dict[str, Any]) -> dict[str, Any]:
    """Return how many times more wall and CPU time than ours each one takes."""
    return {
        work: {
            name: {
                cell: {
                    key: round(value / those["reconcile"][cell][key], 2)
                    for key, value in took.items()
                    if those["reconcile"][cell][key]
                }
                for cell, took in cells.items()
            }
            for name, cells in those.items()
            if name != "reconcile"
        }
        for work, those in best.items()
    }


def _bars(results: dict[str, Any]) -> list[dict[str, object]]:
    warm, cold = f"warm {MANY}", f"cold {MANY}"
    bars: list[tuple[str, float, str, float]] = [
        ("round trips for a host, warm", results["cost"]["round_trips_per_host"], "<=", 1),
        ("answers parsed, warm and unchanged", results["cost"]["answers_parsed"], "<=", 0),
    ]
    for work, ratios in results["ratios"].items():
        bars += [
            (f"{work}: ansible raw, warm, wall", ratios["ansible raw"][warm]["wall"], ">=", 15),
            (f"{work}: ansible raw, warm, CPU", ratios["ansible raw"][warm]["cpu"], ">=", 50),
            (f"{work}: pyinfra, warm, wall", ratios["pyinfra"][warm]["wall"], ">=", 10),
            (f"{work}: pyinfra, warm, CPU", ratios["pyinfra"][warm]["cpu"], ">=", 25),
            (f"{work}: ansible raw, cold, wall", ratios["ansible raw"][cold]["wall"], ">=", 4),
        ]
    idle = results["idle"]["small answers"]
    bars += [
        (f"{NUMBER} idle connections, share of a core", round(idle["cpu_share_of_a_core"], 5), "<=", 0.005),
        (f"{NUMBER} idle connections, KiB each", round(idle["kib_each"], 1), "<=", 100),
    ]
    return [
        {"what": what, "is": value, "bar": f"{sign} {bar}", "met": value >= bar if sign == ">=" else value <= bar}
        for what, value, sign, bar in bars
    ]


def _show(results: dict[str, Any]) -> None:
    for work, those in results["best"].items():
        print(f"\n{work}: {results['work'][work]}; wall / client CPU in seconds, best of the runs")
        cells = list(next(iter(those.values())))
        print(f"{'':26}" + "".join(f"{cell:>20}" for cell in cells))
        for name, took in those.items():
            print(f"{name:26}" + "".join(f"{took[c]['wall']:>10.3f} /{took[c]['cpu']:>8.3f}" for c in cells))
    print(f"\nthe hosts' own work for {MANY} looks, on {os.cpu_count()} cores: {results['hosts_own_seconds']} s\n")
    for bar in results["bars"]:
        print(f"{'met   ' if bar['met'] else 'NOT   '} {bar['what']}: {bar['is']} (bar {bar['bar']})")


if __name__ == "__main__":
    main()
