"""What a pass leaves in its memory and its audit log, also when it is cut off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.core.conditions import Condition, Status, Type, of_all
from controller.core.next_steps import Next, next_steps
from controller.core.permissions import Grants
from controller.core.view import View
from controller.facts.words import FleetFacts, HostFacts, Unknown
from controller.run import audit as audit_module
from controller.run.ended import Ended, Result
from controller.run.git import Commit
from controller.run.memory import Kind, Memory
from controller.run.records import Records
from controller.run.state import Identity, NoState
from controller.spec.model import Specs
from controller.spec.ref import Ref
from tests.core.builders import specs, switch_layer, switches

CT = Ref("Container", "ct")
WANTED = specs(("ct", 129, "a"))
ONE = switch_layer("one")
OFF, ON = switches(a={"one": False}, b={}), switches(a={"one": True}, b={})


class Kept:
    """Records in a directory, and what is in them."""

    def __init__(self, state: Path, wanted: Specs = WANTED) -> None:
        self.state, self.wanted = state, wanted
        self.memory = Memory.open(state)
        self.records = Records(self.memory, state, Identity("0123456789abcdef", "host:1"), wanted, Commit("c0ffee"))

    def upcoming(self, facts: FleetFacts) -> Next:
        return next_steps((ONE,), View(self.wanted, facts))

    def look(self, facts: FleetFacts, at: float) -> Next:
        found = self.upcoming(facts)
        self.records.seen(found, of_all([obj.ref for obj in self.wanted], found, {}, {}), at)
        return found

    def told(self, ref: Ref | None = CT) -> list[tuple[str, str, str]]:
        return [(event.kind, event.action, event.result) for event in self.memory.events(ref)]


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path / "state")
    yield kept
    kept.memory.close()


def test_from_drift_to_ready(kept: Kept) -> None:
    upcoming = kept.look(OFF, 10.0)
    (step,) = upcoming.ready
    kept.records.started(step, upcoming, Grants(WANTED), 11.0)
    kept.records.ended(Ended(step, Result.WORKED, step.summary), Grants(WANTED), 14.0)
    kept.look(ON, 15.0)
    assert kept.told() == [
        ("spec", "", "applying"),
        ("condition", "Ready", "False"),
        ("step-started", "switch-one", ""),
        ("step-ended", "switch-one", "worked"),
        ("condition", "Ready", "True"),
    ]
    begun, ended = kept.memory.events(kind=Kind.STEP_STARTED) + kept.memory.events(kind=Kind.STEP_ENDED)
    assert (begun.cause, ended.cause, ended.seconds, ended.commit) == ("intentional", "intentional", 3.0, "c0ffee")
    assert begun.message == "one is off"
    assert [(a.object, a.outcome) for a in kept.memory.history(CT)] == [(CT, "reached")]
    assert kept.memory.drifts() == {}
    lines = [json.loads(line) for line in (kept.state / "audit.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["step-started", "step-ended"]
    kept.look(OFF, 20.0)
    assert kept.memory.drifts()[CT, "one"].cause == "corrective"
    assert kept.memory.drifts()[CT, "one"].since == 20.0


def test_what_cannot_be_seen_has_not_been_put_right(kept: Kept) -> None:
    kept.look(OFF, 10.0)
    kept.look({**OFF, "a": HostFacts("a", {}, failure=Unknown("unreachable", "no route"))}, 20.0)
    assert kept.memory.drifts()[CT, "one"].since == 10.0
    kept.look(OFF, 30.0)
    assert kept.memory.drifts()[CT, "one"].since == 10.0


def test_an_object_that_is_in_no_spec_any_more_is_forgotten_and_its_history_kept(kept: Kept) -> None:
    kept.look(OFF, 10.0)
    kept.records.use(specs(), Commit())
    kept.wanted = specs()
    kept.look(OFF, 20.0)
    assert CT not in kept.memory.conditions()
    assert kept.memory.drifts() == {}
    assert [a.object for a in kept.memory.history(CT)] == [CT]


def test_a_failed_step_marks_its_spec(kept: Kept) -> None:
    upcoming = kept.upcoming(OFF)
    (step,) = upcoming.ready
    conditions = of_all([CT], upcoming, {}, {step.id: "exit 1: no"})
    kept.records.seen(upcoming, conditions, 10.0)
    assert kept.memory.history(CT)[0].outcome == "failed"
    assert Condition(Type.STALLED, Status.TRUE, "step-failed", "exit 1: no") in conditions[CT]


def test_what_cannot_be_recorded_is_not_begun(kept: Kept) -> None:
    upcoming = kept.look(OFF, 10.0)
    (step,) = upcoming.ready
    (kept.state / audit_module.FILE).mkdir()
    with pytest.raises(NoState):
        kept.records.started(step, upcoming, Grants(WANTED), 11.0)
    assert kept.memory.events(kind=Kind.STEP_STARTED) == []


def test_what_was_done_and_cannot_be_recorded_is_said(kept: Kept) -> None:
    upcoming = kept.look(OFF, 10.0)
    (step,) = upcoming.ready
    kept.records.started(step, upcoming, Grants(WANTED), 11.0)
    (kept.state / audit_module.FILE).rename(kept.state / "elsewhere")
    (kept.state / audit_module.FILE).mkdir()
    kept.records.ended(Ended(step, Result.WORKED, step.summary), Grants(WANTED), 12.0)
    assert "cannot remember anything in" in kept.memory.trouble


KILLED = """
import os, signal, sys
from pathlib import Path
from controller.cli import main
from controller.run.records import Records
from controller.world.sim import SimWorld

perform = SimWorld.perform
def die(self, order):
    perform(self, order)
    os.kill(os.getpid(), signal.SIGKILL)
SimWorld.perform = die
main(["--once", "--fleet", "sim:" + sys.argv[1]], prog_name="reconcile")
"""


def test_a_pass_that_is_killed_has_said_what_it_began(tmp_path: Path) -> None:
    demo = Path(__file__).parents[2] / "specs/demo"
    fleet, env = (
        str(demo / "fleet.sim.yaml"),
        {
            **os.environ,
            "RECONCILE_STATE": str(tmp_path),
            "RECONCILE_SPECS": str(demo),
            "PYTHONPATH": str(demo.parents[1]),
        },
    )
    done = subprocess.run([sys.executable, "-c", KILLED, fleet], env=env, capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (audit,) = tmp_path.glob("sim-*/audit.jsonl")
    (begun,) = [json.loads(line) for line in audit.read_text().splitlines()]
    assert (begun["event"], begun["what"]["action"]) == ("step-started", "edit-config")
    memory = Memory.open(audit.parent)
    assert [e.action for e in memory.events(kind=Kind.STEP_STARTED)] == ["edit-config"]
    assert memory.events(kind=Kind.STEP_ENDED) == []
    memory.close()
