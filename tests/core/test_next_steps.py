import dataclasses

from controller.core.next_steps import next_steps
from controller.core.view import View
from controller.core.words import Drift, Gate, Layer, Step, Unseen
from controller.facts.words import HostFacts, Known, Unknown
from controller.spec.model import Fleet, GpuSelector, Lifecycle, Limits, ModelServer, Specs
from controller.spec.ref import Ref
from tests.core.builders import blocked_layer, specs, switch_layer, switches

ONE, TWO = switch_layer("one"), switch_layer("two")
CT = ("ct", 129, "a")


def test_the_first_layer_that_is_not_right_goes_first_and_holds_the_later_ones() -> None:
    following = next_steps((ONE, TWO), View(specs(CT), switches(a={"one": False, "two": False}, b={})))
    assert [s.layer for s in following.ready] == ["one"]
    assert [(s.layer, held) for s, held in following.held] == [("two", "one of Container/ct")]
    assert not following.in_sync


def test_everything_right_is_in_sync() -> None:
    following = next_steps((ONE, TWO), View(specs(CT), switches(a={"one": True, "two": True}, b={})))
    assert following.in_sync
    assert not following.ready


def test_an_unknown_layer_holds_what_comes_after_it() -> None:
    following = next_steps((ONE, TWO), View(specs(CT), switches(a={"two": False}, b={})))
    assert following.ready == ()
    assert following.verdict(Ref("Container", "ct"), "one") == Unseen("not-asked", "a was not asked for one")


def test_nothing_is_ready_on_a_host_that_does_not_answer() -> None:
    facts = {"a": HostFacts("a", {}, failure=Unknown("unreachable", "no route")), **switches(b={"one": False})}
    following = next_steps((ONE,), View(specs(CT, ("other", 130, "b")), facts))
    assert [s.hosts for s in following.ready] == [("b",)]


def test_a_host_layer_that_is_not_known_or_gates_holds_its_containers() -> None:
    gate = dataclasses.replace(switch_layer("gate", kind="Host"), gates=Gate.ALL)
    drifted = next_steps((gate, ONE), View(specs(CT), switches(a={"gate": False, "one": False}, b={"gate": True})))
    assert [s.layer for s in drifted.ready] == ["gate"]
    unseen = next_steps((gate, ONE), View(specs(CT), switches(a={"one": False}, b={"gate": True})))
    assert unseen.ready == ()


def test_a_host_layer_that_only_reports_holds_nothing_when_it_drifted() -> None:
    report = blocked_layer("report", kind="Host")
    report = dataclasses.replace(report, gates=Gate.NOTHING)
    following = next_steps((report, ONE), View(specs(CT), switches(a={"one": False}, b={})))
    assert [s.layer for s in following.ready] == ["one"]
    assert {(str(j.object), b.reason) for j, b in following.blocked} == {("Host/a", "off"), ("Host/b", "off")}


def test_a_layer_of_gpus_holds_what_uses_them_and_nothing_else() -> None:
    gate = switch_layer("gate", kind="Host")
    wanted = specs(CT)
    facts = switches(a={"gate": False, "one": False}, b={"gate": True})
    assert [s.layer for s in next_steps((gate, ONE), View(wanted, facts)).ready] == ["gate", "one"]
    user = wanted.containers["ct"].model_copy(update={"gpus": GpuSelector(count=1)})
    using = dataclasses.replace(wanted, containers={"ct": user})
    assert [s.layer for s in next_steps((gate, ONE), View(using, facts)).ready] == ["gate"]


def independent(layer: Layer) -> Layer:
    """The same layer, whose step does not rest on the layers below."""

    def check(view: View, obj: object) -> object:
        verdict = layer.check(view, obj)
        if not isinstance(verdict, Drift):
            return verdict
        step = verdict.remedy
        assert isinstance(step, Step)
        return dataclasses.replace(verdict, remedy=dataclasses.replace(step, independent=True))

    return dataclasses.replace(layer, check=check)


def test_an_independent_step_is_held_by_no_layer_below_it() -> None:
    layers = (blocked_layer("first"), independent(TWO))
    following = next_steps(layers, View(specs(CT), switches(a={"two": False}, b={})))
    assert [s.layer for s in following.ready] == ["two"]


def test_nothing_not_even_an_independent_step_goes_on_where_a_layer_that_gates_all_is_not_right() -> None:
    gate = dataclasses.replace(blocked_layer("gate", kind="Host"), gates=Gate.ALL)
    following = next_steps((gate, independent(TWO)), View(specs(CT), switches(a={"two": False}, b={})))
    assert following.ready == ()
    assert [(s.layer, held) for s, held in following.held] == [("two", "gate of Host/a")]
    dark = {"a": HostFacts("a", {"two": Known(False)}), **switches(b={"gate": True})}
    gate = dataclasses.replace(switch_layer("gate", kind="Host"), gates=Gate.ALL)
    assert next_steps((gate, independent(TWO)), View(specs(CT), dark)).ready == ()


def test_a_step_that_touches_a_host_where_nothing_may_be_done_waits_too() -> None:
    gate = dataclasses.replace(switch_layer("gate", kind="Host"), gates=Gate.ALL)

    def check(view: View, obj: object) -> object:
        verdict = TWO.check(view, obj)
        assert isinstance(verdict, Drift)
        assert isinstance(verdict.remedy, Step)
        return dataclasses.replace(verdict, remedy=dataclasses.replace(verdict.remedy, hosts=("a", "b")))

    move = dataclasses.replace(TWO, check=check)
    facts = switches(a={"gate": True, "two": False}, b={"gate": False})
    following = next_steps((gate, move), View(specs(CT), facts))
    assert [s.layer for s in following.ready] == ["gate"]
    assert [held for _, held in following.held] == ["gate of Host/b"]


def test_a_check_that_stumbles_is_unknown_and_keeps_no_other_object_from_being_looked_after() -> None:
    def check(view: View, obj: object) -> object:
        if obj is view.specs.containers["ct"]:
            raise AssertionError("password: hunter2")
        return ONE.check(view, obj)

    odd = dataclasses.replace(ONE, check=check)
    facts = switches(a={"one": False}, b={"one": False})
    following = next_steps((odd,), View(specs(CT, ("other", 130, "b")), facts))
    assert [s.object.name for s in following.ready] == ["other"]
    verdict = following.verdict(Ref("Container", "ct"), "one")
    assert isinstance(verdict, Unseen)
    assert verdict.reason == "defect"
    assert "AssertionError at tests/core/test_next_steps.py:" in verdict.message
    assert "hunter2" not in verdict.message


def kept_apart(wanted: Specs, **lifecycle: str) -> Specs:
    fleet = Fleet(limits=Limits(never_together=(("a", "b"),)))
    hosts = {
        name: host.model_copy(update={"lifecycle": Lifecycle(lifecycle[name])}) if name in lifecycle else host
        for name, host in wanted.hosts.items()
    }
    return dataclasses.replace(wanted, fleet=fleet, hosts=hosts)


def test_nothing_is_disrupted_beside_a_host_of_its_group_that_cannot_be_seen() -> None:
    dark = HostFacts("b", {}, failure=Unknown("unreachable", "no route"))
    view = View(kept_apart(specs(CT)), {**switches(a={"one": False}), "b": dark})
    following = next_steps((ONE,), view)
    assert following.ready == ()
    assert [held for _, held in following.held] == [
        "Host/b, which is never disrupted together with a and cannot be observed"
    ]
    assert next_steps((ONE,), dataclasses.replace(view, facts=switches(a={"one": False}))).ready == ()
    assert next_steps((ONE,), dataclasses.replace(view, facts=switches(a={"one": False}, b={}))).ready
    assert next_steps((ONE,), dataclasses.replace(view, specs=kept_apart(specs(CT), b="decommissioned"))).ready


def test_a_server_waits_for_what_its_container_waits_for() -> None:
    server = ModelServer.model_construct(name="llm", container="ct", host=None)
    wanted = dataclasses.replace(specs(CT), servers={"llm": server})
    gate = dataclasses.replace(switch_layer("gate", kind="Host"), gates=Gate.ALL)
    of_server = dataclasses.replace(
        blocked_layer("serve", kind="ModelServer"),
        check=lambda view, obj: ONE.check(view, view.specs.containers["ct"]),
    )
    facts = switches(a={"gate": False, "one": False, "two": True}, b={"gate": True})
    following = next_steps((gate, TWO, of_server), View(wanted, facts))
    assert [s.layer for s in following.ready] == ["gate"]
    assert [j.held for j in following.judged if j.layer == "serve"] == ["gate of Host/a"]


def test_a_layer_of_a_plain_host_that_only_reports_holds_no_server_there() -> None:
    server = ModelServer.model_construct(name="llm", container=None, host="a")
    wanted = dataclasses.replace(specs(CT), servers={"llm": server})
    report = dataclasses.replace(blocked_layer("report", kind="Host"), gates=Gate.NOTHING)
    of_server = dataclasses.replace(
        blocked_layer("serve", kind="ModelServer"),
        check=lambda view, obj: ONE.check(view, view.specs.containers["ct"]),
    )
    following = next_steps((report, of_server), View(wanted, switches(a={"one": False}, b={})))
    assert [j.held for j in following.judged if j.layer == "serve"] == [""]
