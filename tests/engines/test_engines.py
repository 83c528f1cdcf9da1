"""What runs beside a server, against real engines: sound weights pass, damaged ones are caught with evidence."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.engines.serving import look, serving, until_ready

RUNS = int(os.environ.get("RECONCILE_RUNS", "3"))
"""How often the sound model is checked; make test-engines asks for 200."""


@pytest.mark.timeout(3600)
def test_a_sound_model_passes_and_is_never_flagged(engine_name: str, models: Path, tmp_path: Path) -> None:
    with serving(engine_name, models / "good", tmp_path / "server", min_context=320) as one:
        health = until_ready(one)
        assert health["ladder"][0] in ("no-answer", "wrapper-only", "generates")
        figures = []
        for _ in range(RUNS):
            found = one.output()
            results = {each["name"]: each["result"] for each in found["checks"]}
            assert [each for each in found["checks"] if each["result"] != "passed"] == []
            figures.append(found["figures"])
        expected = ["capital", "garbage", "repetition", "streaming", "concurrency", "arithmetic"]
        assert {*expected, "tool-call", "reasoning", "needle", "speed"} == set(results)
        speeds = sorted(each["tokens_per_second"] for each in figures)
        print(
            f"\n{engine_name}: ready after {health['took']:.0f} s; {RUNS} runs, never flagged; tokens/s "
            f"{speeds[0]:.0f} to {speeds[-1]:.0f}, median {speeds[len(speeds) // 2]:.0f}; "
            f"drafts accepted {figures[-1]['draft_acceptance']}"
        )


def test_damaged_weights_are_healthy_and_caught(engine_name: str, models: Path, tmp_path: Path) -> None:
    with serving(engine_name, models / "damaged", tmp_path / "server") as one:
        health = until_ready(one)
        assert health["level"] == "generates"
        found = one.output()
        failed = {each["name"]: each["evidence"] for each in found["checks"] if each["result"] == "failed"}
        assert {"capital", "arithmetic", "concurrency"} <= set(failed)
        assert "answered" in failed["capital"] or "answer" in failed["capital"]
        assert not (one.folder / "state.json").exists()  # it is not taken for good
        print(f"\n{engine_name}: level {health['level']}; failed {', '.join(failed)}; {failed['capital'][:200]}")


def test_what_hangs_is_told_from_what_runs_and_from_what_is_gone(
    engine_name: str, models: Path, tmp_path: Path
) -> None:
    with serving(engine_name, models / "good", tmp_path / "server") as one:
        assert look(one)["level"] == "no-answer"
        until_ready(one)
        os.killpg(one.process.pid, signal.SIGSTOP)
        try:
            hanging = look(one)
        finally:
            os.killpg(one.process.pid, signal.SIGCONT)
        assert hanging["level"] in ("no-answer", "generation-fails"), hanging
        assert hanging["process"]
        until_ready(one)
        os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait(timeout=60)
        until = time.monotonic() + 60
        while (gone := look(one))["process"]:
            assert time.monotonic() < until, gone
        assert gone["level"] == "no-answer"
