"""The alerting rules, sample configurations and runbooks, by Prometheus' own tools and as texts."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from controller.report.metrics import registry
from tests.monitoring.servers import MONITORING, read, require
from tests.report.pictures import board

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks.md"
RULES = [rule for group in read(MONITORING / "alerts.yaml")["groups"] for rule in group["rules"]]
NAMES = [rule["alert"] for rule in RULES]


def tool(*command: str, given: bytes = b"") -> tuple[int, str]:
    require()
    done = subprocess.run(command, input=given, capture_output=True, timeout=300, check=False)
    return done.returncode, (done.stdout + done.stderr).decode()


def test_promtool_understands_the_rules() -> None:
    code, said = tool("promtool", "check", "rules", str(MONITORING / "alerts.yaml"))
    assert code == 0, said
    assert f"{len(RULES)} rules found" in said


def test_each_alert_fires_and_does_not_fire_as_its_test_says() -> None:
    code, said = tool("promtool", "test", "rules", str(MONITORING / "alerts.test.yaml"))
    assert code == 0, said


@pytest.mark.parametrize("name", NAMES)
def test_each_alert_is_tested_firing_and_not_firing(name: str) -> None:
    tests = read(MONITORING / "alerts.test.yaml")["tests"]
    expected = [
        bool(case["exp_alerts"]) for test in tests for case in test["alert_rule_test"] if case["alertname"] == name
    ]
    assert set(expected) == {True, False}


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_each_alert_has_a_severity_and_an_entry_in_the_runbooks(rule: dict[str, dict[str, str]]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    name = str(rule["alert"])
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{name.lower()}"
    entry = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", RUNBOOKS.read_text(), re.MULTILINE | re.DOTALL)
    assert entry is not None, f"docs/runbooks.md has no entry {name}"
    for part in ("**It means**", "**Look**", "**Do**"):
        assert part in entry[1], f"the entry {name} does not say: {part}"


def test_no_runbook_is_left_over() -> None:
    assert set(re.findall(r"^## (Reconcile\w+)$", RUNBOOKS.read_text(), re.MULTILINE)) == set(NAMES)


def test_broken_specs_are_told_within_a_minute() -> None:
    """A scrape, an evaluation that begins to wait, and the first one after the wait."""
    every = {name: int(str(read(MONITORING / "prometheus.yaml")["global"][name]).rstrip("s")) for name in INTERVALS}
    rule = next(rule for rule in RULES if rule["alert"] == "ReconcileSpecErrors")
    waits = int(rule["for"].rstrip("s"))
    assert every["scrape_interval"] + 2 * every["evaluation_interval"] + waits < 60


INTERVALS = ("scrape_interval", "evaluation_interval")


def test_the_sample_configurations_are_right() -> None:
    for command in (
        ("promtool", "check", "config", str(MONITORING / "prometheus.yaml")),
        ("amtool", "check-config", str(MONITORING / "alertmanager.yaml")),
    ):
        code, said = tool(*command)
        assert code == 0, said


def test_the_page_is_written_as_prometheus_likes_it() -> None:
    code, said = tool("promtool", "check", "metrics", given=generate_latest(registry(board())))
    assert (code, said) == (0, "")
