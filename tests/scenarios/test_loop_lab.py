"""The loop at work in the lab: real hosts over SSH, a real Prometheus and a real Alertmanager over its page.

One lab and one controller for all; each test begins with ``settle`` and is good alone.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import Any

import pytest

from tests.lab.fixtures import need_lab
from tests.lab.lab import Lab
from tests.monitoring.servers import get, require, running
from tests.scenarios import story
from tests.scenarios.loop import (
    BROKEN,
    CT,
    Controller,
    Fleet,
    container,
    free_of,
    lay_specs,
    rules,
    settle,
    until,
)
from tests.scenarios.stage import LabStage
from tests.scenarios.test_story import at_work_on_kpro5

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

STARTED = (CT, "start", "worked")
HOST = "Host/kpro5"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The fleet; nothing has been asked of the controller yet."""
    need_lab()
    require()
    place = tmp_path_factory.mktemp("loop")
    with Lab(hosts=story.lab_hosts(), pve_files=story.pve_files()) as lab:
        story.set_up_lab(lab, alive=True)
        stage = LabStage(place, lab)
        controller = Controller(stage, "state")
        try:
            with running(place, controller.address, rules(place)) as prometheus:
                yield Fleet(stage, controller, prometheus)
        finally:
            controller.kill()
        free_of(controller.log)


@pytest.fixture
def fleet(watched: Fleet) -> Fleet:
    """The fleet with the container at work on kpro5."""
    settle(watched)
    return watched


def test_an_edited_line_relocates_a_container(watched: Fleet) -> None:
    lay_specs(watched, host="kpro6")
    watched.controller.start()
    watch = story.Watch(watched.stage)
    until(lambda: watched.controller.is_ready(CT), "it is as wanted on kpro6")
    assert watched.stage.started(129).startswith("kpro6 ")
    before = watched.controller.last()
    file = watched.stage.specs / "ct129.yaml"
    watched.save("ct129.yaml", file.read_text().replace("host: kpro6", "host: kpro5"))
    watched.sees("container.placement", 1)
    until(lambda: watched.controller.is_ready(CT) and watched.stage.node(129) == "kpro5", "it is as wanted on kpro5")
    at_work_on_kpro5(watched.stage)
    watch.untouched()
    watched.sees("container.placement", 0)
    until(lambda: (CT, "install-userland", "worked") in watched.controller.steps(before), "the last step has ended")
    of_it = [step for step in watched.controller.steps(before) if step[0] == CT]
    chain = ("move-container", "edit-config", "start", "install-userland")  # its two cards it has had on kpro6
    assert of_it == [(CT, action, "worked") for action in chain]
    causes = {e["cause"] for e in watched.controller.events("step-ended", before) if e["object"] == CT}
    assert causes == {"intentional"}


def test_a_stopped_container_is_started(fleet: Fleet) -> None:
    before, starts = fleet.controller.last(), fleet.calls("start")
    fleet.sees("container.power", 0)
    fleet.stop_container()
    until(lambda: fleet.stage.started(129), "it was started again")
    until(lambda: STARTED in fleet.controller.steps(before), "the start is remembered")
    [start] = [event for event in fleet.controller.events("step-ended", before) if event["object"] == CT]
    assert start["cause"] == "corrective"
    assert fleet.calls("start") == starts + 1

    fleet.controller.says("suspend", CT, "--reason", "I am at it")
    fleet.stop_container()
    fleet.sees("container.power", 1)
    assert not fleet.stage.started(129)
    assert fleet.calls("start") == starts + 1
    assert fleet.prometheus.value('reconcile_object_suspended{name="ct129"}') == 1
    fleet.controller.says("resume", CT)
    fleet.sees("container.power", 0)
    assert fleet.stage.started(129)
    assert fleet.prometheus.value(f"max_over_time({fleet.drift('container.power')}[10m])") == 1


def test_a_deleted_device_line_waits_for_an_approval_and_is_an_alert_meanwhile(fleet: Fleet) -> None:
    fleet.sees("container.devices", 0)
    started, conf = fleet.stage.started(129), fleet.stage.conf(129).decode()
    fleet.save("ct129.yaml", container(allow=("restart-container", "change-driver")))
    line = "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file\n"
    assert conf.count(line) == 2, "one of them in the snapshot"
    fleet.stage.write_conf(129, conf.replace(line, "", 1).encode())
    fleet.sees("container.devices", 1)
    fleet.fires("ReconcileDrift")
    waits = [(p["layer"], p["waiting_for"]) for p in fleet.controller.object(CT)["pending"]]
    assert waits == [("container.devices", "permission")]
    assert line not in fleet.stage.conf(129).decode().split("[before-upgrade]")[0]

    fleet.controller.says("approve", "edit-container-config:ct129", "--yes", "--reason", "in vain otherwise")
    fleet.sees("container.devices", 0)
    assert line in fleet.stage.conf(129).decode().split("[before-upgrade]")[0]
    assert fleet.stage.started(129) == started, "nobody restarts a container for a line that it runs with"
    fleet.ends("ReconcileDrift")
    until(lambda: _decided(fleet) == ["approve", "use"], "it is remembered that it was used")


def _decided(fleet: Fleet) -> list[str]:
    return [event["action"] for event in fleet.controller.events("approval")]


def test_a_card_on_another_driver_is_bound_again(fleet: Fleet) -> None:
    before = fleet.controller.last()
    fleet.sees("host.gpu-binding", 0, HOST)
    fleet.controller.says("suspend", HOST)
    fleet.take_card()
    fleet.sees("host.gpu-binding", 1, HOST)
    assert fleet.card_is_on() == "vfio-pci"
    fleet.controller.says("resume", HOST)
    fleet.sees("host.gpu-binding", 0, HOST)
    assert fleet.card_is_on() == "nvidia"
    until(lambda: fleet.controller.is_ready(CT), "the container has its cards")
    until(lambda: (HOST, "bind-gpu", "worked") in fleet.controller.steps(before), "the step has ended")
    at_work_on_kpro5(fleet.stage)


def test_broken_specs_do_nothing_to_what_they_defined(fleet: Fleet) -> None:
    before, good = fleet.controller.last(), (fleet.stage.specs / "ct129.yaml").read_text()
    saved = time.time()
    fleet.save("ct129.yaml", BROKEN)
    fleet.fires("ReconcileSpecErrors")
    [alert] = [a for a in _alerts(fleet) if a["labels"]["alertname"] == "ReconcileSpecErrors"]
    assert datetime.fromisoformat(alert["startsAt"]).timestamp() - saved < 60
    fleet.stop_container()
    fleet.sees("container.power", 1)
    fleet.take_card()
    until(lambda: (HOST, "bind-gpu", "worked") in fleet.controller.steps(before), "all else goes on")
    assert not fleet.stage.started(129)
    assert "has errors" in fleet.controller.object(CT)["pending"][0]["message"]

    away = fleet.stage.place / "away"
    away.mkdir()
    for file in fleet.stage.specs.glob("*.yaml"):
        file.rename(away / file.name)
    until(lambda: "holds no *.yaml" in str(fleet.controller.status()["specs"]["errors"]), "the folder is empty")
    between = fleet.controller.last()
    fleet.take_card()
    fleet.sees("host.gpu-binding", 1, HOST)
    assert "nothing is done until" in fleet.controller.object(HOST)["pending"][0]["message"]
    assert "ReconcileSpecErrors" in fleet.prometheus.alerts()
    assert not fleet.stage.started(129)
    assert fleet.card_is_on() == "vfio-pci"
    assert fleet.controller.events("step-started", between) == []

    for file in away.iterdir():
        file.rename(fleet.stage.specs / file.name)
    shutil.rmtree(away)
    fleet.save("ct129.yaml", good)
    fleet.ends("ReconcileSpecErrors")
    until(lambda: fleet.controller.is_ready(CT) and fleet.controller.is_ready(HOST), "all is as wanted again")
    assert fleet.card_is_on() == "nvidia"
    until(lambda: STARTED in fleet.controller.steps(between), "its start is remembered")


def _alerts(fleet: Fleet) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = get(f"{fleet.prometheus.alertmanager}/api/v2/alerts")
    return found


def test_of_two_controllers_one_acts_and_the_other_says_why_it_does_not(fleet: Fleet) -> None:
    second = Controller(fleet.stage, "second")
    first, starts = fleet.controller, fleet.calls("start")
    second.start()
    try:
        until(lambda: second.is_ready(CT), "the second one has seen the fleet")
        before = {one: one.last() for one in (first, second)}
        fleet.fault("pct-hang", "start")
        fleet.stop_container()
        until(lambda: fleet.calls("start") > starts, "one of them starts it")
        acting = first if first.events("step-started", before[first]) else second
        other = second if acting is first else first
        until(lambda: "runs on kpro5, begun by" in _says(other), "the other one says why it does nothing")
        fleet.no_faults()
        until(lambda: first.is_ready(CT) and second.is_ready(CT), "both see it run")
        assert fleet.calls("start") == starts + 1
        until(lambda: acting.steps(before[acting]) == [STARTED], "the start is remembered, once")
        assert [step for step in other.steps(before[other]) if step[2] == "worked"] == []
        second.signal(signal.SIGTERM)
        assert second.end(30) == 0
    finally:
        second.kill()
    free_of(second.log)


def _says(controller: Controller) -> str:
    return " ".join(pending["message"] for pending in controller.object(CT).get("pending", []))


def test_it_ends_when_asked_idle_and_at_work(fleet: Fleet) -> None:
    controller = fleet.controller
    controller.signal(signal.SIGTERM)
    assert controller.end(30) == 0

    before, starts = controller.last(), fleet.calls("start")
    controller.start()
    fleet.stop_container()
    until(lambda: fleet.calls("start") > starts, "a step is at work")
    controller.signal(signal.SIGTERM)
    assert controller.end(60) == 0
    assert fleet.stage.started(129)
    assert STARTED in controller.steps(before), "what was at work was finished, and is remembered"
    asked = controller.log.read_text().count("asked to stop")

    before = controller.last()
    fleet.fault("pct-hang", "start")
    fleet.stop_container()
    controller.start()
    until(lambda: fleet.calls("start") > starts + 1, "a step is at work that does not end")
    controller.signal(signal.SIGTERM)
    until(lambda: controller.log.read_text().count("asked to stop") > asked, "it has heard, and waits")
    controller.signal(signal.SIGTERM)
    assert controller.end(30) == 0, "asked twice, it waits for nothing"
    controller.start()
    until(lambda: controller.status().get("running"), "the next life sees what is at work")
    fleet.no_faults()
    until(lambda: controller.is_ready(CT), "it goes on from there")
    until(lambda: controller.steps(before), "its end is remembered")
    assert controller.steps(before) == [STARTED]
    assert fleet.calls("start") == starts + 2


def test_killed_at_random_moments_the_end_is_the_same(fleet: Fleet) -> None:
    controller, chance = fleet.controller, random.Random(4)
    before, stops = controller.last(), fleet.calls("shutdown")
    fleet.save("ct129.yaml", container(count=1))
    for _ in range(5):
        time.sleep(chance.uniform(0.3, 4.0))  # what is tested is that it does not matter when
        controller.kill()
        controller.start()
    until(lambda: controller.is_ready(CT) and _same_keys(controller, before), "it is as wanted, and all has ended")
    cards = [fleet.stage.opens(129, f"/dev/nvidia{n}") for n in range(2)]
    assert cards.count("allowed") == 1, cards
    assert fleet.calls("shutdown") == stops + 1
    worked = [step for step in controller.steps(before) if step[2] == "worked"]
    assert sorted(worked) == [(CT, "edit-config", "worked"), (CT, "restart", "worked")]


def _same_keys(controller: Controller, since: int) -> bool:
    """Whether each step that has begun has ended, once."""
    begun = sorted(event["step"] for event in controller.events("step-started", since))
    return begun == sorted(event["step"] for event in controller.events("step-ended", since))


def test_backoff_and_breaker_outlive_being_killed(fleet: Fleet) -> None:
    controller, chance = fleet.controller, random.Random(5)
    before = controller.last()
    fleet.fault("pct-start-fail", "no")
    fleet.stop_container()
    for number in (1, 2):
        until(partial(_have_ended, controller, before, number), f"start {number} has failed")
        time.sleep(chance.uniform(0.0, 3.0))
        controller.kill()
        controller.start()
        until(lambda: controller.object(CT).get("backoff_seconds"), "the next life keeps to the backoff")
    until(partial(_have_ended, controller, before, 3), "the third start has failed")
    fleet.fires("ReconcileBreakerOpen")
    begun, ended = controller.events("step-started", before), controller.events("step-ended", before)
    assert [e["result"] for e in ended] == ["failed"] * 3
    assert len(begun) == 3
    assert begun[1]["at"] - ended[0]["at"] >= 10
    assert begun[2]["at"] - ended[1]["at"] >= 20
    fleet.no_faults()
    controller.says("resume", CT)
    until(lambda: controller.is_ready(CT), "somebody said to go on, and it helped")
    fleet.ends("ReconcileBreakerOpen")


def _have_ended(controller: Controller, since: int, number: int) -> bool:
    return len(controller.events("step-ended", since)) >= number
