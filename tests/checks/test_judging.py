"""What counts as right in an answer; and that each judge finds something wrong where something is."""

from __future__ import annotations

import json

import pytest

from controller.layers.shared.checks import judging
from controller.layers.shared.checks.asking import Reply, others, samples
from tests.checks.engine import PROSE


@pytest.mark.parametrize(
    "said", ["Paris", "paris.", "The capital of France is **Paris**.", " PARIS\n", "\u201cParis\u201d"]
)
def test_a_right_name_is_right(said: str) -> None:
    assert judging.names_one_of(Reply(said), ["Paris"]) == ""


@pytest.mark.parametrize(
    "said", ["", " ", "London", "Parisian", "P a r i s", "v\ufffdv\ufffdParis", "Paris" + "!" * 40]
)
def test_a_wrong_or_damaged_name_is_not(said: str) -> None:
    assert judging.names_one_of(Reply(said), ["Paris"])


def test_accents_do_not_count() -> None:
    assert judging.names_one_of(Reply("Bogot\u00e1"), ["Bogota"]) == ""


@pytest.mark.parametrize("said", ["42", "17 + 25 = 42", "The answer is 42.", "**42**", "= 42!"])
def test_a_right_sum_is_right(said: str) -> None:
    assert judging.comes_to(Reply(said), 42) == ""


@pytest.mark.parametrize("said", ["", "41", "42 or 43", "forty", "4 2", "-42"])
def test_a_wrong_sum_is_not(said: str) -> None:
    assert judging.comes_to(Reply(said), 42)


def call(arguments: object = '{"city": "Paris"}', name: str = "get_weather") -> Reply:
    return Reply("", tool_calls=[{"function": {"name": name, "arguments": arguments}}])


def test_a_tool_call_is_right() -> None:
    assert judging.calls(call(), "get_weather", {"city": "Paris"}) == ""
    assert judging.calls(call({"city": "Paris, France"}), "get_weather", {"city": "Paris"}) == ""


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply("It is sunny."), "no tool"),
        (Reply('<tool_call>{"name": "get_weather"}</tool_call>'), "did not parse"),
        (Reply("<function=get_weather>"), "did not parse"),
        (call(name="get_time"), "get_time"),
        (call('{"city": "Par'), "no JSON"),
        (call('"Paris"'), "no object"),
        (call('{"town": "Paris"}'), "city=None"),
        (Reply("<tool_call>", tool_calls=call().tool_calls), "markup"),
    ],
)
def test_a_tool_call_is_wrong(reply: Reply, says: str) -> None:
    assert says in judging.calls(reply, "get_weather", {"city": "Paris"})


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply("7"), "no reasoning"),
        (Reply("<think>3 + 4</think>7"), "markup"),
        (Reply("</think>7", reasoning="3 + 4"), "markup"),
        (Reply("", reasoning="3 + 4 is 7"), "empty"),
        (Reply("8", reasoning="3 + 4"), "come to"),
    ],
)
def test_reasoning_is_wrong(reply: Reply, says: str) -> None:
    assert says in judging.thinks_apart(reply, 7)
    assert judging.thinks_apart(Reply("7", reasoning="3 + 4"), 7) == ""


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ('{"name": "Ann", "age": 31}', True),
        ('{"age": 31,\n "name": "Ann"}', True),
        ('```json\n{"name": "Ann", "age": 31}\n```', False),
        ('{"name": "Ann"}', False),
        ('{"name": "Ann", "age": "31"}', False),
        ('{"name": "Ann", "age": true}', False),
        ('{"name": "Bob", "age": 31}', False),
        ("", False),
    ],
)
def test_structured_output(said: str, right: bool) -> None:
    found = judging.is_object(Reply(said), {"name": str, "age": int}, {"name": "Ann", "age": 31})
    assert (found == "") is right


@pytest.mark.parametrize(
    "text",
    [
        "What " * 30,
        "v\ufffd" * 40,
        "!" * 100,
        PROSE + " and then it turns" * 12,
        "The sea is big. " * 8,
        " ".join(f"the big red fish {n}" for n in range(30)),
    ],
)
def test_loops_are_seen(text: str) -> None:
    assert judging.repeats(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Paris",
        PROSE,
        "1. One\n2. Two\n3. Three\n----------------\nA table:\n| a | b |\n|---|---|\n| 1 | 2 |\n",
        "Ha ha ha ha.",
        "Row, row, row your boat, gently down the stream. Merrily, merrily, merrily, merrily, life is but a dream.",
        json.dumps([{"name": f"n{n}", "value": n} for n in range(20)]),
    ],
)
def test_plain_text_is_no_loop(text: str) -> None:
    assert judging.repeats(text) == ""


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (PROSE, True),
        (PROSE + " Caf\u00e9, na\u00efve \u2014 \u201cquoted\u201d \U0001f600", True),
        (PROSE + "\ufffd", True),  # cut within a character
        ("", False),
        ("\ufffd\ufffda lighthouse", False),
        ("\x00\x01 is a tower", False),
        ("lighthouse" * 20, False),
        ("12 34 56 78 90 11 22 33", False),
        ("灯塔 是 一个 塔 маяк и башня فنار", False),
    ],
)
def test_prose_is_told_from_what_is_none(text: str, right: bool) -> None:
    assert (judging.is_prose(Reply(text)) == "") is right


def test_metrics_are_added_up_over_labels() -> None:
    text = '# HELP a b\na{x="1"} 2\na{x="}"} 3.5\nb 1e3 1700000000\nc NaN\nbroken\nd{e="f"}\n'
    found = samples(text)
    assert (found["a"], found["b"]) == (5.5, 1000.0)
    assert "d" not in found


def test_connections_of_others_are_counted() -> None:
    assert others(1) == 0
