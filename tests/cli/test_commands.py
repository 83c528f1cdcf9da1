"""Every command once on the demo's fleet: its exit code, its text at 80 columns, its JSON against its schema."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from controller import __version__, cli
from controller.report import model
from controller.world.sim import file as simfile
from tests.cli.conftest import Ran, Shell

GOLDEN = Path(__file__).parent / "golden"


def as_in(name: str, ran: Ran) -> None:
    """The text is the one in the golden file, and fits 80 columns where it can be broken."""
    assert ran.out == (GOLDEN / f"{name}.txt").read_text()
    for line in ran.out.splitlines():
        assert len(line) <= 80 or line.lstrip().startswith("|"), line  # a line of a config is as long as it is


def test_the_main_job_in_text(shell: Shell) -> None:
    for name, code, *args in (
        ("validate", 0, "validate"),
        ("status", 2, "status"),
        ("status-one", 2, "status", "ct129"),
        ("why", 0, "why", "ct129"),
        ("plan", 0, "plan"),
        ("once", 0, "--once"),
        ("once-again", 0, "--once"),
        ("plan-again", 0, "plan", "--detailed-exitcode"),
    ):
        ran = shell.run(*args)
        assert (ran.code, ran.err) == (code, ""), ran
        as_in(name, ran)


def test_the_main_job_in_json(shell: Shell) -> None:
    assert shell.run("validate", "-o", "json").json("validate")["objects"][-1] == "Container/ct129"
    status = shell.run("status", "-o", "json")
    assert status.code == 2
    assert [row["object"] for row in status.json("status")["objects"]] == [
        "Host/kpro5",
        "Host/kpro4",
        "Container/ct129",
    ]
    why = shell.run("why", "ct129", "-o", "json").json("why")
    assert why["first"]["reason"] == "too-many-cards"
    assert why["first"]["waits_for"] == "next: edit the config of CT 129 on kpro5"
    plan = shell.run("plan", "-o", "json", "--detailed-exitcode")
    assert plan.code == 2
    assert [step["action"] for step in plan.json("plan")["steps"]] == ["edit-config", "restart"]
    once = shell.run("--once", "-o", "json").json("once")
    assert [(row["action"], row["result"]) for row in once["performed"]] == [
        ("edit-config", "worked"),
        ("restart", "worked"),
    ]
    assert once["in_wanted_state"]
    again = shell.run("--once", "-o", "json")
    assert (again.code, again.json("once")["performed"]) == (0, [])
    assert shell.run("status", "-o", "json").code == 0


def test_every_command_has_help_and_takes_the_common_options(shell: Shell) -> None:
    for name in ("", *cli.main.commands):
        ran = shell.run(*filter(None, [name]), "--help", sim=False)
        assert (ran.code, ran.err) == (0, "")
        assert max(map(len, ran.out.splitlines())) <= 80
        for option in ("--specs", "--fleet", "--state", "--host", "--object", "--layer", "--read-only", "--no-color"):
            assert option in ran.out, name


@pytest.mark.parametrize("name", ["spec", *model.PRINTED])
def test_schemas(shell: Shell, name: str) -> None:
    ran = shell.run("schema", name, sim=False)
    assert ran.code == 0
    assert ran.out.startswith("{")


def test_version(shell: Shell) -> None:
    assert shell.run("version").out == shell.run("--version").out == f"reconcile {__version__}\n"
    assert shell.run("version", "-o", "json").json("version") == {"version": __version__}


def test_a_snapshot_can_be_rehearsed_on(shell: Shell) -> None:
    taken = shell.run("snapshot")
    assert (taken.code, taken.err) == (0, "")
    simfile.load(taken.out, "snapshot")
    (shell.place / "taken.sim.yaml").write_text(taken.out)
    there = "--fleet", "sim:taken.sim.yaml"
    real = shell.run("plan", "-o", "json").json("plan")
    rehearsed = shell.run("plan", "-o", "json", *there, sim=False).json("plan")
    for steps in (real["steps"], rehearsed["steps"]):
        for step in steps:
            del step["id"], step["requires"]  # they hold the config's digest, and its comments are withheld
    assert rehearsed == real
    assert shell.run("--once", *there, sim=False).code == 0


def test_a_broken_host_in_a_snapshot_is_said(shell: Shell) -> None:
    fleet = shell.place / "specs/fleet.sim.yaml"
    fleet.write_text(fleet.read_text() + "\nunreachable: [kpro4]\n")
    taken = shell.run("snapshot")
    assert taken.code == 1
    assert "could not be observed and are out of reach in the snapshot too: kpro4" in taken.err
    assert simfile.load(taken.out, "snapshot").unreachable == ["kpro4"]


def test_what_is_unreachable_is_said_once_and_ends_with_1(shell: Shell) -> None:
    fleet = shell.place / "specs/fleet.sim.yaml"
    fleet.write_text(fleet.read_text() + "\nunreachable: [kpro5]\n")
    plan = shell.run("plan")
    assert plan.code == 1
    assert plan.out.count("unreachable") == 1
    assert [row["object"] for row in shell.run("plan", "-o", "json").json("plan")["unknown"]].count("Host/kpro5") > 1
    once = shell.run("--once", "-o", "json")
    assert once.code == 1
    assert once.json("once")["performed"] == []
    assert shell.run("status").code == 1
    assert shell.run("status", "kpro4").code == 0


def test_what_is_not_permitted_waits_and_says_how_to_permit_it(shell: Shell) -> None:
    spec = shell.place / "specs/ct129.yaml"
    spec.write_text(spec.read_text().replace("allow: [restart-container, edit-container-config]", "allow: []"))
    once = shell.run("--once")
    assert once.code == 2
    assert "give it with --allow edit-container-config:Container/ct129" in once.out
    given = shell.run("--once", "--allow", "edit-container-config:ct129", "-o", "json")
    assert given.code == 2
    assert given.json("once")["waiting_for_permission"] == ["restart-container:Container/ct129"]
    rest = shell.run("--once", "--yes", "-o", "json")
    assert rest.code == 0
    assert [row["action"] for row in rest.json("once")["performed"]] == ["restart"]


def test_outside_its_maintenance_window_a_container_waits(shell: Shell) -> None:
    spec = shell.place / "specs/ct129.yaml"
    window = '{cron: "0 2 * * SUN", duration: 3h, timezone: Europe/Berlin}'
    spec.write_text(spec.read_text().replace("  allow:", f"  windows: [{window}]\n  allow:"))
    once = shell.run("--once")
    assert once.code == 2
    assert "maintenance window of Container/ct129 is closed" in " ".join(once.out.split())
    waiting = shell.run("--once", "-o", "json").json("once")
    assert waiting["performed"] == []
    assert len(waiting["waiting_for_window"]) == 1
    assert shell.run("--once", "--ignore-windows").code == 0


@pytest.mark.parametrize("option", ["--dry-run", "--read-only"])
def test_a_dry_run_is_a_plan(shell: Shell, option: str) -> None:
    assert shell.run("--once", option).out == shell.run("plan").out
    assert shell.run("status").code == 2


def test_a_plan_stops_only_what_runs(shell: Shell) -> None:
    assert [row["object"] for row in shell.run("plan", "-o", "json").json("plan")["summary"]["stops"]] == [
        "Container/ct129"
    ]
    spec = shell.place / "specs/ct129.yaml"
    running = spec.read_text()
    spec.write_text(running.replace("state: running", "state: stopped"))
    assert shell.run("--once").code == 0
    spec.write_text(running)
    planned = shell.run("plan", "-o", "json").json("plan")
    assert [step["action"] for step in planned["steps"]] == ["start"]
    assert planned["summary"]["stops"] == []


def test_a_plan_names_the_scripts_when_asked(shell: Shell) -> None:
    shown = shell.run("plan", "--show-scripts", "-o", "json").json("plan")["steps"]
    assert all("main" in step["script"] for step in shown)
    assert all("script" not in step for step in shell.run("plan", "-o", "json").json("plan")["steps"])


def test_narrowed(shell: Shell) -> None:
    assert shell.run("status", "--host", "kpro4").code == 0
    assert shell.run("status", "--object", "ct129").code == 2
    assert shell.run("status", "--layer", "host.access").code == 0
    assert shell.run("plan", "--layer", "container.power", "-o", "json").json("plan")["steps"] == []
    assert shell.run("plan", "--layer", "container.devices", "-o", "json").json("plan")["summary"]["steps"] == 1
    once = shell.run("--once", "--layer", "container.devices", "-o", "json").json("once")
    assert [row["action"] for row in once["performed"]] == ["edit-config"]
    assert once["in_wanted_state"]  # as far as it was asked
    assert shell.run("status").code == 2


def test_options_may_stand_before_the_command(shell: Shell) -> None:
    before = shell.run("-o", "json", "--host", "kpro4", "status")
    assert [row["object"] for row in before.json("status")["objects"]] == ["Host/kpro4"]
    assert shell.run("-o", "json", "status", "-o", "text", "--host", "kpro4").out.startswith("OBJECT")


def test_what_happens_is_told_with_its_time(shell: Shell) -> None:
    said = shell.run("--once").out
    assert re.search(r"^begin:  restart Container/ct129: restart CT 129 on kpro5$", said, re.M)
    assert re.search(r"^worked: restart Container/ct129 \(\d+\.\d s\)$", said, re.M)
