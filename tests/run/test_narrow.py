import pytest

from controller.run.session import Mistake, narrow
from controller.spec.model import Specs
from controller.spec.ref import Ref
from tests.core.builders import specs

WANTED: Specs = specs(("one", 101, "a"), ("two", 102, "a"), ("three", 103, "b"))


def taken(**to: list[str]) -> set[str]:
    narrowed = narrow(WANTED, to.get("hosts", []), to.get("objects", []), to.get("layers", []))
    return {str(obj.ref) for obj in WANTED if narrowed.takes(obj.ref, "container.power")}


def test_an_object_brings_what_it_stands_on_and_a_host_what_lives_on_it() -> None:
    assert taken(objects=["one"]) == {"Container/one", "Host/a"}
    assert taken(hosts=["a"]) == {"Container/one", "Container/two", "Host/a"}
    assert taken(hosts=["a", "b"]) == {str(obj.ref) for obj in WANTED}


def test_each_option_narrows_what_the_others_have_left() -> None:
    assert taken(hosts=["a"], objects=["one"]) == {"Container/one", "Host/a"}
    assert taken(hosts=["a"], objects=["one"], layers=["container.devices"]) == set()


def test_what_is_narrowed_to_nothing_is_a_mistake_and_never_everything() -> None:
    with pytest.raises(Mistake, match="Container/three does not live on a"):
        narrow(WANTED, ["a"], ["three"], [])
    assert not narrow(WANTED, ["a"], ["one"], []).takes(Ref("Container", "three"), "")
