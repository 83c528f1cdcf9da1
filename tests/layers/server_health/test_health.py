"""Health: what the watch saw is judged; what runs and generates nothing is restarted, what cannot start is told of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.core.words import Block, Drift, InSync, Step, Unseen, Wait
from controller.layers import server_health
from controller.layers.server_health.facts import Crash, Health, Level, parse
from controller.layers.server_health.reasons import Reason
from controller.layers.shared import checking, server_physics
from controller.layers.shared.truth import End
from controller.spec.ref import Ref
from tests.layers.checked import NAME, Rig, seen
from tests.layers.servers import document
from tests.layers.shell import ask, write

LAYER = "server.health"


@pytest.fixture
def rig() -> Rig:
    """A fleet in which the server runs, is watched and has answered."""
    made = Rig()
    assert made.actions() == ["install-unit", "start-server", "install-watch", "check-output"]
    return made


def test_a_second_pass_does_nothing(rig: Rig) -> None:
    assert rig.actions() == []
    assert isinstance(rig.verdict(LAYER), InSync)


def test_the_plan_foretells_watch_and_questions() -> None:
    foretold = Rig().plan()
    assert [each.step.action for each in foretold.steps] == [
        "install-unit",
        "start-server",
        "install-watch",
        "check-output",
    ]


def test_what_runs_and_hangs_is_restarted(rig: Rig) -> None:
    with rig.world.change("kpro5"):
        rig.process.hangs = True
    found = rig.drift(LAYER)
    assert found.reason == Reason.STUCK
    assert [str(each) for each in rig.step(LAYER).disrupts] == ["restart-server:ModelServer/qwen"]
    assert rig.actions() == ["restart-ill-server", "check-output"]
    assert not rig.process.hangs


def test_a_watch_that_somebody_removed_comes_back_and_the_server_goes_on(rig: Rig) -> None:
    began = rig.process.started
    with rig.world.change("kpro5"):
        del rig.image(129).files[f"/opt/reconcile/server/{NAME}/watch.marker"]
    assert rig.drift(LAYER).reason == Reason.NOT_WATCHED
    assert rig.step(LAYER).disrupts == ()
    assert rig.actions() == ["install-watch"]
    assert rig.process.started == began


def judge(rig: Rig, **changes: Any) -> Any:
    view = seen(rig.look(), **changes)
    try:
        return server_health.check(view, view.specs.servers[NAME])
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("changes", "reason", "remedy"),
    [
        ({"silent": True}, Reason.WATCH_SILENT, Step),
        ({"level": Level.NO_ANSWER, "took": None, "starting": 30.0}, Reason.STARTING, Wait),
        ({"level": Level.WRAPPER_ONLY, "took": None, "starting": 1199.0}, Reason.STARTING, Wait),
        ({"level": Level.NO_ANSWER, "took": None, "starting": 1300.0}, Reason.NOT_READY_IN_TIME, Block),
        ({"level": Level.GENERATION_FAILS, "took": None, "starting": 1300.0}, Reason.NOT_READY_IN_TIME, Block),
        ({"level": Level.WRONG_MODEL, "evidence": "it serves gpt2"}, Reason.WRONG_MODEL, Block),
        ({"level": Level.GENERATION_FAILS, "stuck": 100.0, "waiting": 4}, Reason.STUCK, Wait),
        ({"level": Level.GENERATION_FAILS, "stuck": 400.0, "waiting": 4}, Reason.STUCK, Step),
        ({"level": Level.GENERATION_FAILS}, Reason.GENERATION_FAILS, Step),
        ({"process": "", "level": Level.NO_ANSWER}, Reason.STARTING, Wait),
        ({"process": "4711 1"}, Reason.STARTING, Wait),  # it has not seen the new process yet
        ({"level": Level.NO_ANSWER, "ends": 3, "process": ""}, Reason.CRASH_LOOP, Block),
    ],
)
def test_what_was_seen_is_judged(rig: Rig, changes: dict[str, Any], reason: Reason, remedy: type[object]) -> None:
    found = judge(rig, **changes)
    assert isinstance(found, Drift), found
    assert (found.reason, type(found.remedy)) == (reason, remedy)


def test_busy_is_not_dead(rig: Rig) -> None:
    assert isinstance(judge(rig, level=Level.GENERATES, running=40, waiting=200, evidence="its counters move"), InSync)


@pytest.mark.parametrize("changes", [{"level": Level.INCONCLUSIVE, "evidence": "once"}, {"unreadable": "no JSON"}])
def test_what_cannot_be_told_is_unknown_and_nothing_follows(rig: Rig, changes: dict[str, Any]) -> None:
    view = seen(rig.look(), **changes)
    from controller.core.next_steps import next_steps
    from tests.layers.checked import LAYERS

    upcoming = next_steps(LAYERS, view)
    assert isinstance(upcoming.verdict(Ref("ModelServer", NAME), LAYER), Unseen)
    assert [step for step in upcoming.ready if step.object.name == NAME] == []


def test_a_loop_is_told_with_the_log_and_its_cause(rig: Rig) -> None:
    crash = Crash("signal: killed 9", ("loading", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"))
    found = judge(rig, level=Level.NO_ANSWER, ends=4, crashes=(crash,), process="")
    assert isinstance(found, Drift)
    assert found.reason == Reason.CRASH_LOOP
    assert "a GPU's memory ran out" in found.message
    assert isinstance(found.remedy, Block)
    assert "lower the part of memory" in found.remedy.needs
    assert "CUDA out of memory" in found.evidence["log"]


def test_the_budget_is_the_specs_own(rig: Rig) -> None:
    rig.want(document(checks="{startup_budget: 1h}"))
    found = judge(rig, level=Level.NO_ANSWER, took=None, starting=1300.0)
    assert found.reason == Reason.STARTING


def test_ends_of_the_hour_are_seen_in_the_simulated_fleet(rig: Rig) -> None:
    with rig.world.change("kpro5"):
        rig.running.processes = []
        at = int(rig.fleet.now)
        rig.running.ends[NAME] = [End(at, "signal", "killed", "KILL", ["ValueError: no"])] * 3
    health = next(each for each in rig.look().fact("kpro5", LAYER, server_health.HealthFacts).of(129) or ())
    assert (health.ends, health.level, health.crashes[-1].lines) == (3, Level.NO_ANSWER, ("ValueError: no",))


def test_it_waits_for_a_start_until_it_is_ready(rig: Rig) -> None:
    server_physics.kill(rig.fleet, rig.kpro5, 129, f"reconcile-{NAME}.service")
    found = rig.drift(LAYER)
    assert found.reason == Reason.STARTING
    assert isinstance(found.remedy, Wait)
    assert rig.actions() == ["check-output"]


HERE = "/opt/reconcile/server/qwen"
HEALTH = (
    '{"schema": 1, "level": "generates", "evidence": "", "process": "4711 12345", "unit": "active", "starting": 0,'
    ' "took": 41.5, "stuck": 0, "running": 2, "waiting": null, "ends": 1, "crashes": [{"how": "signal: killed 9",'
    ' "lines": ["a", "b"], "last": true}]}\n'
)


def look(root: Path, files: dict[str, str]) -> Health:
    write(root, {"/proc/net/unix": "Num RefCount\n", "/proc/uptime": "1000.50 1.00\n", **files})
    facts = parse(ask(server_health.LAYER.probe, root))
    (health,) = facts.of(None) or ()
    return health


def test_the_fragment_reads_what_the_watch_left(tmp_path: Path) -> None:
    files = {f"{HERE}/health.json": HEALTH, f"{HERE}/watch.marker": '{"digest": "d"}', f"{HERE}/health.beat": "990\n"}
    health = look(tmp_path, files)
    assert health == Health(
        "qwen", Level.GENERATES, "", "4711 12345", "active", 0.0, 41.5, 0.0, 2, None, 1,
        (Crash("signal: killed 9", ("a", "b")),), "d", silent=False,
    )  # fmt: skip
    assert health.started == 12345


@pytest.mark.parametrize("beat", ["", "700\n", "1200\n", "now\n"])
def test_a_watch_that_is_not_heard_of_is_silent(tmp_path: Path, beat: str) -> None:
    files = {f"{HERE}/health.json": HEALTH, f"{HERE}/watch.marker": '{"digest": "d"}', f"{HERE}/health.beat": beat}
    assert look(tmp_path, files).silent


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        HEALTH.replace("1,", "9,", 1),
        HEALTH.replace("4711 12345", "x"),
        HEALTH.replace("41.5", "NaN"),
    ],
)
def test_garbage_is_unknown_of_that_server_alone(tmp_path: Path, text: str) -> None:
    health = look(tmp_path, {f"{HERE}/health.json": text, f"{HERE}/watch.marker": '{"digest": "d"}'})
    assert health.unreadable


def test_a_link_in_a_place_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path, {"/proc/net/unix": "Num RefCount\n", "/proc/uptime": "1.0 1.0\n", "/etc/health.json": HEALTH})
    (tmp_path / "opt/reconcile/server").mkdir(parents=True)
    (tmp_path / "opt/reconcile/server/qwen").symlink_to(tmp_path / "etc")
    assert parse(ask(server_health.LAYER.probe, tmp_path)).of(None) == ()


def test_the_program_is_the_same_bytes_every_time() -> None:
    first = checking.program()
    checking.program.cache_clear()
    assert checking.program() == first
