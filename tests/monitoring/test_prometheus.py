"""A real Prometheus scrapes the page: what it sees, what its alerts and the dashboard's queries answer."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from controller.core.words import InSync
from controller.report.serve import Listen, Server
from controller.run.picture import Board, Picture, StepKind
from tests.monitoring.servers import MONITORING, Prometheus, eventually, read, require, running
from tests.report.pictures import CONTAINER, board, picture, specs, to_be_rebooted

DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
RULES = [rule for group in read(MONITORING / "alerts.yaml")["groups"] for rule in group["rules"]]
VARIABLES = {"$host": ".*", "$name": ".*", "$__rate_interval": "1m"}


# What only layers of servers can tell. A name goes from here as soon as the page has it.
@dataclasses.dataclass(frozen=True)
class Scene:
    """The board, what hung on it at first, and the Prometheus that looks at it."""

    board: Board
    picture: Picture
    prometheus: Prometheus


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    require()
    shown = to_be_rebooted(picture())
    made = board(shown)
    made.moved(time.time())
    ended = threading.Event()

    def work() -> None:
        """Steps go on ending, so that rates of them are not nothing."""
        while not ended.wait(1.0):
            made.step_ended(StepKind("container.power", "restart-container", "corrective", "failed"), 2.0)

    working = threading.Thread(target=work)
    with Server(Listen("127.0.0.1", 0), made) as server:
        working.start()
        try:
            with running(tmp_path_factory.mktemp("prometheus"), str(server.listen)) as prometheus:
                eventually(
                    lambda: prometheus.query("increase(reconcile_steps_total[1m]) > 0"), "Prometheus has scraped twice"
                )
                yield Scene(made, shown, prometheus)
        finally:
            ended.set()
            working.join()


def metrics_of(expression: str) -> set[str]:
    return set(re.findall(r"\breconcile_\w+", expression))


def filled_in(expression: str) -> str:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression
    return expression


@pytest.mark.parametrize(("title", "expression"), QUERIES, ids=[f"{n}-{q[0]}" for n, q in enumerate(QUERIES)])
def test_every_query_of_the_dashboard_is_answered(scene: Scene, title: str, expression: str) -> None:
    eventually(lambda: scene.prometheus.query(filled_in(expression)), f"{title}: {expression}")


def test_what_the_dashboard_lets_one_choose_is_there(scene: Scene) -> None:
    chosen = [v for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    assert {v["name"] for v in chosen} == {"host", "name"}
    for variable in chosen:
        match = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"])
        assert match
        assert scene.prometheus.query(f"count by ({match[2]}) ({match[1]})")


def test_every_panel_asks_the_chosen_data_source() -> None:
    assert DASHBOARD["templating"]["list"][0]["type"] == "datasource"
    for panel in PANELS:
        for asks in (panel, *panel["targets"]):
            assert asks["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_no_two_panels_of_the_dashboard_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert x < 24
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]


def test_every_rule_is_answered_and_every_metric_in_it_is_there(scene: Scene) -> None:
    rules = eventually(
        lambda: (
            [r for r in scene.prometheus.rules() if r["health"] != "unknown"][len(RULES) - 1 :]
            and scene.prometheus.rules()
        ),
        "all rules were evaluated",
    )
    assert {rule["health"]: rule.get("lastError", "") for rule in rules} == {"ok": ""}
    assert {rule["name"] for rule in rules} == {rule["alert"] for rule in RULES}
    there = {series["metric"]["__name__"] for series in scene.prometheus.query('{__name__=~"reconcile_.*"}')}
    for rule in RULES:
        scene.prometheus.query(rule["expr"])
        assert metrics_of(rule["expr"]) <= there, rule["alert"]


def test_alerts_reach_a_real_alertmanager(scene: Scene) -> None:
    eventually(lambda: "ReconcileSpecErrors" in scene.prometheus.alerts(), "broken specs are an alert")
    assert "ReconcileAbsent" not in scene.prometheus.alerts()


def with_verdict(shown: Picture, in_sync: bool) -> Picture:
    judged = tuple(
        dataclasses.replace(j, verdict=InSync()) if in_sync and j.layer == "container.devices" else j
        for j in shown.upcoming.judged
    )
    return dataclasses.replace(shown, upcoming=dataclasses.replace(shown.upcoming, judged=judged))


def test_drift_is_seen_to_come_and_go(scene: Scene) -> None:
    drift = 'reconcile_drift{name="ct129", layer="container.devices"}'
    try:
        for in_sync, value in ((True, 0.0), (False, 1.0), (True, 0.0)):
            scene.board.pin(with_verdict(scene.picture, in_sync))
            eventually(lambda value=value: scene.prometheus.value(drift) == value, f"{drift} is {value}")
        assert scene.prometheus.value(f"max_over_time({drift}[5m])") == 1
        assert scene.prometheus.value(drift) == 0
    finally:
        scene.board.pin(scene.picture)


def test_series_go_with_their_object_and_come_back_with_it(scene: Scene) -> None:
    of_it: Any = f'{{__name__=~"reconcile_.*", name="{CONTAINER.name}"}}'
    eventually(lambda: scene.prometheus.query(of_it), "the container has series")
    try:
        scene.board.pin(picture(specs(without_container=True)))
        eventually(lambda: not scene.prometheus.query(of_it), "the container's series have gone")
        assert scene.prometheus.query('reconcile_object_info{kind="Host"}')
    finally:
        scene.board.pin(scene.picture)
    eventually(lambda: scene.prometheus.query(of_it), "the container's series are back")
