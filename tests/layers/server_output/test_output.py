"""Output: what was answered is judged; what failed makes room for the last good unit, and is not tried again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.core.conditions import Status, Type, of_object
from controller.core.words import Block, Drift, InSync, Skipped, Step, Unseen
from controller.layers import server_output
from controller.layers.server_output.facts import Check, Figures, Judged, Output, Result, parse
from controller.layers.server_output.reasons import Reason
from controller.spec.ref import Ref
from tests.layers.checked import NAME, Rig, judged
from tests.layers.servers import document
from tests.layers.shell import ask, write

LAYER = "server.output"
FLAGS = "{port: 30000, flags: {context-length: 262144, tool-call-parser: qwen3_coder%s}}"
ROLLBACK = {"policy": "{rollback: true}"}


@pytest.fixture
def rig() -> Rig:
    """A fleet in which the server runs and answers right, and may be rolled back."""
    made = Rig(document(**ROLLBACK))
    assert made.actions() == ["install-unit", "start-server", "install-watch", "check-output"]
    return made


def upgrade(rig: Rig, version: str = "0.5.23", **more: str) -> None:
    """The spec asks for another version of the engine."""
    rig.want(document(engine=f"{{name: sglang, version: {version}}}", **{**ROLLBACK, **more}))


def talks_nonsense(rig: Rig) -> None:
    """Every environment that is not the one at work is of a version that talks nonsense."""
    good = rig.process.environment
    rig.look()  # makes the new one ready
    with rig.world.change("kpro5"):
        for path, environment in rig.image(129).environments.items():
            if path != good:
                environment.nonsense = "What What What What"


def conditions(rig: Rig) -> dict[Type, tuple[Status, str]]:
    found = of_object(Ref("ModelServer", NAME), rig.next(), {}, {})
    return {each.type: (each.status, each.reason) for each in found}


def test_what_passed_is_remembered_as_good(rig: Rig) -> None:
    marker = rig.file("marker.json")
    state = rig.file("state.json")
    assert state["good"] == {"unit": marker["digest"], "environment": marker["environment"]}
    assert state["failed"] == []
    assert rig.file("good/marker.json")["digest"] == marker["digest"]
    assert rig.actions() == []


def test_an_upgrade_that_talks_nonsense_is_rolled_back_and_not_tried_again(rig: Rig) -> None:
    good, environment = rig.file("marker.json"), rig.process.environment
    upgrade(rig)
    talks_nonsense(rig)
    report = rig.once()
    assert [each.step.action for each in report.ended] == [
        "install-unit", "restart-server", "install-watch", "check-output", "roll-back", "check-output",
    ]  # fmt: skip
    assert all(each.result == "worked" for each in report.ended), report.ended
    assert rig.process.environment == environment
    assert rig.file("marker.json")["digest"] == good["digest"]
    (failed,) = rig.file("state.json")["failed"]
    assert failed["unit"] == rig.file("marker.json")["instead_of"]
    assert "What What" in failed["evidence"]
    found = rig.drift(LAYER)
    assert found.reason == Reason.ROLLED_BACK
    assert isinstance(found.remedy, Block)
    assert conditions(rig)[Type.ROLLED_BACK] == (Status.TRUE, "rolled-back")
    assert rig.once().ended == []  # stays so


def test_a_changed_spec_is_tried_again(rig: Rig) -> None:
    upgrade(rig)
    talks_nonsense(rig)
    rig.once()
    assert conditions(rig)[Type.ROLLED_BACK][0] == Status.TRUE
    upgrade(rig, serve=FLAGS % ", mem-fraction-static: 0.8")
    with rig.world.change("kpro5"):
        for environment in rig.image(129).environments.values():
            environment.nonsense = ""
    assert rig.actions() == ["install-unit", "restart-server", "install-watch", "check-output"]
    assert conditions(rig)[Type.ROLLED_BACK] == (Status.FALSE, "InSync")
    assert "instead_of" not in rig.file("marker.json")


def test_a_spec_that_went_back_itself_is_in_sync(rig: Rig) -> None:
    upgrade(rig)
    talks_nonsense(rig)
    rig.once()
    rig.want(document(**ROLLBACK))
    assert rig.actions() == []


def test_an_upgrade_that_does_not_start_is_rolled_back(rig: Rig) -> None:
    environment = rig.process.environment
    upgrade(rig)
    rig.look()
    with rig.world.change("kpro5"):
        for path, other in rig.image(129).environments.items():
            if path != environment:
                other.fault = "ImportError: libcudart.so.13"
    report = rig.once()
    assert "roll-back" in [each.step.action for each in report.ended]
    assert rig.process.environment == environment
    assert rig.drift(LAYER).reason == Reason.ROLLED_BACK


def test_without_the_policy_a_failure_is_told_and_stays(rig: Rig) -> None:
    rig.want(document(engine="{name: sglang, version: 0.5.23}"))
    talks_nonsense(rig)
    report = rig.once()
    assert "roll-back" not in [each.step.action for each in report.ended]
    found = rig.drift(LAYER)
    assert found.reason == Reason.WRONG_OUTPUT
    assert isinstance(found.remedy, Block)
    assert "What What" in found.evidence["capital"]
    assert conditions(rig)[Type.READY][0] == Status.FALSE


def test_damaged_weights_are_caught_and_nothing_is_taken_for_good() -> None:
    rig = Rig(document(**ROLLBACK))
    rig.look()
    with rig.world.change("kpro5"):
        for model in rig.image(129).models.values():
            for file in model.files.values():
                file.sound = False
    rig.once()
    found = rig.drift(LAYER)
    assert found.reason == Reason.WRONG_OUTPUT
    assert isinstance(found.remedy, Block)
    assert "no other good one" in found.remedy.needs
    assert f"/opt/reconcile/server/{NAME}/state.json" not in rig.image(129).files


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        ("tokens_per_second: {at_least: 80}", Reason.TOO_SLOW),
        ("tokens_per_second: {at_most: 20}", Reason.TOO_FAST),
    ],
)
def test_other_bounds_are_measured_anew(rig: Rig, bounds: str, reason: Reason) -> None:
    rig.want(document(checks=f"{{{bounds}}}"))
    assert rig.next().verdict(Ref("ModelServer", NAME), "server.health").reason == "not-watched"  # type: ignore[union-attr]
    rig.once()
    assert rig.drift(LAYER).reason == reason


def test_the_plan_of_an_upgrade_goes_to_its_end(rig: Rig) -> None:
    upgrade(rig)
    actions = [each.step.action for each in rig.plan().steps]
    assert actions == ["install-unit", "restart-server", "install-watch", "check-output"]


def check(rig: Rig, **changes: Any) -> Any:
    view = judged(rig.look(), **changes)
    return server_output.check(view, view.specs.servers[NAME])


def output(rig: Rig, *checks: Check, **changes: Any) -> Output:
    found = rig.look().fact("kpro5", LAYER, server_output.OutputFacts).server(129, NAME)
    assert found is not None
    assert found.output is not None
    on = found.output
    values = {"unit": on.unit, "environment": on.environment, "process": on.process, "asked": on.asked, **changes}
    return Output(**values, checks=checks)


WRONG = Check("capital", Result.FAILED, "answered 'v'", 1.0, "wrong-output")
RIGHT = Check("capital", Result.PASSED)
UNDECIDED = Check("concurrency", Result.INCONCLUSIVE, "busy", 1.0, "inconclusive")


@pytest.mark.parametrize(
    ("checks", "changes", "verdict", "reason"),
    [
        ((RIGHT,), {}, InSync, ""),
        ((RIGHT,), {"process": "1 1"}, Drift, Reason.NOT_MEASURED),
        ((RIGHT,), {"unit": "other"}, Drift, Reason.NOT_MEASURED),
        ((RIGHT,), {"asked": "other"}, Drift, Reason.NOT_MEASURED),
        ((WRONG, RIGHT), {}, Drift, Reason.WRONG_OUTPUT),
        ((Check("drafts", Result.FAILED, "1 %", 0.0, "drafts-refused"),), {}, Drift, Reason.DRAFTS_REFUSED),
        ((Check("speed", Result.FAILED, "1", 0.0, "slower-than-before"),), {}, Drift, Reason.SLOWER_THAN_BEFORE),
        ((Check("new", Result.FAILED, "?", 0.0, "of a newer release"),), {}, Drift, Reason.WRONG_OUTPUT),
        ((RIGHT, UNDECIDED), {}, InSync, ""),
        ((UNDECIDED,), {}, Unseen, Reason.INCONCLUSIVE),
    ],
)
def test_what_was_answered_is_judged(
    rig: Rig, checks: tuple[Check, ...], changes: dict[str, Any], verdict: type[object], reason: str
) -> None:
    found = check(rig, output=output(rig, *checks, **changes))
    assert isinstance(found, verdict), found
    assert getattr(found, "reason", "") == reason


def test_a_slower_run_of_the_same_unit_is_no_reason_to_go_back(rig: Rig) -> None:
    slow = Check("speed", Result.FAILED, "1", 0.0, "slower-than-before")
    good = server_output.Good("another", "e")
    assert isinstance(check(rig, output=output(rig, slow), good=good).remedy, Block)
    assert isinstance(check(rig, output=output(rig, WRONG), good=good).remedy, Step)


def test_a_stopped_server_is_asked_nothing(rig: Rig) -> None:
    rig.want(document(state="stopped"))
    rig.once()
    assert isinstance(rig.verdict(LAYER), Skipped)


HERE = "/opt/reconcile/server/qwen"
OUTPUT = (
    '{"schema": 1, "at": 12.5, "measured_on": {"unit": "u", "environment": "e", "process": "1 2", "asked": "a"},'
    ' "checks": [{"name": "capital", "result": "passed", "evidence": "x", "reason": "", "seconds": 0.5}],'
    ' "figures": {"tokens_per_second": 51.5, "usual_tokens_per_second": null}, "history": [51.5]}'
)
STATE = '{"schema": 1, "good": {"unit": "u", "environment": "e"}, "failed": []}'


def look(root: Path, files: dict[str, str]) -> Judged:
    write(root, {"/proc/net/unix": "Num RefCount\n", **files})
    (found,) = parse(ask(server_output.LAYER.probe, root)).of(None) or ()
    return found


def test_the_fragment_reads_what_was_left(tmp_path: Path) -> None:
    found = look(tmp_path, {f"{HERE}/checks/output.json": OUTPUT, f"{HERE}/state.json": STATE})
    assert found.good == server_output.Good("u", "e")
    assert found.output == Output(
        "u", "e", "1 2", "a", (Check("capital", Result.PASSED, "x", 0.5),), Figures(51.5), 12.5
    )


@pytest.mark.parametrize(
    "files",
    [
        {"state.json": "{"},
        {"state.json": STATE.replace("1", "2", 1)},
        {"checks/output.json": OUTPUT.replace("51.5", "Infinity", 1)},
        {"checks/output.json": OUTPUT.replace("passed", "great")},
        {"checks/output.json": "[]"},
    ],
)
def test_garbage_is_unknown_of_that_server_alone(tmp_path: Path, files: dict[str, str]) -> None:
    assert look(tmp_path, {f"{HERE}/{name}": text for name, text in files.items()}).unreadable
