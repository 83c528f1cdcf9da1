"""The list of mutants fits the code as it is."""

from __future__ import annotations

from tests.proof.mutants import MUTANTS, wrong_texts


def test_every_mutant_is_of_a_guard_that_is_there() -> None:
    assert wrong_texts() == []
    assert len({mutant.guard for mutant in MUTANTS}) == len(MUTANTS) >= 40
    assert all(mutant.old != mutant.new for mutant in MUTANTS)
