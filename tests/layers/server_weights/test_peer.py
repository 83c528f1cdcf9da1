"""Weights from another host of the fleet: offered for real by one, fetched for real by the other."""

from __future__ import annotations

import dataclasses
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.core.view import View
from controller.core.words import Drift, InSync, Step, Wait
from controller.facts.units import How, Job, UnitFacts
from controller.facts.words import HostFacts, Known
from controller.layers import server_weights
from controller.spec.load import load
from controller.spec.model import Specs
from tests.hub.server import Hub, running
from tests.layers.inside import Ground
from tests.layers.server_weights.box import REPO, SHARDS, Box, kill, model, wait
from tests.layers.server_weights.rig import SMALL, TWO, Rig
from tests.layers.servers import document


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running() as hub:
        hub.repos[REPO] = model()
        yield hub


class Two:
    """A host that has the model and one that wants it."""

    def __init__(self, root: Path, hub: Hub) -> None:
        for name in ("one", "two"):
            (root / name).mkdir()
        self.source, self.target = (Box(Ground(root / name), hub) for name in ("one", "two"))
        assert self.source.ground.run(self.source.step()) == 0, self.source.ground.said
        hub.sent.clear()
        self.jobs: tuple[Job, ...] = ()

    @property
    def specs(self) -> Specs:
        found = self.target.specs
        extra = load(
            {"specs.yaml": b"kind: Host\nname: abox\naddress: 127.0.0.1\nplatform: linux\n"},
        ).hosts
        return dataclasses.replace(found, hosts={**found.hosts, **extra})

    def look(self) -> View:
        here = self.target.look().facts["box1"]
        there = self.source.look().facts["box1"]
        world = Known(UnitFacts(1, "0" * 36, jobs=self.jobs))
        return View(
            self.specs,
            {"box1": here, "abox": HostFacts("abox", {**there.sections, "world": world})},
        )

    def drift(self) -> Drift:
        view = self.look()
        found = server_weights.check(view, view.specs.servers["served"])
        assert isinstance(found, Drift), found
        return found

    def step(self) -> Step:
        found = self.drift().remedy
        assert isinstance(found, Step), found
        return found


def test_it_is_asked_for_offered_and_fetched_without_the_hub(tmp_path: Path, hub: Hub) -> None:
    two = Two(tmp_path, hub)
    ask = two.step()
    assert (ask.action, ask.hosts) == ("ask-for-weights", ("box1",))
    assert two.target.ground.run(ask) == 0, two.target.ground.said
    offer = two.step()
    assert (offer.action, offer.hosts) == ("offer-weights", ("abox",))
    token = next(two.target.ground.path("/opt/reconcile/weights").glob("*.token"))
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.read_text() not in repr(offer) + repr(offer.stdin) + str(offer.args)
    job = two.source.ground.begin(offer)
    two.jobs = (Job(offer.id, "ModelServer/served", How.RUNNING, name=str(offer.job)),)
    try:
        wait(lambda: not isinstance(two.drift().remedy, Wait), 60)
        fetch = two.step()
        assert fetch.action == "fetch-weights"
        assert token.read_text() not in repr(fetch) + repr(fetch.stdin)
        url = _url(fetch)
        for request in (
            urllib.request.Request(f"{url}/{SHARDS[0]}"),
            urllib.request.Request(f"{url}/{SHARDS[0]}", headers={"Authorization": "Bearer guess"}),
            urllib.request.Request(f"{url}/..%2f..%2fsecret", headers={"Authorization": f"Bearer {token.read_text()}"}),
        ):
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(request, timeout=10)
        assert two.target.ground.run(fetch) == 0, two.target.ground.said
        assert job.wait(60) == 0, two.source.ground.said
    finally:
        if job.poll() is None:
            kill(job, two.source.ground.root)
    assert two.target.is_whole()
    assert hub.sent == []
    assert isinstance(two.target.check(), InSync)
    assert not token.exists()
    assert not list(two.source.ground.path("/run/reconcile/offers").iterdir())


def _url(step: Step) -> str:
    (peer,) = json.loads(step.stdin)["peers"]
    return str(peer["url"])


def test_a_host_that_stops_offering_is_no_loss(tmp_path: Path, hub: Hub) -> None:
    two = Two(tmp_path, hub)
    assert two.target.ground.run(two.step()) == 0, two.target.ground.said
    offer = two.step()
    job = two.source.ground.begin(offer)
    two.jobs = (Job(offer.id, "ModelServer/served", How.RUNNING, name=str(offer.job)),)
    wait(lambda: not isinstance(two.drift().remedy, Wait), 60)
    fetch = two.step()
    kill(job, two.source.ground.root)
    assert two.target.ground.run(fetch) == 0, two.target.ground.said
    assert "peer 0" in two.target.ground.said
    assert two.target.is_whole()
    assert hub.bytes_of(SHARDS[0]) > 0


def test_a_host_that_cannot_offer_is_passed_over(tmp_path: Path, hub: Hub) -> None:
    two = Two(tmp_path, hub)
    assert two.target.ground.run(two.step()) == 0, two.target.ground.said
    offer = two.step()
    two.jobs = (Job(offer.id, "ModelServer/served", How.EXIT, 1, name=str(offer.job)),)
    fetch = two.step()
    assert fetch.action == "fetch-weights"
    assert b'"peers": []' in fetch.stdin


def test_in_a_plan_and_in_the_simulated_fleet() -> None:
    rig = Rig(TWO[0])
    rig.actions()
    rig.want(TWO[0], document("other", "host: box1", model=SMALL))
    foretold = [each.step.action for each in rig.plan().steps if each.step.layer == "server.weights"]
    assert foretold == ["ask-for-weights", "offer-weights", "fetch-weights"]
    assert [action for action in rig.actions() if action in foretold] == foretold
    assert rig.actions() == []
