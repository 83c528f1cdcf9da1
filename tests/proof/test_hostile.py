"""Hostile input: no parser stumbles or hangs, nothing that a host or a spec says becomes structure anywhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from random import Random

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from controller.core import conditions, observe, probe
from controller.core.next_steps import Next
from controller.core.permissions import Grants
from controller.core.plan import PlanLoop, plan
from controller.core.words import Drift, Step, Unseen
from controller.facts.words import FleetFacts, Known, Observation, Section, Unknown
from controller.layers.order import ORDER
from controller.layers.shared import pve_conf
from controller.report import model, text
from controller.spec.errors import render
from controller.spec.load import read
from controller.spec.model import Specs
from controller.spec.ref import Ref
from controller.world.port import Order
from controller.world.units import Controller as Identity
from controller.world.units import order_text, script_text
from tests.proof.fleets import SECRET, start
from tests.proof.lies import EVIL, PARSERS, answers, judged, twisted, with_lies

EXAMPLES = int(os.environ.get("RECONCILE_EXAMPLES", "60"))
unhurried = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=EXAMPLES)
seeds = st.integers(0, 2**32)
LONG = 5.0  # seconds that nothing here may take: patient with a busy machine, and far from what a bad pattern takes
STYLE = re.compile(r"\x1b\[\d+m")  # what is ours; the hostile sequences hold others beside it
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@unhurried
@given(seeds)
def test_no_parser_stumbles_over_a_twisted_answer(seed: int) -> None:
    chance = Random(seed)
    name, section = chance.choice(answers())
    said = Section(chance.choice((0, 0, 0, 1, 124)), twisted(section.out, chance), chance.choice(("", *EVIL)))
    is_read(name, said)


@unhurried
@given(st.sampled_from(sorted(PARSERS)), st.text(max_size=200) | st.text(alphabet="|:=,x0 9\n\t-/.[]{}", max_size=400))
def test_no_parser_stumbles_over_any_text(name: str, said: str) -> None:
    is_read(name, Section(0, said))


def is_read(name: str, section: Section) -> None:
    began = time.process_time()
    found = observe.read(PARSERS, Observation("a", 0.0, {name: section})).section(name)
    assert time.process_time() - began < LONG
    assert not (isinstance(found, Unknown) and found.reason == "defect"), found
    if section.rc != 0:
        assert isinstance(found, Unknown)


def test_no_parser_takes_long_over_much() -> None:
    """What grows with the square of a long line or of many lines would show here: an answer has up to 4 MiB."""
    for name, section in {name: section for name, section in answers() if section.out}.items():
        for said in (
            section.out * (400_000 // len(section.out) + 1),
            section.out.replace(" ", " " * 20_000, 5),
            section.out.replace("|", "|" * 20_000, 5),
            section.out + "[" * 50_000 + "a:" * 50_000 + "\n" * 50_000,
            section.out.replace("\n", "", 3) + "0" * 100_000,
        ):
            is_read(name, Section(0, said))


@unhurried
@given(st.binary(max_size=300), seeds)
def test_no_frame_stumbles(data: bytes, seed: int) -> None:
    chance, begin = Random(seed), b"nonce begin\n"
    frame = begin + b"nonce section a 0 3 2\nout\xff\xfe\nnonce end\n"
    for _ in range(chance.randrange(4)):
        at = chance.randrange(len(frame) + 1)
        frame = frame[:at] + data[: chance.randrange(20)] + frame[at + chance.randrange(3) :]
    for each in (data, begin + data, frame):
        try:
            sections = probe.read(each, "nonce")
        except probe.FrameError:
            continue
        assert sum(len(s.out) for s in sections.values()) <= len(each)


def status(specs: Specs, upcoming: Next, facts: FleetFacts) -> str:
    nothing = model.Remembered(0.0, {}, {}, {}, {})
    of_all = conditions.of_all([o.ref for o in specs], upcoming, {}, {})
    return text.status_text(model.status_report(specs, upcoming, of_all, model.running_rows(facts), nothing), True)


# What a lying host can bring about

DONE = {"story-done": "kpro5", "alive-done": "kpro6", "two-done": "kpro5", "boxes-done": "box1"}


@unhurried
@given(st.sampled_from(sorted(DONE)), seeds)
def test_a_host_that_lies_brings_about_nothing_on_another_host(name: str, seed: int) -> None:
    """The fleet is in sync, so that every step that follows is for a lie: it may be done to the liar alone."""
    chance = Random(seed)
    honest, _ = with_lies(name, DONE[name], Random(0))
    liar = chance.choice(sorted(honest))
    facts, specs = with_lies(name, liar, chance)
    upcoming = judged(facts, specs)
    assert not [j for j in upcoming.judged if isinstance(j.verdict, Unseen) and j.verdict.reason == "defect"]
    assert {host for step in upcoming.ready for host in step.hosts} <= {liar}


@unhurried
@given(st.sampled_from(sorted(DONE)), seeds)
def test_what_a_host_says_is_text_wherever_it_is_shown(name: str, seed: int) -> None:
    chance = Random(seed)
    liar = DONE[name]
    facts, specs = with_lies(name, liar, chance)
    upcoming, grants = judged(facts, specs), Grants(specs)
    shown: list[str] = []
    try:
        foretold = plan(ORDER, specs, facts)
    except PlanLoop:
        pass
    else:
        report = model.plan_report(foretold, specs, facts, grants, lambda ref, layer: True, scripts=True)
        shown.append(text.plan_text(report))
        printed = text.clean(json.dumps(report.model_dump(), ensure_ascii=False))
        printed.encode()
        assert json.loads(printed).keys() == report.model_dump().keys()
    shown.append(status(specs, upcoming, facts))
    shown.append(text.next_boot_text(model.next_boot_report(specs, facts, list(specs.hosts))))
    for each in (STYLE.sub("", styled) for styled in shown):
        assert not UNPRINTABLE.search(each)
        assert SECRET not in each
    for judgement in upcoming.judged:
        assert SECRET not in repr(judgement)


@unhurried
@given(st.sampled_from(sorted(DONE)), seeds)
def test_what_a_host_says_is_one_argument_of_a_script(name: str, seed: int) -> None:
    facts, specs = with_lies(name, DONE[name], Random(seed))
    upcoming = judged(facts, specs)
    for step in (*upcoming.ready, *(step for step, _ in upcoming.held)):
        try:
            order_text(Order(step, 1, "boot"), Identity("me", "me"), 60, "nonce")
        except ValueError:
            continue  # refused as a whole
        script = script_text(step, 1, Identity("me", "me"), 60).decode("utf-8", "surrogateescape")
        line = shlex.join(["set", "--", *step.args])
        assert f"\nset -e\n{line}\n{step.script.text}\n" in script
        assert shlex.split(line)[2:] == list(step.args)
        assert step.script.text.rstrip().endswith('main "$@"')


@unhurried
@example("story-done", 135)
@given(st.sampled_from(["story-done", "two-done", "alive-done"]), seeds)
def test_what_a_host_says_of_its_cards_cannot_become_lines_of_the_boot_data(name: str, seed: int) -> None:
    facts, specs = with_lies(name, DONE[name], Random(seed))
    for judgement in judged(facts, specs).judged:
        verdict = judgement.verdict
        step = verdict.remedy if isinstance(verdict, Drift) else None
        if not isinstance(step, Step) or step.action != "set-up-boot":
            continue
        sizes = [int(step.args[number]) for number in (1, 3, 5)]
        data = step.stdin[-sizes[2] :].decode("utf-8", "surrogateescape")
        listed = {gpu.pci for gpu in specs.hosts[judgement.object.name].gpus}
        cards = [line.split(" ") for line in data.split("\n") if line.startswith("card ")]
        assert {card[1] for card in cards} <= listed
        assert all(len(card) == 6 for card in cards), data


@unhurried
@given(seeds)
def test_an_edit_of_a_hostile_config_changes_passthrough_alone(seed: int) -> None:
    chance = Random(seed)
    facts, specs = with_lies("two-done", "kpro5", chance)
    for judgement in judged(facts, specs).judged:
        verdict = judgement.verdict
        step = verdict.remedy if isinstance(verdict, Drift) else None
        if not isinstance(step, Step) or step.action != "edit-config":
            continue
        guests = facts["kpro5"].section("container.devices")
        assert isinstance(guests, Known)
        before = next(g.text for g in guests.value.guests if g.sha256 == step.args[1])  # type: ignore[attr-defined]
        after = step.stdin.decode("utf-8", "surrogateescape")
        passed = re.compile(r"(dev\d+|mp\d+|lxc\.cgroup2?\.devices\.\w+|lxc\.mount\.entry)\s*[:=]")
        lines = [[ln for ln in each.split("\n") if not passed.match(ln)] for each in (before, after)]
        assert lines[0] == lines[1]
        assert pve_conf.parse(after).main.text("hostname") == pve_conf.parse(before).main.text("hostname")


# What a spec can bring about


@unhurried
@given(st.sampled_from(["story", "two", "boxes", "demo"]), seeds)
def test_hostile_values_of_specs_are_refused_or_stay_text(name: str, seed: int) -> None:
    chance = Random(seed)
    _, documents = start(name)
    _poison(documents, chance)
    reading = read({"a.yaml": "\n---\n".join(json.dumps(d) for d in documents).encode("utf-8", "surrogatepass")})
    if reading.errors:
        assert not UNPRINTABLE.search(render(reading.errors))
        assert json.dumps([error.as_json() for error in reading.errors])
        return
    specs = reading.specs
    seen, _ = with_lies(name, "", Random(1))
    facts = {host: seen[host] for host in seen if host in specs.hosts}
    upcoming = judged(facts, specs)
    for obj in specs:
        assert re.fullmatch(r"\S+", obj.name)
        assert Ref.parse(str(obj.ref)) == obj.ref
    for step in (*upcoming.ready, *(step for step, _ in upcoming.held)):
        order_text(Order(step, 1, "boot"), Identity("me", "me"), 60, "nonce")
        assert not UNPRINTABLE.search("".join(step.args))
        assert not any(argument.startswith("-") for argument in step.args), step.args
    assert not UNPRINTABLE.search(STYLE.sub("", status(specs, upcoming, facts)))


def _poison(documents: list[dict[str, object]], chance: Random) -> None:
    """Put something hostile in the place of, or into, one text somewhere in the documents."""
    places: list[tuple[dict[str, object] | list[object], str | int]] = []

    def walk(node: object) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            if isinstance(value, str) and key != "kind":
                places.append((node, key))  # type: ignore[arg-type]
            walk(value)

    for document in documents:
        walk(document)
    container, key = chance.choice(places)
    value = str(container[key])  # type: ignore[index]
    evil = chance.choice(EVIL).replace("\udcff", "\u00ff")
    container[key] = chance.choice((evil, value + evil, evil + value))  # type: ignore[index]
