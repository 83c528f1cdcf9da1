import dataclasses
from datetime import UTC, datetime

import pytest

from controller.core import windows
from controller.core.next_steps import next_steps
from controller.core.view import View
from controller.spec.policy import Policy, Window
from tests.core.builders import ALLOW_ALL, specs, switch_layer, switches

BERLIN = Window(cron="0 2 * * SUN", duration="3h", timezone="Europe/Berlin")


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("at", "is_open"),
    [
        ("2026-01-11T00:59:59", False),  # Sunday, 01:59:59 in Berlin
        ("2026-01-11T01:00:00", True),
        ("2026-01-11T03:59:59", True),
        ("2026-01-11T04:00:00", False),
        ("2026-01-12T02:00:00", False),  # Monday
        ("2026-07-12T00:00:00", True),  # summer: 02:00 is 00:00 UTC
        ("2026-07-12T03:00:00", False),
        ("2026-03-29T00:59:59", False),  # 02:00 is skipped: the clock goes from 02:00 to 03:00 at 01:00 UTC
        ("2026-03-29T01:00:00", True),
        ("2026-03-29T03:59:59", True),
        ("2026-03-29T04:00:00", False),
        ("2026-10-25T00:00:00", True),  # 02:00 comes twice: it opens at the first
        ("2026-10-25T02:59:59", True),
        ("2026-10-25T03:00:00", False),
    ],
)
def test_a_window_through_a_year_and_both_changes_of_the_clock(at: str, is_open: bool) -> None:
    assert windows.is_open(BERLIN, utc(at)) is is_open


def test_the_next_opening_in_utc() -> None:
    assert windows.next_opening(BERLIN, utc("2026-01-12T00:00:00")) == utc("2026-01-18T01:00:00")


def test_a_window_over_midnight() -> None:
    night = Window(cron="30 23 * * *", duration="2h", timezone="UTC")
    assert windows.is_open(night, utc("2026-01-12T00:10:00"))
    assert not windows.is_open(night, utc("2026-01-12T01:30:00"))


def test_a_step_needs_an_open_window_of_every_object_that_has_windows() -> None:
    policy = Policy(mode=ALLOW_ALL.mode, allow=ALLOW_ALL.allow, windows=(BERLIN,))
    wanted = specs(("ct", 129, "a"), policy=policy)
    layer = switch_layer("one")
    (step,) = next_steps((layer,), View(wanted, switches(a={"one": False}, b={}))).ready
    assert windows.closed(step, wanted, utc("2026-01-11T02:00:00")) == ""
    closed = windows.closed(step, wanted, utc("2026-01-12T02:00:00"))
    assert closed == "the maintenance window of Container/ct is closed; it opens 2026-01-18 01:00 UTC"
    assert windows.closed(dataclasses.replace(step, disrupts=()), wanted, utc("2026-01-12T02:00:00")) == ""
    assert windows.closed(step, specs(("ct", 129, "a")), utc("2026-01-12T02:00:00")) == ""
