import dataclasses

from controller.core.conditions import of_object
from controller.core.next_steps import next_steps
from controller.core.view import View
from controller.core.words import Layer, Skipped
from controller.facts.words import HostFacts, Unknown
from controller.spec.ref import Ref
from tests.core.builders import blocked_layer, specs, switch_layer, switches

ONE, CT, REF = switch_layer("one"), ("ct", 129, "a"), Ref("Container", "ct")


def ready(*layers: Layer, lacking: dict[str, str] | None = None, **sections: bool) -> list[tuple[str, str, str]]:
    following = next_steps(layers, View(specs(CT), switches(a=sections, b={})))
    missing = {step.id: "it" for step in following.ready} if lacking is not None else {}
    return [(c.type, c.status, c.reason) for c in of_object(REF, following, missing, {})]


def test_right() -> None:
    assert ready(ONE, one=True)[0] == ("Ready", "True", "InSync")


def test_being_put_right() -> None:
    assert [status for _, status, _ in ready(ONE, one=False)] == ["False", "True", "False", "False"]


def test_stalled_for_a_permission_or_a_block() -> None:
    assert ready(ONE, lacking={}, one=False)[2] == ("Stalled", "True", "permission-missing")
    assert ready(blocked_layer("wall"))[2] == ("Stalled", "True", "off")


def test_unknown_is_not_ready() -> None:
    facts = {"a": HostFacts("a", {}, failure=Unknown("unreachable", "no route"))}
    following = next_steps((ONE,), View(specs(CT), {**switches(b={}), **facts}))
    assert {(c.status, c.reason) for c in of_object(REF, following, {}, {})[:3]} == {("Unknown", "unreachable")}


def test_what_nobody_looks_after_is_not_called_ready() -> None:
    skipping = dataclasses.replace(ONE, check=lambda view, obj: Skipped("a: maintenance"))
    assert ready(skipping)[0] == ("Ready", "Unknown", "not-looked-after")
    assert ready(skipping, switch_layer("two"), two=True)[0] == ("Ready", "True", "InSync")
