"""What serves is the unit's process, as the unit says it now; what somebody else started is named and left alone."""

from __future__ import annotations

import pytest

from controller.core.words import Block, InSync, Unseen, Wait
from controller.facts.words import Known
from controller.layers.server_process.facts import ProcessFacts
from controller.layers.server_process.reasons import Reason
from controller.layers.shared import pve_physics, server_physics
from controller.layers.shared.truth import Process
from tests.layers.servers import Rig, document

UNIT = "reconcile-qwen.service"


@pytest.fixture
def rig() -> Rig:
    """A fleet in which the server runs."""
    made = Rig()
    assert made.actions() == ["install-unit", "start-server"]
    return made


def listens(rig: Rig, unit: str, port: int = 30000, command: str = "node") -> None:
    """Somebody's process takes the port."""
    with rig.world.change("kpro5"):
        rig.processes(129).append(Process(777, rig.fleet.now, unit=unit, command=command, port=port, listens=True))


def test_one_that_a_person_stopped_is_started_again(rig: Rig) -> None:
    server_physics.stop(rig.fleet, rig.kpro5, 129, UNIT)
    assert isinstance(rig.drift("server.process").remedy, Wait)  # systemd may be about to do it
    rig.world.clock.wait(40)
    assert rig.drift("server.process").reason == Reason.NOT_RUNNING
    assert rig.actions() == ["start-server"]


def test_one_that_was_killed_is_started_by_systemd(rig: Rig) -> None:
    server_physics.kill(rig.fleet, rig.kpro5, 129, UNIT)
    assert rig.actions() == []
    assert len(rig.processes(129)) == 1


def test_it_comes_back_with_its_container_and_its_host(rig: Rig) -> None:
    for _ in range(2):
        rig.kpro5.powers_on = rig.fleet.now + 60
        pve_physics.power_off(rig.fleet, rig.kpro5)
        assert 129 not in rig.kpro5.containers
        rig.world.clock.wait(100)
        assert [process.unit for process in rig.processes(129)] == [UNIT]
        assert rig.actions() == []


def test_stopped_stays_stopped_and_would_not_start_with_its_place(rig: Rig) -> None:
    rig.want(document(state="stopped"))
    assert rig.drift("server.process").reason == Reason.STILL_RUNNING
    assert rig.actions() == ["stop-server"]
    assert (rig.processes(129), rig.image(129).enabled) == ([], [])
    with rig.world.change("kpro5"):
        rig.image(129).enabled.append(UNIT)
    assert rig.drift("server.process").reason == Reason.STILL_ENABLED
    assert rig.actions() == ["stop-server"]
    assert rig.actions() == []
    rig.want(document())
    assert rig.actions() == ["start-server"]


def test_one_that_would_not_start_with_its_place_is_enabled_while_it_runs(rig: Rig) -> None:
    began = rig.processes(129)[0].started
    with rig.world.change("kpro5"):
        rig.image(129).enabled.remove(UNIT)
    assert rig.drift("server.process").reason == Reason.NOT_ENABLED
    assert rig.step("server.process").disrupts == ()
    assert rig.actions() == ["enable-server"]
    assert rig.processes(129)[0].started == began


def test_what_was_started_before_the_last_change_is_restarted(rig: Rig) -> None:
    with rig.world.change("kpro5"):
        rig.session(129).starts["qwen"].digest = "0" * 64
    found = rig.drift("server.process")
    assert found.reason == Reason.STARTED_BEFORE
    assert [str(each) for each in rig.step("server.process").disrupts] == ["restart-server:ModelServer/qwen"]
    assert rig.actions() == ["restart-server"]


def test_other_arguments_than_its_unit_says_are_told_and_no_restart_is_tried(rig: Rig) -> None:
    with rig.world.change("kpro5"):
        rig.processes(129)[0].argv[-1] = "4096"
    found = rig.drift("server.process")
    assert found.reason == Reason.OTHER_ARGUMENTS
    assert isinstance(found.remedy, Block)
    assert "systemctl cat reconcile-qwen" in found.remedy.needs


@pytest.mark.parametrize(
    ("argv", "right"),
    [
        (lambda argv: argv, True),
        (lambda argv: ["/usr/bin/python3", *argv], True),  # argv[0] is a script
        (lambda argv: ["sglang::main"], True),  # the program has written over it
        (lambda argv: [], True),
        (lambda argv: [*argv, "--more"], False),
        (lambda argv: [*argv[:-1], "4096"], False),
        (lambda argv: [argv[0], *argv[2:]], False),
    ],
)
def test_a_command_line_is_compared_as_far_as_it_is_one(rig: Rig, argv, right: bool) -> None:  # type: ignore[no-untyped-def]
    with rig.world.change("kpro5"):
        rig.processes(129)[0].argv = argv(rig.processes(129)[0].argv)
    assert isinstance(rig.verdict("server.process"), InSync) == right


def test_other_cards_than_its_unit_says(rig: Rig) -> None:
    with rig.world.change("kpro5"):
        rig.processes(129)[0].gpus.reverse()
    assert rig.drift("server.process").reason == Reason.OTHER_GPUS


def test_the_unit_at_its_start_is_neither_right_nor_wrong(rig: Rig) -> None:
    with rig.world.change("kpro5"):
        rig.processes(129)[0].argv = ["/bin/sh", "/opt/reconcile/server/qwen/note.sh", "start", "qwen", "d"]
    found = rig.verdict("server.process")
    assert isinstance(found, Unseen)
    assert found.reason == "in-between"


@pytest.mark.parametrize("unit", ["session-3.scope", "init.scope"])
def test_a_foreign_process_on_its_port_is_named_and_never_touched(unit: str) -> None:
    rig = Rig()
    listens(rig, unit)
    report = rig.once()
    assert [each.step.action for each in report.ended] == ["install-unit"]
    found = rig.drift("server.process")
    assert found.reason == Reason.FOREIGN_PORT
    assert isinstance(found.remedy, Block)
    assert "777 (node)" in found.message
    assert [process.pid for process in rig.processes(129)] == [777]


def test_a_service_made_by_hand_is_taken_over_where_that_is_permitted() -> None:
    rig = Rig()
    listens(rig, "llm.service", command="python3")
    with rig.world.change("kpro5"):
        rig.image(129).enabled.append("llm.service")
    assert [each.step.action for each in rig.once().ended] == ["install-unit"]
    wants = [str(each) for each in rig.step("server.process").disrupts]
    assert wants == ["adopt:ModelServer/qwen", "restart-server:ModelServer/qwen"]
    rig.want(document(policy="{mode: enforce, allow: [adopt, restart-server]}"))
    assert rig.actions() == ["adopt-unit", "start-server"]
    assert [process.unit for process in rig.processes(129)] == [UNIT]
    assert rig.image(129).enabled == [UNIT]


def test_another_of_ours_on_its_port_is_never_taken_over(rig: Rig) -> None:
    with rig.world.change("kpro5"):
        rig.processes(129)[0].unit = "reconcile-old.service"
        rig.processes(129)[0].listens = True
    found = rig.drift("server.process")
    assert found.reason == Reason.FOREIGN_PORT
    assert isinstance(found.remedy, Block)
    assert "nobody's spec has old" in found.remedy.needs


def test_one_that_ends_again_and_again_is_let_be_until_something_changes() -> None:
    rig = Rig()
    rig.look()
    with rig.world.change("kpro5"):
        for environment in rig.image(129).environments.values():
            environment.fault = "ImportError: libcudart.so.13"
    report = rig.once()
    assert [each.step.action for each in report.ended] == ["install-unit", "start-server"]
    found = rig.drift("server.process")
    assert found.reason == Reason.CRASHED
    assert isinstance(found.remedy, Block)
    assert rig.once().ended == []
    with rig.world.change("kpro5"):
        for environment in rig.image(129).environments.values():
            environment.fault = ""
    rig.want(document(serve="{port: 30000, flags: {context-length: 4096}}"))
    assert rig.actions() == ["install-unit", "start-server"]


def test_without_permission_it_waits() -> None:
    rig = Rig(document(policy="{mode: enforce, allow: []}"))
    report = rig.once()
    assert [each.step.action for each in report.ended] == ["install-unit"]
    assert rig.processes(129) == []


def test_in_report_mode_nothing_is_touched() -> None:
    rig = Rig(document(policy="{mode: report}"))
    assert rig.once().ended == []
    assert not any("reconcile" in path for path in rig.image(129).files)


def test_what_is_only_watched_is_left_alone() -> None:
    rig = Rig(document(engine="{name: external, version: '1'}", serve="{port: 30000}"))
    rig.made = True
    listens(rig, "llm.service")
    assert rig.actions() == []


def test_a_container_that_does_not_run_tells_nothing_of_its_servers(rig: Rig) -> None:
    pve_physics.pct_stop(rig.fleet, rig.kpro5, 129)
    rig.fleet.touch(rig.kpro5)
    view = rig.look()
    found = view.facts["kpro5"].section("server.process")
    assert isinstance(found, Known)
    assert isinstance(found.value, ProcessFacts)
    assert found.value.of(129) is None
    foretold = [(each.step.action, each.step.provisional) for each in rig.plan().steps]
    assert foretold == [("start", False), ("install-unit", True), ("start-server", True)]
    assert rig.actions() == ["start"]
