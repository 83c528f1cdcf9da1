import dataclasses

from controller.core.batch import batch
from controller.core.next_steps import next_steps
from controller.core.permissions import Grants, asked_for
from controller.core.view import View
from controller.core.words import Disruption, Step
from controller.spec.model import Limits, Specs
from controller.spec.policy import Mode, Permission, Policy
from controller.spec.ref import Ref
from tests.core.builders import ALLOW_ALL, specs, switch_layer, switches

ONE = switch_layer("one")
CT = ("ct", 129, "a")


def ready(wanted: Specs) -> tuple[Step, ...]:
    return next_steps((ONE,), View(wanted, switches(a={"one": False}, b={"one": False}))).ready


def test_a_step_needs_the_class_from_every_object_it_disrupts() -> None:
    wanted = specs(CT)
    (step,) = ready(wanted)
    foreign = Disruption(Ref("Guest", "kpro5/100"), Permission.RESTART_CONTAINER)
    more = dataclasses.replace(step, disrupts=(*step.disrupts, foreign))
    assert Grants(wanted).may(step)
    assert Grants(wanted).missing(more) == (foreign,)
    assert not Grants(wanted).may(more)
    assert Grants(wanted, frozenset({foreign})).may(more)


def test_mode_report_gives_nothing_not_even_what_it_allows() -> None:
    wanted = specs(CT, policy=Policy(mode=Mode.REPORT, allow=ALLOW_ALL.allow))
    (step,) = ready(wanted)
    assert Grants(wanted).missing(step) == step.disrupts
    assert Grants(wanted, asked_for([step])).may(step)


def test_a_step_that_disrupts_nothing_still_needs_mode_enforce() -> None:
    for mode, allowed in ((Mode.ENFORCE, True), (Mode.REPORT, False)):
        wanted = specs(CT, policy=Policy(mode=mode))
        (step,) = ready(wanted)
        assert Grants(wanted).may(dataclasses.replace(step, disrupts=())) is allowed


def test_steps_that_overlap_are_taken_one_at_a_time() -> None:
    steps = ready(specs(CT, ("second", 130, "a"), ("third", 131, "b")))
    many = Limits(disruptive_at_once=10)
    assert [s.object.name for s in batch(steps, many)] == ["ct", "third"]
    assert [s.object.name for s in batch(steps, many, frozenset({"a"}))] == ["third"]
    assert [s.object.name for s in batch(steps, Limits())] == ["ct"]
    apart = Limits(disruptive_at_once=10, never_together=(("a", "b"),))
    assert [s.object.name for s in batch(steps, apart)] == ["ct"]
    assert batch(steps, apart, frozenset({"b"})) == ()


def test_what_is_at_work_already_counts_for_how_much_may_be_disrupted_at_once() -> None:
    steps = ready(specs(CT, ("third", 131, "b")))
    assert batch(steps, Limits(), frozenset({"a"})) == ()
    assert [s.object.name for s in batch(steps, Limits(disruptive_at_once=2), frozenset({"a"}))] == ["third"]
    harmless = [dataclasses.replace(step, disrupts=()) for step in steps]
    assert [s.object.name for s in batch(harmless, Limits(), frozenset({"a"}))] == ["third"]
