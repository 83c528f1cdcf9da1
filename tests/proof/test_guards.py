"""Guards that are seen best in a whole fleet: a few schedules in which each of them is what keeps harm away."""

from __future__ import annotations

import pytest

from tests.proof.schedule import Play, Schedule


@pytest.mark.parametrize("seed", range(1000, 1040))
def test_schedules_in_which_guards_count(seed: int) -> None:
    schedule = Schedule.of(seed)
    book = Play(schedule).run()
    assert book.violations == [], f"{schedule}\n" + "\n".join(book.log)
