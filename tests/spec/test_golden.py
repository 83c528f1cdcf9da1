"""What people see when their spec files are wrong: golden/NAME.yaml gives golden/NAME.txt.

After a change that is meant, RECONCILE_GOLDEN=write writes the texts anew; the difference is for a person to read.
"""

import os
from pathlib import Path

import pytest

from controller.spec.load import SpecErrors, load

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(GOLDEN.glob("*.yaml"))


def errors_of(case: Path) -> str:
    with pytest.raises(SpecErrors) as caught:
        load({case.name: case.read_bytes()})
    return str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_the_text_of_all_errors(case: Path) -> None:
    text = errors_of(case)
    expected = case.with_suffix(".txt")
    if os.environ.get("RECONCILE_GOLDEN") == "write":
        expected.write_text(text)
    assert text == expected.read_text()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_it_reads_well_at_80_columns(case: Path) -> None:
    assert [line for line in errors_of(case).splitlines() if len(line) > 80] == []


def test_no_secret_is_shown() -> None:
    text = errors_of(GOLDEN / "secrets-never-shown.yaml")
    for secret in ("aBcDeF", "geheim", "0123456789", "AKIA", "kurz"):
        assert secret not in text


def test_every_yaml_has_its_text() -> None:
    assert {case.stem for case in CASES} == {text.stem for text in GOLDEN.glob("*.txt")}
