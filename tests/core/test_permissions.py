import dataclasses

from controller.core.batch import batch
from controller.core.next_steps import next_steps
from controller.core.permissions import Approval, Grants, asked_for, lapsed
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


def approval(wanted: Specs, step: Step, number: str = "1", **changed: object) -> Approval:
    (disruption,) = step.disrupts
    made = Approval(
        id=number,
        permission=disruption.permission,
        object=disruption.object,
        of=step.object,
        layer=step.layer,
        action=step.action,
        reason=step.reason,
        digest=wanted.digest_of(step.object),
        until=None,
        why="",
        by="me",
        at=1.0,
        summary=step.summary,
    )
    return dataclasses.replace(made, **changed)  # type: ignore[arg-type]


def test_an_approval_is_good_for_the_step_that_was_shown_and_no_other() -> None:
    wanted = specs(CT, policy=Policy(mode=Mode.ENFORCE))
    (step,) = ready(wanted)
    given = approval(wanted, step)
    grants = Grants(wanted, approvals=(given,))
    assert grants.may(step)
    assert grants.needed(step) == (given,)
    assert grants.source(step, step.disrupts[0]) == "approval 1"
    for other in (
        dataclasses.replace(step, reason="another"),
        dataclasses.replace(step, action="another"),
        dataclasses.replace(step, layer="another"),
        dataclasses.replace(step, summary="another card"),
    ):
        assert not grants.may(other)
        assert grants.needed(other) == ()
    assert not grants.without([given]).may(step)
    shown_in_part = Grants(wanted, approvals=(approval(wanted, step, summary=""),))
    assert shown_in_part.may(dataclasses.replace(step, summary="what was known later"))


def test_an_approval_is_not_good_for_another_spec() -> None:
    wanted = specs(CT, policy=Policy(mode=Mode.ENFORCE))
    (step,) = ready(wanted)
    given = approval(wanted, step)
    edited = specs(("ct", 129, "b"), policy=Policy(mode=Mode.ENFORCE))
    assert not Grants(edited, approvals=(given,)).may(step)
    assert lapsed(given, wanted, ()) == ""
    assert "has changed" in lapsed(given, edited, ())
    assert "in no spec" in lapsed(given, specs(), ())
    assert "is ready" in lapsed(given, wanted, {step.object})


def test_of_approvals_for_steps_that_are_alike_one_is_used() -> None:
    wanted = specs(CT, policy=Policy(mode=Mode.ENFORCE))
    (step,) = ready(wanted)
    both = approval(wanted, step, "1", summary=""), approval(wanted, step, "2", summary="")
    grants = Grants(wanted, approvals=both)
    assert [a.id for a in grants.needed(step)] == ["1"]
    assert [a.id for a in grants.without(grants.needed(step)).needed(step)] == ["2"]


def test_an_approval_that_is_not_needed_is_not_used() -> None:
    wanted = specs(CT)
    (step,) = ready(wanted)
    grants = Grants(wanted, approvals=(approval(wanted, step),))
    assert grants.needed(step) == ()
    assert grants.source(step, step.disrupts[0]) == "spec"
    reported = specs(CT, policy=Policy(mode=Mode.REPORT))
    grants = Grants(reported, approvals=(approval(reported, step),))
    assert grants.may(step)  # whoever approves a step of an object that is only reported on, means it
    assert len(grants.needed(step)) == 1


def test_an_approval_of_one_object_is_none_of_another() -> None:
    wanted = specs(CT, policy=Policy(mode=Mode.ENFORCE))
    (step,) = ready(wanted)
    foreign = Disruption(Ref("Guest", "201@a"), Permission.RESTART_CONTAINER)
    more = dataclasses.replace(step, disrupts=(*step.disrupts, foreign))
    own = approval(wanted, step)
    assert Grants(wanted, approvals=(own,)).missing(more) == (foreign,)
    theirs = dataclasses.replace(own, id="2", object=foreign.object)
    assert Grants(wanted, approvals=(own, theirs)).may(more)
