"""Unknown is not absent: what is not known is never right, and nothing follows from it."""

from __future__ import annotations

import dataclasses

import pytest

from controller.core import observe, probe
from controller.core.next_steps import next_steps
from controller.core.permissions import Grants
from controller.core.view import View
from controller.core.words import Gate
from controller.facts.words import HostFacts, Known, Observation, Section, Unknown
from controller.spec.model import ModelServer, Specs
from controller.spec.policy import Mode
from controller.spec.ref import Ref
from tests.core.builders import specs, switch_layer, switches

ONE = switch_layer("one")
CT = ("ct", 129, "a")
SERVER = ModelServer.model_validate(
    {
        "kind": "ModelServer",
        "name": "server",
        "container": "ct",
        "model": {"repo": "a/b", "revision": "0" * 40, "directory": "/models"},
        "engine": {"name": "sglang", "version": "0.5.11"},
        "serve": {"port": 30000},
        "policy": {"mode": "enforce", "allow": ["restart-server"]},
    }
)


def test_a_host_layer_that_only_reports_holds_its_containers_while_it_is_not_known() -> None:
    report = dataclasses.replace(switch_layer("report", kind="Host"), gates=Gate.NOTHING)
    known = switches(a={"report": False, "one": False}, b={"report": True})
    assert "one" in [step.layer for step in next_steps((report, ONE), View(specs(CT), known)).ready]
    unknown = switches(a={"one": False}, b={"report": True})
    assert next_steps((report, ONE), View(specs(CT), unknown)).ready == ()


def test_a_server_waits_for_its_container() -> None:
    wanted = dataclasses.replace(specs(CT), servers={"server": SERVER})
    own = switch_layer("own", kind="ModelServer")
    own = dataclasses.replace(own, check=lambda view, server: ONE.check(view, wanted.containers["ct"]))
    following = next_steps((ONE, own), View(wanted, switches(a={"one": False}, b={})))
    assert [step.object for step in following.ready] == [Ref("Container", "ct")]
    assert [held for _, held in following.held] == ["one of Container/ct"]


def test_in_sync_is_all_of_it() -> None:
    following = next_steps((ONE, switch_layer("two")), View(specs(CT), switches(a={"one": True, "two": False}, b={})))
    assert not following.in_sync


def test_a_host_that_gave_no_answer_has_no_facts_even_if_it_had_some() -> None:
    failure = Unknown("unreachable", "no route")
    before = HostFacts("a", {"one": Known("on")}, None, 1.0, {"one": Section(0, "on")})
    facts = observe.read({"one": lambda section: section.out}, Observation("a", 2.0, {}, failure), before)
    assert facts.section("one") == failure


def test_a_section_that_failed_is_not_known_whatever_it_printed() -> None:
    seen = Observation("a", 1.0, {"one": Section(124, "on", "timed out\n")})
    found = observe.read({"one": lambda section: section.out}, seen).section("one")
    assert isinstance(found, Unknown)
    assert found.reason == "probe-failed"


def test_an_object_in_no_spec_has_given_nothing() -> None:
    assert Grants(Specs()).mode_of(Ref("Container", "ct")) is Mode.REPORT


@pytest.mark.parametrize(
    "answer",
    [
        b"other begin\nother section one 0 2 0\non\nother end\n",
        b"motd\nnonce begin\nnonce end\n",
        b"nonce begin\nnonce section one 0 1 0\non\nnonce end\n",
        b"nonce begin\nnonce section one 0 9 0\non\nnonce end\n",
        b"nonce begin\nother section one 0 2 0\non\nnonce end\n",
    ],
)
def test_an_answer_to_another_question_or_of_another_length_is_none(answer: bytes) -> None:
    with pytest.raises(probe.FrameError):
        probe.read(answer, "nonce")
