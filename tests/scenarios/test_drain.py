"""A host is emptied before it goes: what lies there, who can take it, which line to edit. Played in both worlds."""

from __future__ import annotations

from tests.scenarios.move import MOVE, specification
from tests.scenarios.stage import Stage


def test_drained_before_it_is_switched_off(moving: Stage) -> None:
    specification(moving, host="kpro6", kpro6="maintenance")
    before = moving.started(129)
    asked = moving.reconcile("drain", "kpro6", "-o", "json")
    assert asked.rc == 2, asked.out + asked.err
    (leaving,) = asked.json["containers"]
    assert (leaving["object"], leaving["runs"]) == ("Container/ct129", True)
    assert {c["host"]: (c["can"], c["reason"]) for c in leaving["candidates"]} == {
        "kpro4": (False, "not-enough-gpus"),
        "kpro5": (True, ""),
    }
    text = moving.reconcile("drain", "kpro6").out
    assert "host: kpro5" in text
    assert "spec.yaml" in text
    assert moving.started(129) == before

    specification(moving, host="kpro6", kpro6="maintenance", allow="[]")
    refused = moving.reconcile("drain", "kpro6", "--stop")
    assert refused.rc == 2
    assert "restart-container:Container/ct129" in refused.err
    assert moving.started(129) == before

    specification(moving, host="kpro6", kpro6="maintenance", allow=MOVE)
    assert moving.reconcile("drain", "kpro6", "--stop").rc == 2
    assert (moving.node(129), moving.started(129)) == ("kpro6", "")

    specification(moving, host="kpro5", kpro6="decommissioned")
    done = moving.reconcile("--once")
    assert done.rc == 0, done.out + done.err
    empty = moving.reconcile("drain", "kpro6")
    assert (empty.rc, empty.out) == (0, "Nothing lies on kpro6 any more.\n")


def test_a_host_that_does_not_answer_is_not_called_empty(moving: Stage) -> None:
    moving.power_off("kpro6")
    asked = moving.reconcile("drain", "kpro6")
    assert asked.rc == 1
    assert "cannot be looked at" in asked.err
    unknown = moving.reconcile("drain", "kpro7")
    assert unknown.rc == 1
    assert "kpro" in unknown.err
