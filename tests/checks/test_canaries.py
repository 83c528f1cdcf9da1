"""The canaries over a server that answers as it is told to: what is right passes, each fault is found by its check."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from controller.layers.shared.checks import canaries, files, output
from controller.layers.shared.checks.asking import NoAnswer
from controller.layers.shared.checks.place import UnitState
from tests.checks.engine import PROSE, Engine, playing


def run(folder: Path, engine: Engine, patience: float = 4.0, **more: Any) -> dict[str, Any]:
    with playing(folder / "server", engine, **more) as place:
        return output.run(place, patience)


def results(found: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["result"] for each in found["checks"]}


def failed(found: dict[str, Any]) -> list[str]:
    return [name for name, result in results(found).items() if result == "failed"]


def test_a_sound_server_passes_everything(tmp_path: Path) -> None:
    engine = Engine()
    found = run(tmp_path, engine, needle=2000, checks=["arithmetic", "tool-call", "reasoning", "structured"])
    assert set(results(found).values()) == {"passed"}, found["checks"]
    assert list(results(found)) == [
        "capital", "arithmetic", "garbage", "repetition", "streaming", "concurrency", "tool-call", "reasoning",
        "structured", "needle", "speed",
    ]  # fmt: skip
    assert found["measured_on"] == {"unit": "u1", "environment": "e1", "process": "1 1", "asked": "a"}
    assert all(body["temperature"] == 0 for body in engine.requests)
    assert json.loads((tmp_path / "server/checks/output.json").read_text()) == found
    assert json.loads((tmp_path / "server/state.json").read_text())["good"] == {"unit": "u1", "environment": "e1"}


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        ({"wrong": {"*": "v\ufffd" * 30}}, {"capital", "arithmetic", "garbage", "repetition", "concurrency"}),
        ({"wrong": {"*": ""}}, {"capital", "arithmetic", "garbage", "repetition", "streaming", "concurrency"}),
        ({"wrong": {"17 + 25": "43"}}, {"arithmetic"}),
        ({"wrong": {"Japan": "Paris"}}, {"concurrency"}),
        ({"wrong": {"lighthouse works": PROSE + " What" * 80}}, {"repetition"}),
        ({"wrong": {"lighthouse works": "!" * 200}}, {"garbage", "repetition"}),
        ({"parses_tools": False}, {"tool-call"}),
        ({"parses_thoughts": False}, {"reasoning"}),
        ({"thinks": False}, {"reasoning"}),
        ({"streams_other": "Oslo"}, {"streaming"}),
        ({"wrong": {"door of the": "I cannot find it."}}, {"needle"}),
        ({"wrong": {"JSON object": "Ann is 31."}}, {"structured"}),
    ],
)
def test_each_fault_is_found_by_its_check_with_evidence(
    tmp_path: Path, fault: dict[str, Any], caught: set[str]
) -> None:
    asked = ["arithmetic", "tool-call", "reasoning", "structured"]
    found = run(tmp_path, Engine(**fault), needle=500, checks=asked)
    assert caught <= set(failed(found))
    if len(caught) == 1:
        assert set(failed(found)) == caught, found["checks"]
    assert all(
        each["evidence"] and each["reason"] == "wrong-output" for each in found["checks"] if each["result"] == "failed"
    )
    assert not (tmp_path / "server/state.json").exists()


def test_eight_are_asked_at_once(tmp_path: Path) -> None:
    together = threading.Barrier(8, timeout=120)

    class Together(Engine):
        def message(self, body: dict[str, Any]) -> dict[str, Any]:
            together.wait()  # answers when all eight have come
            return super().message(body)

    with playing(tmp_path / "server", Together(has_metrics=False)) as place:
        (concurrency,) = [each for each in canaries.chosen(place.settings["canaries"]) if each.name == "concurrency"]
        replies = concurrency.ask(canaries.Asker(place.server(), lambda: None, timeout=120))
    assert concurrency.judge(replies) == ""


def test_one_wrong_answer_is_asked_again(tmp_path: Path) -> None:
    class Once(Engine):
        def message(self, body: dict[str, Any]) -> dict[str, Any]:
            said = super().message(body)
            first = self.asked_once[body["messages"][0]["content"]] == 1
            return {"content": "London"} if first and "France" in body["messages"][0]["content"] else said

    found = run(tmp_path, Once())
    assert results(found)["capital"] == "passed"


def test_a_control_that_passes_makes_its_check_undecided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canaries.judging, "names_one_of", lambda reply, good: "")
    found = run(tmp_path, Engine())
    assert {results(found)[name] for name in ("capital", "concurrency")} == {"inconclusive"}
    assert "control did not fail" in found["checks"][0]["evidence"]


def test_what_it_does_not_take_is_left_out(tmp_path: Path) -> None:
    engine = Engine(refuses=("chat_template_kwargs",), thinks=False)
    found = run(tmp_path, engine, checks=["arithmetic"])
    assert failed(found) == []
    assert len([body for body in engine.requests if "chat_template_kwargs" in body]) == 1


def test_a_short_context_is_kept_to(tmp_path: Path) -> None:
    assert failed(run(tmp_path, Engine(context=500))) == []


def test_it_uses_the_servers_own_key_and_does_not_show_it(tmp_path: Path) -> None:
    engine = Engine(key="s3cr3t")
    with playing(tmp_path / "server", engine) as place:
        (place.folder / "config.yaml").write_text('api-key: "s3cr3t"\n')
        found = output.run(place)
    assert failed(found) == []
    assert "s3cr3t" not in json.dumps(found)
    with playing(tmp_path / "other", engine) as place:
        (place.folder / "secrets.env").write_text('VLLM_API_KEY="s3cr3t"\n')
        assert failed(output.run(place)) == []


def test_a_refused_key_is_no_failure_of_the_model(tmp_path: Path) -> None:
    found = run(tmp_path, Engine(key="s3cr3t"))
    assert set(results(found).values()) == {"inconclusive"}
    assert not (tmp_path / "server/state.json").exists()


def test_a_full_queue_is_waited_for_and_nothing_is_asked(tmp_path: Path) -> None:
    engine = Engine(waiting=3)
    found = run(tmp_path, engine, patience=2.0, checks=[])
    assert set(results(found).values()) == {"inconclusive"}
    assert engine.requests == []


def test_a_dead_engine_behind_a_living_wrapper_fails(tmp_path: Path) -> None:
    assert "capital" in failed(run(tmp_path, Engine(status=500), checks=[]))


def test_speed_is_judged_by_bounds(tmp_path: Path) -> None:
    engine = Engine(piece_seconds=0.005)
    found = run(tmp_path / "1", engine, tokens_per_second=[1e6, None])
    assert [each["reason"] for each in found["checks"] if each["name"] == "speed"] == ["too-slow"]
    speed = found["figures"]["tokens_per_second"]
    assert 1 < speed < 1 / 0.005
    found = run(tmp_path / "2", engine, tokens_per_second=[None, 1.0])
    assert [each["reason"] for each in found["checks"] if each["name"] == "speed"] == ["too-fast"]
    assert failed(run(tmp_path / "3", engine, tokens_per_second=[1.0, 1e6])) == []


def test_speed_is_not_judged_while_others_are_served(tmp_path: Path) -> None:
    class Busy(Engine):
        def message(self, body: dict[str, Any]) -> dict[str, Any]:
            self.generation_tokens += 500
            return super().message(body)

    found = run(tmp_path, Busy(), tokens_per_second=[1e6, None])
    (speed,) = [each for each in found["checks"] if each["name"] == "speed"]
    assert (speed["result"], speed["evidence"]) == ("inconclusive", "it serves others")


def test_far_slower_than_it_used_to_be_is_told(tmp_path: Path) -> None:
    engine = Engine(piece_seconds=0.02)
    with playing(tmp_path / "server", engine, checks=[]) as place:
        first = output.run(place)
        first["history"] = [500.0] * 6
        files.write(place.folder / "checks/output.json", first)
        for result in ("inconclusive", "inconclusive", "failed"):
            found = output.run(place)
            (speed,) = [each for each in found["checks"] if each["name"] == "speed"]
            assert (speed["reason"], speed["result"]) == ("slower-than-before", result)
        assert found["figures"]["usual_tokens_per_second"] == 500.0
        files.write(place.folder / "marker.json", {"digest": "u2"})
        assert failed(output.run(place)) == []  # another unit has no past


@pytest.mark.parametrize(
    ("drafts", "bounds", "reason"),
    [
        ((100, 1), [0.3, 0.98], "drafts-refused"),
        ((100, 100), [0.3, 0.98], "drafts-too-good"),
        ((100, 60), [0.3, 0.98], ""),
        ((0, 0), [0.3, 0.98], "no-drafts"),
    ],
)
def test_acceptance_of_drafts_is_judged(
    tmp_path: Path, drafts: tuple[int, int], bounds: list[float], reason: str
) -> None:
    found = run(tmp_path, Engine(drafts=drafts), draft_acceptance=bounds)
    (check,) = [each for each in found["checks"] if each["name"] == "drafts"]
    assert check["reason"] == reason, check
    assert check["result"] == ("failed" if reason else "passed")
    if drafts[0]:
        assert found["figures"]["draft_acceptance"] == pytest.approx(drafts[1] / drafts[0])


def test_a_server_that_was_restarted_meanwhile_is_not_judged(tmp_path: Path) -> None:
    with playing(tmp_path / "server", Engine(), checks=[]) as place:
        runs = iter([UnitState("active", 0, "1 1", ""), UnitState("active", 1, "2 9", "")])
        place.state = lambda: next(runs)  # type: ignore[method-assign]
        with pytest.raises(NoAnswer, match="anew"):
            output.run(place)
        assert not (place.folder / "checks/output.json").exists()


def test_a_later_run_does_not_read_a_long_text_again(tmp_path: Path) -> None:
    engine = Engine()
    with playing(tmp_path / "server", engine, checks=[], needle=500) as place:
        output.run(place)
        before = len([body for body in engine.requests if canaries.NEEDLE in body["messages"][0]["content"]])
        found = output.run(place, again=True)
        after = len([body for body in engine.requests if canaries.NEEDLE in body["messages"][0]["content"]])
        assert (before, after) == (1, 1)
        assert results(found)["needle"] == "passed"
        place.said = UnitState("active", 0, "2 2", "")
        assert results(output.run(place, again=True))["needle"] == "passed"  # another run of the server is asked anew
        assert len([body for body in engine.requests if canaries.NEEDLE in body["messages"][0]["content"]]) == 2


def test_failures_are_counted(tmp_path: Path) -> None:
    engine = Engine(wrong={"France": "London"})
    with playing(tmp_path / "server", engine, checks=[]) as place:
        for _ in range(2):
            output.run(place)
        engine.wrong = {}
        assert output.run(place)["failures"] == {"capital wrong-output": 2, "concurrency wrong-output": 2}


def test_a_good_server_is_never_flagged(tmp_path: Path) -> None:
    with playing(tmp_path / "server", Engine(piece_seconds=0.005)) as place:
        for _ in range(10):
            assert set(results(output.run(place)).values()) == {"passed"}
