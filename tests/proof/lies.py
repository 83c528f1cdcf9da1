"""Hostile text: what a host's tools, configs and names may hold, and how an answer is twisted."""

from __future__ import annotations

import copy
import functools
from random import Random

from controller.core import observe
from controller.core.next_steps import Next, next_steps
from controller.core.view import View
from controller.facts.words import FleetFacts, Observation, Section
from controller.layers.order import ORDER
from controller.spec.model import Specs
from tests.proof.fleets import specs_of, start
from tests.proof.odd import make_odd
from tests.sim.controllers import Controller

EVIL = (
    *("\n", "\r", "\x00", "\x1b[2J\x1b[31m", "\x07", "\x85", "\u2028", "\u202e", "\udcff", "\ufeff"),
    *("'; touch /tmp/pwned; '", "$(touch /tmp/pwned)", "`id`", "-rf", "--", "../../../etc/shadow", "${IFS}", "%n%s"),
    *("<script>alert(1)</script>", "]]>", "{{x}}", "- a: [", "&a *a", "!!python/object:os.system", '"', "|", "==files"),
    *("\nkind: Host\nname: x\n", "\nlxc.cgroup2.devices.allow: a\n", "[snap]", "\n[Service]\nExecStart=/bin/sh\n"),
    *("9" * 400, "-1", "1e999", "0x10", "٣", "A" * 5000, "[" * 3000),
)
PARSERS = observe.parsers(ORDER)


@functools.cache
def answers() -> tuple[tuple[str, Section], ...]:
    """What simulated hosts answer, section by section, in many states: what parsers are fed from."""
    found: dict[tuple[str, str], Section] = {}
    for name in ("story", "story-done", "two-done", "alive-done", "boxes-done", "demo"):
        for seed in range(6):
            fleet, documents = start(name)
            chance = Random(seed)
            for _ in range(seed):
                make_odd(chance, fleet)
            controller = Controller(fleet, wanted=specs_of(documents))
            controller.world._checked = False
            controller.look()
            for facts in controller.eyes.facts.values():
                found.update({(layer, section.out): section for layer, section in facts.raw.items()})
    return tuple((layer, section) for (layer, _), section in found.items())


def twisted(text: str, chance: Random) -> str:
    """An answer in which something was cut, doubled, moved, or replaced by something hostile."""
    for _ in range(chance.randint(1, 4)):
        lines = text.split("\n")
        match chance.randrange(8):
            case 0:
                text = text[: chance.randrange(len(text) + 1)]
            case 1:
                lines.pop(chance.randrange(len(lines)))
                text = "\n".join(lines)
            case 2:
                lines.insert(chance.randrange(len(lines)), chance.choice(lines))
                text = "\n".join(lines)
            case 3:
                chance.shuffle(lines)
                text = "\n".join(lines)
            case 4 | 5:
                at = chance.randrange(len(text) + 1)
                text = text[:at] + chance.choice(EVIL) + text[at:]
            case 6:
                line = chance.randrange(len(lines))
                words = lines[line].split(" ")
                words[chance.randrange(len(words))] = chance.choice(EVIL)
                lines[line] = " ".join(words)
                text = "\n".join(lines)
            case _:
                at = chance.randrange(len(text) + 1)
                text = text[:at] + chance.choice('|:=,x0 9\n\t-/.[]{}"') + text[at + 1 :]
    return text


@functools.cache
def _seen(name: str) -> tuple[FleetFacts, Specs]:
    fleet, documents = start(name)
    specs = specs_of(documents)
    controller = Controller(fleet, wanted=specs)
    controller.world._checked = False
    controller.look()
    return controller.eyes.facts, specs


def with_lies(name: str, liar: str, chance: Random) -> tuple[FleetFacts, Specs]:
    """The facts of a fleet of which one host lies in some sections; of which none does when ``liar`` is ""."""
    facts, specs = _seen(name)
    raw = dict(facts[liar].raw) if liar else {}
    if not raw:
        return facts, specs  # it is off
    for section in chance.sample(sorted(raw), chance.randint(1, 3)):
        out = twisted(raw[section].out, chance)
        others = [host for host in facts if host != liar]
        if others and chance.random() < 0.3:
            out = out.replace(liar, "\0").replace(chance.choice(others), liar).replace("\0", chance.choice(others))
        raw[section] = Section(0, out)
    read = observe.read(PARSERS, Observation(liar, 0.0, raw))
    return {**copy.copy(facts), liar: read}, specs


def judged(facts: FleetFacts, specs: Specs) -> Next:
    """What follows."""
    return next_steps(ORDER, View(specs, facts))
