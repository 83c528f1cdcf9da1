"""The loop at work on the simulated fleet, as a real Prometheus and a real Alertmanager see it."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from controller.layers.order import ORDER
from controller.report.serve import Listen, Server
from controller.run import state
from controller.run.daemon import Daemon
from controller.run.git import commit_of
from controller.run.loop import Loop
from controller.run.memory import Memory
from controller.run.picture import Board
from controller.run.records import Records
from controller.spec.model import Specs
from controller.world.sim import SimWorld
from controller.world.sim.faults import Fault, Name
from tests.monitoring.servers import Prometheus, eventually, require, running
from tests.report.pictures import DEMO
from tests.sim.fleets import demo

POWER = 'reconcile_drift{name="ct129", layer="container.power"}'
READY = 'max by (name) (reconcile_object_condition{name="ct129", type="Ready", status="True"})'


@dataclass(frozen=True)
class Watched:
    """A loop, the files and the fleet that it looks after, and the Prometheus that looks at it."""

    specs: Path
    world: SimWorld
    prometheus: Prometheus

    def save(self, name: str, text: str) -> None:
        """Save a spec file as editors do: written beside, renamed into place."""
        beside = self.specs / f".{name}.new"
        beside.write_text(text)
        beside.rename(self.specs / name)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    require()
    place = tmp_path_factory.mktemp("loop")
    specs = place / "specs"
    specs.mkdir()
    for name in ("hosts.yaml", "ct129.yaml"):
        shutil.copy(DEMO / name, specs)
    identity, memory, board = state.identity(place), Memory.open(place), Board()
    fleet = demo()
    fleet.now = time.time()  # its dates are those of Prometheus
    world = SimWorld(fleet, identity.id, identity.name)
    records = Records(memory, place, identity, Specs(), commit_of(specs))
    daemon = Daemon(Loop(ORDER, records, board, random.Random(1)), world, specs, memory, board)
    at_work = threading.Thread(target=daemon.run)
    at_work.start()
    try:
        with Server(Listen("127.0.0.1", 0), board) as server, running(place, str(server.listen)) as prometheus:
            yield Watched(specs, world, prometheus)
    finally:
        daemon.stop()
        at_work.join()
        memory.close()


def is_now(watched: Watched, expression: str, value: float) -> None:
    eventually(lambda: watched.prometheus.value(expression) == value, f"{expression} is {value}")


def test_drift_comes_and_goes_with_what_people_do(watched: Watched) -> None:
    is_now(watched, READY, 1)
    is_now(watched, POWER, 0)
    good = (watched.specs / "ct129.yaml").read_text()
    watched.save("ct129.yaml", good.replace("mode: enforce", "mode: report"))
    eventually(
        lambda: watched.prometheus.query('reconcile_object_info{name="ct129", mode="report"}'), "it only reports"
    )
    watched.world.inject(Fault(Name.CT_STOP, "kpro5", guest=129))
    is_now(watched, POWER, 1)
    is_now(watched, READY, 0)
    since = eventually(
        lambda: watched.prometheus.value(
            'time() - reconcile_drift_since_timestamp_seconds{name="ct129", layer="container.power"}'
        ),
        "since when is told",
    )
    assert abs(since) < 600  # the fleet's clock runs ahead by the time that simulated steps take
    watched.save("ct129.yaml", good)
    is_now(watched, POWER, 0)
    is_now(watched, READY, 1)
    assert watched.prometheus.value(f"max_over_time({POWER}[10m])") == 1
    assert watched.prometheus.query('reconcile_steps_total{layer="container.power", result="worked"} > 0')


def test_a_broken_spec_file_is_an_alert_and_nothing_is_done_for_it(watched: Watched) -> None:
    is_now(watched, READY, 1)
    good = (watched.specs / "ct129.yaml").read_text()
    steps = watched.prometheus.value("sum(reconcile_steps_total)")
    assert "ReconcileSpecErrors" not in watched.prometheus.alerts()
    watched.save("ct129.yaml", good.replace("kind:", "kind: ["))
    eventually(lambda: "ReconcileSpecErrors" in watched.prometheus.alerts(), "the alert fires")
    is_now(watched, READY, 1)
    assert watched.prometheus.value("sum(reconcile_steps_total)") == steps
    watched.save("ct129.yaml", good)
    is_now(watched, "reconcile_spec_errors", 0)


def test_the_series_of_an_object_go_when_its_document_is_deleted(watched: Watched) -> None:
    of_it = '{__name__=~"reconcile_.*", name="ct129"}'
    eventually(lambda: watched.prometheus.query(of_it), "the container has series")
    (watched.specs / "ct129.yaml").unlink()
    eventually(lambda: not watched.prometheus.query(of_it), "its series have gone")
    assert watched.prometheus.query('reconcile_object_info{name="kpro5"}')
