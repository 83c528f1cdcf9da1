"""What a plan of a large fleet costs."""

from controller.core.plan import plan
from controller.core.view import View
from controller.core.words import Layer, Verdict
from tests.core.builders import specs, switch_layer, switches


def test_a_fleet_is_judged_once_for_each_step_of_the_longest_chain_and_not_of_every_object() -> None:
    asked = 0
    one, two = switch_layer("one"), switch_layer("two")

    def counting(view: View, obj: object) -> Verdict:
        nonlocal asked
        asked += 1
        return one.check(view, obj)

    hosts = [f"h{n}" for n in range(50)]
    predicted = plan(
        (Layer("one", one.kind, one.reasons, counting), two),
        specs(*((f"ct{n}", 100 + n, host) for n, host in enumerate(hosts)), hosts=tuple(hosts)),
        switches(**{host: {"one": False, "two": False} for host in hosts}),
    )
    assert len(predicted.steps) == 100
    assert asked == 3 * len(hosts)  # as it is, after the first steps, after the second ones
    for planned in predicted.steps:
        assert len(planned.requires) == (1 if planned.step.layer == "two" else 0)
