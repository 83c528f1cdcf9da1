from controller.core import observe
from controller.facts.words import Observation, Section, Unknown


def stumbles(section: Section) -> object:
    return len(None) + len(section.out)  # type: ignore[arg-type]


def test_a_parser_that_stumbles_leaves_its_section_unknown_and_the_others_known() -> None:
    seen = Observation("a", 1.0, {"odd": Section(0, "x"), "one": Section(0, "on")})
    facts = observe.read({"odd": stumbles, "one": lambda section: section.out}, seen)
    found = facts.section("odd")
    assert isinstance(found, Unknown)
    assert found.reason == "defect"
    assert "TypeError at tests/core/test_observe.py:" in found.message
    assert facts.section("one") == observe.read({"one": lambda section: section.out}, seen).section("one")
