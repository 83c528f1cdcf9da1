"""One run of the canaries over a server, its result in a file, and what a roll-back needs of it."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import canaries, files, good
from .asking import NoAnswer, Server
from .place import Place

RESULT = Path("checks/output.json")
KEPT = 20
LONG = ("needle",)
"""Checks that cost a busy server minutes."""


def run(place: Place, patience: float = 300.0, again: bool = False) -> dict[str, Any]:
    """Ask everything, judge it, write the result, and note what is good; one run at a time.

    ``again`` is a later run on the same: a long text is not read once more, what came of the first time stays.

    Raises OSError, subprocess.SubprocessError, NoAnswer.
    """
    with _alone(place.folder):
        return _run(place, patience, again)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    (folder / RESULT).parent.mkdir(mode=0o755, exist_ok=True)
    with (folder / RESULT).with_name("lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(place: Place, patience: float, again: bool) -> dict[str, Any]:
    before = place.state().process
    measured_on = place.measured_on(before)
    server = place.server()
    asker = canaries.Asker(
        server,
        lambda: place.metrics(server),
        dict(place.settings["canaries"]["plainly"]),
        patience,
        place.settings["canaries"]["timeout"],
        _context(place, server),
    )
    earlier = files.read(place.folder / RESULT) or {}
    chosen = canaries.chosen(place.settings["canaries"])
    kept = _kept(earlier, measured_on, LONG) if again else []
    found = [canaries.check(canary, asker) for canary in chosen if canary.name not in {each.name for each in kept}]
    found += kept
    figures = canaries.measure(asker)
    history = _history(earlier, measured_on)
    usual = canaries.usual(history)
    slow = earlier.get("slow_runs", 0) if history else 0
    judged = canaries.judge_figures(figures, place.settings["canaries"], history, slow)
    if any(each.reason in ("too-slow", "slower-than-before") for each in judged):
        # What shares the machine slows a run, too: more of them before it is said.
        figures = canaries.measure(asker, 4, figures)
        judged = canaries.judge_figures(figures, place.settings["canaries"], history, slow)
    found += judged
    after = place.state().process
    if not before or before != after:
        raise NoAnswer(
            f"the server was started anew while it was asked ({before or 'none'} then, {after or 'none'} now)"
        )
    is_slow = any(each.reason == "slower-than-before" for each in judged)
    if figures.tokens_per_second is not None and not is_slow:
        history.append(figures.tokens_per_second)
    result = {
        "schema": files.SCHEMA,
        "at": round(time.time(), 3),
        "measured_on": measured_on,
        "checks": [each.plain() for each in found],
        "figures": {
            "tokens_per_second": figures.tokens_per_second,
            "first_token_seconds": figures.first_token_seconds,
            "draft_acceptance": figures.draft_acceptance,
            "accepted_length": figures.accepted_length,
            "usual_tokens_per_second": usual,
        },
        "history": history[-KEPT:],
        "slow_runs": slow + 1 if is_slow else 0,
        "failures": _failures(earlier, found),
    }
    files.write(place.folder / RESULT, result)
    if not any(each.result == "failed" for each in found) and any(each.result == "passed" for each in found):
        good.note(place, measured_on)
    return result


def _context(place: Place, server: Server) -> int | None:
    """The longest text in tokens that the server says it takes, None when it does not say."""
    try:
        models = json.loads(server.get(place.settings["http"]["models"], 20.0)[1])["data"]
        lengths = [each.get("max_model_len") for each in models if each.get("id") == server.model]
    except (NoAnswer, ValueError, KeyError, TypeError, AttributeError):
        return None
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)


def _kept(earlier: dict[str, Any], measured_on: dict[str, str], names: tuple[str, ...]) -> list[canaries.Found]:
    """The checks of these names that an earlier run on the same has decided."""
    if earlier.get("measured_on") != measured_on:
        return []
    return [
        canaries.Found(each["name"], each["result"], each["evidence"], each["reason"], each["seconds"])
        for each in earlier["checks"]
        if each["name"] in names and each["result"] != "inconclusive"
    ]


def _failures(earlier: dict[str, Any], found: list[canaries.Found]) -> dict[str, int]:
    """How often each check has failed for each reason, since this server was asked first: "capital wrong-output"."""
    counts = dict(earlier.get("failures") or {})
    for each in found:
        if each.result == "failed":
            counts[f"{each.name} {each.reason}"] = counts.get(f"{each.name} {each.reason}", 0) + 1
    return counts


def _history(earlier: dict[str, Any], measured_on: dict[str, str]) -> list[float]:
    """The speeds of earlier runs of the same unit."""
    if (earlier.get("measured_on") or {}).get("unit") != measured_on["unit"]:
        return []
    return [float(speed) for speed in earlier.get("history", [])][-KEPT:]
