"""What came from a host, as it is printed: it moves no cursor, turns no text around and breaks no JSON."""

import json

import pytest

from controller.commands import common
from controller.report import model, text


@pytest.mark.parametrize("odd", ["\x1b[2J", "\r", "\x9b2J", "\x7f", "\u202e", "\u2066", "\u2028", "\udcff"])
def test_no_character_that_a_terminal_obeys_is_printed(odd: str) -> None:
    cleaned = text.clean(f"mount{odd}point")
    assert odd not in cleaned
    assert cleaned.startswith("mount\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize("odd", ["\udcff", "\x1b[2J", "\x9b2J", "\u202e"])
def test_json_is_json_whatever_a_host_said(odd: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = model.LayerRow(
        object="Container/ct129",
        layer="container.devices",
        verdict="drift",
        reason="too-many-cards",
        message=f"`c 195:* rwm {odd}`",
        evidence={"left alone": odd},
        waits_for="",
    )
    common.print_json(model.WhyReport(at=0.0, suspended=[], object="Container/ct129", first=row, layers=[row]))
    printed = capsys.readouterr().out
    assert odd not in printed
    assert json.loads(printed)["first"]["message"].startswith("`c 195:* rwm ")
