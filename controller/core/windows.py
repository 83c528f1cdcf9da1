"""Maintenance windows: whether a step that disrupts may begin at a moment, and when it may next.

A window opens at each time of its cron expression, in its own time zone, and stays open for its duration. What was
begun inside may finish. An opening that daylight saving skips opens at the change; one that it repeats opens once
(what cronsim, which follows Debian's cron, does).
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from controller.core.words import Step
from controller.spec.model import Specs
from controller.spec.policy import Window


def is_open(window: Window, at: datetime) -> bool:
    """Whether the window is open at an aware moment."""
    last = _latest(window, at)
    return last is not None and at < last + window.duration


def next_opening(window: Window, after: datetime) -> datetime | None:
    """When the window opens next, in UTC; None when its expression has no time to come."""
    try:
        return next(CronSim(window.cron, after.astimezone(ZoneInfo(window.timezone)))).astimezone(UTC)
    except (StopIteration, CronSimError):
        return None


def closed(step: Step, specs: Specs, at: datetime) -> str:
    """Why the step may not begin now, "" when it may: some object that it disrupts has windows, and none is open."""
    for disruption in step.disrupts:
        obj = specs.get(disruption.object)
        windows = obj.policy.windows if obj is not None else ()
        if windows and not any(is_open(window, at) for window in windows):
            opens = min(_openings(windows, at), default=None)
            when = f"opens {opens:%Y-%m-%d %H:%M} UTC" if opens else "never opens again"
            return f"the maintenance window of {disruption.object} is closed; it {when}"
    return ""


def _openings(windows: tuple[Window, ...], at: datetime) -> Iterator[datetime]:
    for window in windows:
        opening = next_opening(window, at)
        if opening is not None:
            yield opening


def _latest(window: Window, at: datetime) -> datetime | None:
    """The latest opening that is not after ``at``. An opening at ``at`` itself counts."""
    zone = ZoneInfo(window.timezone)
    try:
        found = next(CronSim(window.cron, (at + timedelta(minutes=1)).astimezone(zone), reverse=True))
        while found > at:
            found = next(CronSim(window.cron, found, reverse=True))
    except (StopIteration, CronSimError):
        return None
    return found.astimezone(UTC)
