"""What the controller remembers and what people decide, by the commands, on the demo's fleet."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from controller.core.conditions import BREAKER_OPEN, Condition, Status, Type
from controller.run.memory import Memory
from controller.spec.ref import Ref
from tests.cli.conftest import Shell
from tests.cli.test_commands import as_in

PATIENCE = 240.0  # seconds; the machine may be busy


def edit(shell: Shell, before: str, after: str, file: str = "ct129") -> None:
    spec = shell.place / f"specs/{file}.yaml"
    text = spec.read_text()
    assert before in text
    spec.write_text(text.replace(before, after))


@pytest.fixture
def unpermitted(shell: Shell) -> Shell:
    edit(shell, "allow: [restart-container, edit-container-config]", "allow: [restart-container]")
    return shell


def words(text: str) -> str:
    return " ".join(text.split())


def test_an_approval_is_shown_first_used_once_and_then_gone(unpermitted: Shell) -> None:
    shell = unpermitted
    assert shell.run("--once").code == 2
    shown = shell.run("approve", "edit-container-config:ct129")
    assert shown.code == 1
    assert "edit the config of CT 129 on kpro5" in shown.out
    assert "nothing was approved" in shown.err
    assert shell.run("approve").out == "No approval is in force.\n"
    given = shell.run("approve", "edit-container-config:ct129", "--yes", "--reason", "ticket 7", "-o", "json")
    report = given.json("approve")
    assert given.code == 0
    assert [step["action"] for step in report["steps"]] == ["edit-config"]
    (listed,) = shell.run("approve", "-o", "json").json("approve")["approvals"]
    assert listed == report["approvals"][0]
    assert (listed["object"], listed["reason"], listed["why"]) == ("Container/ct129", "too-many-cards", "ticket 7")
    assert "ticket 7" in shell.run("approve").out
    plan = shell.run("plan", "-o", "json").json("plan")
    assert plan["summary"]["not_permitted"] == 0
    done = shell.run("--once", "-o", "json")
    assert (done.code, [row["action"] for row in done.json("once")["performed"]]) == (0, ["edit-config", "restart"])
    assert shell.run("approve").out == "No approval is in force.\n"
    (audit,) = shell.place.glob("state/sim-*/audit.jsonl")
    begun = json.loads(audit.read_text().splitlines()[0])
    assert begun["permissions"][0]["from"] == f"approval {listed['id']}"
    told = [(row["action"], row["object"]) for row in shell.run("events", "-o", "json").json("events")["events"]]
    assert ("approve", "Container/ct129") in told
    assert ("use", "Container/ct129") in told


def test_an_approval_is_not_used_when_the_spec_has_changed_since(unpermitted: Shell) -> None:
    shell = unpermitted
    assert shell.run("approve", "edit-container-config:ct129", "--yes").code == 0
    edit(shell, "count: 2", "count: 1")
    once = shell.run("--once", "-o", "json")
    assert (once.code, once.json("once")["performed"]) == (2, [])
    assert once.json("once")["waiting_for_permission"] == ["edit-container-config:Container/ct129"]
    assert shell.run("approve").out == "No approval is in force.\n"
    assert "an approval has lapsed: the spec of Container/ct129 has changed" in words(shell.run("events").out)
    edit(shell, "count: 1", "count: 2")  # back: what was given is over all the same
    assert shell.run("--once", "-o", "json").json("once")["performed"] == []


def test_what_cannot_be_approved(shell: Shell) -> None:
    for args, code, says in (
        (["restart-container:ct129"], 2, "it is given already for 1 step"),
        (["reboot-host:kpro5"], 2, "nothing that is planned needs reboot-host:Host/kpro5"),
        (["reboot-host:Guest/201@kpro5"], 2, "no spec has Guest/201@kpro5"),
        (["reboot:kpro5"], 1, "there is no class reboot; did you mean"),
        (["restart-container:ct129", "--until", "2020-01-01"], 1, "that is over"),
        (["restart-container:ct129", "--until", "soon"], 1, "write a duration like 90s"),
    ):
        ran = shell.run("approve", *args, "--yes")
        assert (ran.code, ran.out) == (code, "")
        assert says in words(ran.err)


def test_an_approval_ends_at_its_time(unpermitted: Shell) -> None:
    shell = unpermitted
    shell.run("approve", "edit-container-config:ct129", "--yes", "--until", "1d")
    assert "until 20" in shell.run("approve").out
    shell.run("approve", "edit-container-config:ct129", "--yes", "--until", "1s")  # a second goes by between commands
    assert shell.run("approve").out == "No approval is in force.\n"


def test_what_is_suspended_is_left_alone(shell: Shell) -> None:
    said = shell.run("suspend", "ct129", "--reason", "holiday")
    assert (said.code, said.err) == (0, "")
    assert "Container/ct129 is suspended by" in said.out
    once = shell.run("--once")
    assert once.code == 2
    assert "until resumed: holiday" in words(once.out)
    assert next(iter(shell.run("--once", "-o", "json").json("once")["suspended"].values())).endswith("holiday")
    assert "suspended" in shell.run("status").out
    (row,) = shell.run("status", "ct129", "-o", "json").json("status")["objects"]
    assert {c["type"]: c["status"] for c in row["conditions"]} == {
        "Ready": "False",
        "Reconciling": "False",
        "Stalled": "False",
        "Suspended": "True",
    }
    assert "waits, as Container/ct129 is suspended" in words(shell.run("why", "ct129").out)
    assert "waits: Container/ct129 is suspended" in words(shell.run("plan").out)
    resumed = shell.run("resume", "ct129", "-o", "json")
    assert (resumed.code, resumed.json("suspend")["suspensions"]) == (0, [])
    assert shell.run("resume", "ct129").code == 2
    assert shell.run("--once").code == 0


def test_what_the_breaker_stopped_is_resumed(shell: Shell) -> None:
    shell.run("--once")
    assert shell.run("resume", "ct129").code == 2
    stalled = Condition(Type.STALLED, Status.TRUE, BREAKER_OPEN, "start was tried 3 times")
    (db,) = shell.place.glob("state/sim-*/memory.db")
    with contextlib.closing(Memory.open(db.parent)) as memory:
        memory.keep_conditions(Ref("Container", "ct129"), [stalled], "", 0.0)
    assert shell.run("resume", "ct129").code == 0
    (last,) = shell.run("events", "-o", "json").json("events")["events"][-1:]
    assert (last["kind"], last["action"]) == ("suspension", "resume")


def test_broken_specs_keep_nobody_from_suspending(shell: Shell) -> None:
    edit(shell, "state: running", "state: runing")
    for name in ("ct129", "kpro5"):
        said = shell.run("suspend", name)
        assert (said.code, said.err) == (0, ""), name
    edit(shell, "kind: Container", "kind: Container\nbroken", "ct129")
    assert shell.run("resume", "ct129").code == 0  # it is remembered
    unknown = shell.run("suspend", "Container/ct130")
    assert (unknown.code, unknown.err) == (0, "no spec that can be read has Container/ct130\n")
    assert "did you mean kpro5?" in shell.run("suspend", "kpro6").err
    assert shell.run("events").code == 0
    assert shell.run("resume", "kpro5").code == 0
    assert shell.run("suspend", "Guest/201@kpro5").code == 0


def test_nothing_on_a_suspended_host_is_touched(shell: Shell) -> None:
    assert shell.run("suspend", "kpro5", "--until", "1h").code == 0
    assert shell.run("--once", "-o", "json").json("once")["performed"] == []
    assert "Host/kpro5 is suspended by" in shell.run("why", "ct129").out
    assert shell.run("suspend", "kpro5", "--until", "1s").code == 0  # another time in place of the first
    assert shell.run("status").code == 2  # a second of the fleet's time
    assert shell.run("--once").code == 0


def test_status_and_why_say_since_when(shell: Shell) -> None:
    edit(shell, "[restart-container, edit-container-config]", "[]")
    assert shell.run("--once").code == 2
    (row,) = shell.run("status", "ct129", "-o", "json").json("status")["objects"]
    first = {c["type"]: c["since"] for c in row["conditions"]}
    assert None not in first.values()
    assert row["drift"][0]["since"] == first["Ready"]
    assert "SINCE" in shell.run("status").out
    assert ", for " in shell.run("why", "ct129").out
    assert shell.run("--once").code == 2
    (row,) = shell.run("status", "ct129", "-o", "json").json("status")["objects"]
    assert {c["type"]: c["since"] for c in row["conditions"]} == first
    assert shell.run("--once", "--yes").code == 0
    (row,) = shell.run("status", "ct129", "-o", "json").json("status")["objects"]
    since = {c["type"]: c["since"] for c in row["conditions"]}
    assert since["Ready"] > first["Ready"]
    assert since["Suspended"] == first["Suspended"]


def test_what_happened(shell: Shell) -> None:
    assert shell.run("events").out == "Nothing has happened yet, as far as is remembered.\n"
    assert shell.run("--once").code == 0
    events = shell.run("events", "ct129", "-o", "json").json("events")["events"]
    steps = [(row["kind"], row["action"], row["result"]) for row in events if row["step"]]
    assert steps == [
        ("step-started", "edit-config", ""),
        ("step-ended", "edit-config", "worked"),
        ("step-started", "restart", ""),
        ("step-ended", "restart", "worked"),
    ]
    assert {row["cause"] for row in events if row["step"]} == {"intentional"}
    assert [row["result"] for row in events if row["kind"] == "condition" and row["action"] == "Ready"] == [
        "False",
        "True",
    ]
    said = shell.run("events", "Container/ct129")
    assert "Container/ct129 restart worked after" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    last = events[-1]["at"]
    assert shell.run("events", "--since", "1d").out.count("restart worked") == 1
    assert shell.run("events", "--since", "2100-01-01").out.startswith("Nothing")
    assert last > 0
    assert "cannot find anything that is remembered of ct12; did you mean ct129?" in shell.run("events", "ct12").err
    assert shell.run("--once").code == 0
    assert shell.run("events", "ct129", "-o", "json").json("events")["events"] == events  # nothing new


def test_history_and_what_changed(shell: Shell) -> None:
    assert "No spec was applied yet" in shell.run("history").out
    assert shell.run("--once").code == 0
    edit(shell, "count: 2", "count: 1")
    assert shell.run("--once").code == 0
    applied = shell.run("history", "ct129", "-o", "json").json("history")["applied"]
    assert [(row["outcome"], row["spec"]["gpus"]["count"]) for row in applied] == [("reached", 1), ("reached", 2)]
    assert applied[0]["diff"] is None
    shown = shell.run("history", "ct129", "--diff")
    assert '-    "count": 2,' in shown.out
    assert '+    "count": 1,' in shown.out
    assert max(map(len, shell.run("history").out.splitlines())) <= 80


def test_drift_of_a_spec_that_was_reached_is_of_the_worlds_doing(shell: Shell) -> None:
    assert shell.run("--once").code == 0
    edit(shell, "state: running", "state: stopped")
    assert shell.run("--once").code == 0
    edit(shell, "state: stopped", "state: running")
    assert shell.run("--once").code == 0
    events = shell.run("events", "ct129", "-o", "json").json("events")["events"]
    started = [(row["action"], row["cause"]) for row in events if row["kind"] == "step-started"]
    assert started[-2:] == [("stop", "intentional"), ("start", "intentional")]


def test_waiting(shell: Shell) -> None:
    late = shell.run("wait", "ct129", "--timeout", "20")
    assert late.code == 2
    assert "Container/ct129 Ready is False (too-many-cards)" in words(late.out)
    report = shell.run("wait", "ct129", "--for", "Ready=False", "-o", "json")
    assert report.code == 0
    assert report.json("wait")["reached"]
    assert shell.run("--once").code == 0
    assert shell.run("wait", "ct129").code == 0
    fleet = shell.place / "specs/fleet.sim.yaml"
    fleet.write_text(fleet.read_text() + "\nunreachable: [kpro5]\n")
    assert shell.run("wait", "ct129", "--timeout", "1").code == 1
    assert "did you mean Ready?" in shell.run("wait", "ct129", "--for", "Redy").err
    assert "True, False or Unknown" in shell.run("wait", "ct129", "--for", "Ready=yes").err


def test_who_has_which_card(shell: Shell) -> None:
    ran = shell.run("gpus")
    assert (ran.code, ran.err) == (2, "")
    as_in("gpus", ran)
    rows = {row["pci"]: row for row in shell.run("gpus", "--host", "kpro5", "-o", "json").json("gpus")["gpus"]}
    card = rows["0000:4f:00.0"]
    assert (card["owner"], card["driver"], card["containers"]) == ("containers", "nvidia", ["ct129"])
    assert card["memory_total"] > 40 * 1024**3
    assert shell.run("--once").code == 0
    assert shell.run("gpus").code == 0
    fleet = shell.place / "specs/fleet.sim.yaml"
    fleet.write_text(fleet.read_text() + "\nunreachable: [kpro5]\n")
    ran = shell.run("gpus")
    assert ran.code == 1
    assert "Host/kpro5: unreachable" in ran.out


def test_a_memory_that_is_damaged_is_said_and_everything_goes_on(shell: Shell) -> None:
    assert shell.run("--once").code == 0
    (memory,) = shell.place.glob("state/sim-*/memory.db")
    memory.write_bytes(b"no database" * 1000)
    ran = shell.run("--once")
    assert ran.code == 0
    assert "it is kept as memory.db.corrupt-" in ran.err
    again = shell.run("--once")
    assert (again.code, again.err) == (0, "")
    assert len(list(memory.parent.glob("memory.db.corrupt-*"))) == 1


def test_a_rehearsal_has_a_memory_of_its_own(shell: Shell) -> None:
    assert shell.run("--once").code == 0
    assert shell.run("events", sim=False).out.startswith("Nothing has happened yet")
    assert {path.name for path in Path(shell.place, "state").iterdir() if path.name.startswith("audit")} == set()


def test_events_are_followed(shell: Shell) -> None:
    shell.run("suspend", "ct129")
    following = subprocess.Popen(
        shell.command("events", "--follow", "-o", "json"),
        cwd=shell.place,
        env={**shell.process_env, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert following.stdout is not None
        assert json.loads(following.stdout.readline())["events"][0]["action"] == "suspend"
        shell.run("resume", "ct129")
        assert json.loads(following.stdout.readline())["events"][0]["action"] == "resume"
        following.send_signal(signal.SIGINT)
        assert following.wait(PATIENCE) == 0
    finally:
        following.kill()
        following.wait()


def test_the_status_is_watched_on_a_terminal_only(shell: Shell) -> None:
    assert "cannot watch: stdout is no terminal" in words(shell.run("status", "--watch").err)
    master, slave = pty.openpty()
    watching = subprocess.Popen(
        shell.command("status", "--watch"),
        cwd=shell.place,
        env={**shell.process_env, "PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    try:
        said = b""
        until = time.monotonic() + PATIENCE
        while b"too-many-cards" not in said and time.monotonic() < until:
            if select.select([master], [], [], 1.0)[0]:
                said += os.read(master, 65536)
        assert b"Container/ct129" in said
        watching.send_signal(signal.SIGINT)
        assert watching.wait(PATIENCE) == 0
    finally:
        watching.kill()
        watching.wait()
        os.close(master)
