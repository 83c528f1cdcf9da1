"""As many schedules as the time allows, on all cores: ``python -m tests.proof.soak SECONDS``.

``python -m tests.proof.soak --replay 'SCHEDULE or SEED'`` plays one and tells what happened.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.proof.fleets import STARTS, start
from tests.proof.schedule import Play, Schedule, smallest

SHARE = 25  # schedules that a worker plays between two looks at the clock
SHOWN = 10  # failures that are told of in full
PATIENCE = 60.0  # seconds of one schedule, after which it hangs


@dataclass
class Tally:
    """What many schedules came to."""

    schedules: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[int, str, str]] = field(default_factory=list)  # seed, schedule, violation

    def add(self, other: Tally) -> None:
        """Count another one's as well."""
        self.schedules += other.schedules
        self.failed += other.failed
        for mine, theirs in ((self.faults, other.faults), (self.checks, other.checks), (self.steps, other.steps)):
            mine.update(theirs)


def play(seeds: range) -> Tally:
    """Play the schedules of seeds."""
    tally = Tally()
    for seed in seeds:
        schedule = Schedule.of(seed)
        book = Play(schedule).run()
        tally.schedules += 1
        tally.faults.update(book.faults)
        tally.checks.update(book.checks)
        tally.steps.update(book.steps)
        tally.failed += [(seed, str(schedule), violation) for violation in book.violations[:1]]
    return tally


def _work(connection: Connection, first: int, stride: int, until: float) -> None:
    warnings.simplefilter("error", ResourceWarning)
    seed = first
    while time.monotonic() < until:
        connection.send(play(range(seed, seed + SHARE)))
        seed += stride * SHARE
    connection.send(None)


def soak(seconds: float, first: int, workers: int) -> Tally:
    """Play schedules from the seed ``first`` on, in blocks of ``SHARE`` that the workers take in turn."""
    until, tally = time.monotonic() + seconds, Tally()
    for name in STARTS:
        start(name)  # once, and not in every worker
    context = multiprocessing.get_context("fork")
    connections: dict[Connection, multiprocessing.process.BaseProcess] = {}
    for number in range(workers):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(there, first + number * SHARE, workers, until))
        process.start()
        there.close()
        connections[here] = process
    while connections:
        for ready in wait(list(connections), timeout=SHARE * PATIENCE):
            assert isinstance(ready, Connection)
            try:
                got = ready.recv()
            except EOFError:
                raise SystemExit("a worker died") from None
            if got is None:
                connections.pop(ready).join()
            else:
                tally.add(got)
                if sys.stderr.isatty():
                    print(f"\r{tally.schedules} schedules, {len(tally.failed)} violations ", end="", file=sys.stderr)
    return tally


def tell(tally: Tally, first: int, seconds: float) -> None:
    """Print the figures; the last line is the one that is promised."""
    for title, counts in (("faults", tally.faults), ("invariants checked", tally.checks), ("steps", tally.steps)):
        print(f"{title}:")
        for name, count in sorted(counts.items()):
            print(f"  {count:9d}  {name}")
    for seed, schedule, violation in tally.failed[:SHOWN]:
        parsed = Schedule.parse(schedule)
        invariant = violation.partition(":")[0]
        least = smallest(parsed, lambda s, i=invariant: any(v.startswith(f"{i}:") for v in Play(s).run().violations))
        print(f"seed {seed}: {violation}\n  smallest: {least}")
    print(f"seeds {first} and on, {seconds:.0f} s, {os.cpu_count()} cores")
    faults = sum(tally.faults.values())
    print(f"{tally.schedules} schedules, {faults} faults, {len(tally.failed)} violations")


def replay(what: str) -> int:
    """Play one schedule again, given as text or as a seed, and tell everything."""
    schedule = Schedule.of(int(what)) if what.isdigit() else Schedule.parse(what)
    book = Play(schedule).run()
    print(schedule, *book.log, sep="\n")
    return 1 if book.violations else 0


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.soak", description=__doc__)
    parser.add_argument("seconds", nargs="?", type=float, default=60.0)
    parser.add_argument("--first", type=int, help="the first seed; by chance")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--replay", help="a schedule's text, or its seed")
    given = parser.parse_args()
    if given.replay is not None:
        return replay(given.replay)
    first = given.first if given.first is not None else random.SystemRandom().randrange(10**9)
    tally = soak(given.seconds, first, given.workers)
    tell(tally, first, given.seconds)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[2])
    sys.exit(main())
