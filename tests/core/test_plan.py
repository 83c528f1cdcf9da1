import dataclasses

import pytest

from controller.core.plan import PlanLoop, plan
from controller.core.view import View
from controller.core.words import Drift, Layer, Step, Verdict
from tests.core.builders import blocked_layer, specs, switch_layer, switches, turn_on

ONE, TWO = switch_layer("one"), switch_layer("two")
CT = ("ct", 129, "a")


def test_the_whole_chain_is_predicted_in_order() -> None:
    predicted = plan((ONE, TWO), specs(CT), switches(a={"one": False, "two": False}, b={}))
    assert [p.step.layer for p in predicted.steps] == ["one", "two"]
    assert predicted.steps[1].requires == (predicted.steps[0].step.id,)
    assert predicted.then.in_sync
    assert not predicted.now.in_sync


def test_what_is_blocked_stays_so_and_ends_the_chain() -> None:
    predicted = plan((ONE, blocked_layer("wall"), TWO), specs(CT), switches(a={"one": False, "two": False}, b={}))
    assert [p.step.layer for p in predicted.steps] == ["one"]
    assert [b.reason for _, b in predicted.then.blocked] == ["off"]


def test_two_layers_that_undo_each_other_are_named() -> None:
    def undoing(layer: Layer, other: str) -> Layer:
        def check(view: View, obj: object) -> Verdict:
            verdict = layer.check(view, obj)
            if isinstance(verdict, Drift) and isinstance(verdict.remedy, Step):
                undo = turn_on("a", other)
                step = dataclasses.replace(
                    verdict.remedy,
                    effect=lambda facts: {
                        **facts,
                        "a": undo(facts)["a"].with_section(layer.name, True).with_section(other, False),
                    },
                )
                return Drift(verdict.reason, verdict.message, step)
            return verdict

        return dataclasses.replace(layer, check=check)

    layers = (undoing(ONE, "two"), undoing(TWO, "one"))
    with pytest.raises(PlanLoop, match=r"switch-one-ct-\w+ -> switch-two-ct-\w+"):
        plan(layers, specs(CT), switches(a={"one": False, "two": True}, b={}))


def test_a_step_without_an_effect_is_a_loop_and_not_for_ever() -> None:
    def check(view: View, obj: object) -> Verdict:
        verdict = ONE.check(view, obj)
        assert isinstance(verdict, Drift)
        assert isinstance(verdict.remedy, Step)
        return Drift(verdict.reason, verdict.message, dataclasses.replace(verdict.remedy, effect=lambda facts: facts))

    with pytest.raises(PlanLoop):
        plan((dataclasses.replace(ONE, check=check),), specs(CT), switches(a={"one": False}, b={}))
