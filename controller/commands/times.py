"""Times as people write them on the command line."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pydantic import TypeAdapter, ValidationError

from controller.commands.common import Ends
from controller.spec.values import Duration

_DURATION: TypeAdapter[timedelta] = TypeAdapter(Duration)


def until(given: str | None, now: float) -> float | None:
    """A time to come, as a duration from now (2h) or in ISO 8601; None when none is given. Raises Ends."""
    if given is None:
        return None
    length = _duration(given)
    at = now + length if length is not None else _moment(given, "--until")
    if at <= now:
        raise Ends(f"cannot use --until {given}: that is over")
    return at


def since(given: str | None, now: float) -> float | None:
    """A time gone by, as a duration before now (2h) or in ISO 8601; None when none is given. Raises Ends."""
    if given is None:
        return None
    length = _duration(given)
    return now - length if length is not None else _moment(given, "--since")


def _duration(given: str) -> float | None:
    try:
        return _DURATION.validate_python(given).total_seconds()
    except ValidationError:
        return None


def _moment(given: str, option: str) -> float:
    try:
        moment = datetime.fromisoformat(given)
    except ValueError:
        raise Ends(
            f"cannot read {option} {given} as a time: write a duration like 90s, 20m, 2h or 1d, or a time like "
            "2026-12-24T18:00 (in UTC, unless it says otherwise)"
        ) from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
