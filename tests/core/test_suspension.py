import dataclasses

from controller.core.cause import Cause, cause_of
from controller.core.conditions import of_all
from controller.core.next_steps import next_steps
from controller.core.suspension import Suspension, held_by, stopped
from controller.core.view import View
from controller.core.words import Disruption
from controller.spec.policy import Permission
from controller.spec.ref import Ref
from tests.core.builders import specs, switch_layer, switches

WANTED = specs(("ct", 129, "a"), ("other", 130, "b"))
CT, OTHER = Ref("Container", "ct"), Ref("Container", "other")
UPCOMING = next_steps((switch_layer("one"),), View(WANTED, switches(a={"one": False}, b={"one": False})))
STEP = next(step for step in UPCOMING.ready if step.object == CT)


def suspended(*refs: Ref) -> dict[Ref, Suspension]:
    return {ref: Suspension(ref, None, "holiday", "me", 1.0) for ref in refs}


def test_what_holds_a_step() -> None:
    guest = Ref("Guest", "201@a")
    disrupting = dataclasses.replace(STEP, disrupts=(*STEP.disrupts, Disruption(guest, Permission.CHANGE_DRIVER)))
    moving = dataclasses.replace(STEP, hosts=("a", "b"))
    for step, ref, held in (
        (STEP, CT, True),
        (STEP, Ref("Host", "a"), True),  # of a host: nothing on it
        (STEP, Ref("Host", "b"), False),
        (STEP, OTHER, False),
        (moving, Ref("Host", "b"), True),
        (disrupting, guest, True),
        (STEP, guest, False),
    ):
        assert (held_by(step, suspended(ref), WANTED) is not None) is held, ref


def test_a_suspended_object_is_not_stalled_and_says_who_suspended_it() -> None:
    suspensions = suspended(CT)
    stops = stopped(UPCOMING.ready, suspensions, WANTED)
    assert list(stops) == [STEP.id]
    told = of_all([CT, OTHER], UPCOMING, {}, {}, stops, suspensions)
    assert [(c.type, c.status, c.reason) for c in told[CT]] == [
        ("Ready", "False", "off"),
        ("Reconciling", "False", "suspended"),
        ("Stalled", "False", "suspended"),
        ("Suspended", "True", "suspended"),
    ]
    assert told[CT][3].message == "Container/ct is suspended by me until resumed: holiday"
    assert [(c.type, c.status) for c in told[OTHER]][1:] == [
        ("Reconciling", "True"),
        ("Stalled", "False"),
        ("Suspended", "False"),
    ]


def test_who_caused_a_drift() -> None:
    reached = {ref: WANTED.digest_of(ref) for ref in (CT, Ref("Host", "a"))}
    assert cause_of(CT, WANTED, reached.get) is Cause.CORRECTIVE
    assert cause_of(CT, WANTED, {}.get) is Cause.INTENTIONAL
    assert cause_of(CT, WANTED, {**reached, CT: "0" * 64}.get) is Cause.INTENTIONAL
    # what is written about its host is meant for it too
    assert cause_of(CT, WANTED, {**reached, Ref("Host", "a"): "0" * 64}.get) is Cause.INTENTIONAL
