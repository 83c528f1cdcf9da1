"""From what a host answered to facts: each section through its layer's parser, the unchanged ones not again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from controller.core.defects import DEFECT, defect
from controller.core.words import Layer
from controller.facts.units import UnitFacts
from controller.facts.units import parse as parse_units
from controller.facts.words import HostFacts, Known, Observation, ParseError, Section, Unknown

Parser = Callable[[Section], object]
WORLD = "world"


def parsers(layers: Sequence[Layer]) -> dict[str, Parser]:
    """The parser of each section: the world's own, and each layer's."""
    return {WORLD: parse_units, **{layer.name: layer.parse for layer in layers if layer.parse is not None}}


def read(parse: Mapping[str, Parser], seen: Observation, before: HostFacts | None = None) -> HostFacts:
    """The facts in an observation; what is byte for byte as it was ``before`` is taken over and not parsed."""
    if seen.failure is not None:
        return HostFacts(seen.host, {}, seen.failure, seen.at)
    if before is not None and before.failure is None and before.raw is seen.sections:
        return HostFacts(seen.host, before.sections, None, seen.at, seen.sections)
    sections: dict[str, Known[object] | Unknown] = {}
    for name, section in seen.sections.items():
        if before is not None and before.raw.get(name) == section and name in before.sections:
            sections[name] = before.sections[name]
        elif name in parse:
            sections[name] = _parsed(parse[name], seen.host, name, section)
    return HostFacts(seen.host, sections, None, seen.at, seen.sections)


def units(facts: HostFacts) -> UnitFacts | None:
    """The host's own state (generation, boot, units, lease), None when it is not known."""
    found = facts.section(WORLD)
    return found.value if isinstance(found, Known) and isinstance(found.value, UnitFacts) else None


def _parsed(parse: Parser, host: str, name: str, section: Section) -> Known[object] | Unknown:
    if section.rc != 0:
        said = " ".join(section.err.split())[:200] or "and said nothing"
        return Unknown("probe-failed", f"{name} could not be read on {host} (exit {section.rc}): {said}")
    try:
        return Known(parse(section))
    except ParseError as error:
        return Unknown(error.reason, f"{name} of {host}: {error.message}")
    except (ValueError, KeyError, IndexError, OverflowError, RecursionError) as error:
        return Unknown("garbage", f"{name} of {host} could not be understood: {error!r}")
    except Exception as error:
        return Unknown(DEFECT, f"{name} of {host} could not be understood: {defect(error)}")
