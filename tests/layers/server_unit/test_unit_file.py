"""A unit's text, and that every argument comes out of it as it went in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.layers.server_unit.facts import Arguments, arguments, as_plain
from controller.layers.server_unit.unit_file import Supervision, command, quoted, secrets_text, unit_text
from controller.layers.shared.server_physics import words

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))
SAID = st.lists(TEXT, min_size=1, max_size=6)


@given(SAID)
def test_every_argument_comes_out_as_it_went_in(argv: list[str]) -> None:
    """Read by the simulated systemd's rules, which know nothing of how it was written."""
    line = command(argv)
    assert "\n" not in line
    assert list(words(line)) == argv


@given(TEXT, TEXT)
def test_a_text_is_one_line_of_a_unit_whatever_is_in_it(name: str, value: str) -> None:
    what = Arguments(("/bin/x", value), (("A", value),), flags=((name, value),))
    lines = unit_text("qwen", f"{name} {value}", what, "d" * 64, Supervision()).splitlines()
    text = unit_text("qwen", f"{name} {value}", what, "d" * 64, Supervision())
    assert sum(line.startswith("ExecStart=") for line in text.split("\n")) == 1
    assert sum(line.startswith("[") for line in text.split("\n")) == 3
    assert lines


@given(SAID)
def test_arguments_come_back_from_their_file(argv: list[str]) -> None:
    what = Arguments(tuple(argv), (("A", argv[0]),), gpus=("GPU-1",), port=1, flags=(("f", argv[-1]),))
    assert arguments(as_plain(what)) == what


def test_the_engines_policy_is_systemds() -> None:
    how = Supervision("always", (1, 2), (143,), 90, "mixed", 1200)
    text = unit_text("qwen", "d", Arguments(("/bin/x",), secrets=("KEY",)), "d" * 64, how)
    for line in (
        "Restart=always",
        "RestartPreventExitStatus=1 2",
        "SuccessExitStatus=143",
        "TimeoutStopSec=90",
        "KillMode=mixed",
        "StartLimitBurst=5",
        "StartLimitIntervalSec=6050",  # five starts of 20 minutes each: a loop of slow starts ends too
        "EnvironmentFile=/opt/reconcile/server/qwen/secrets.env",
    ):
        assert line in text.splitlines(), line


def test_secrets_are_quoted_as_systemd_reads_such_a_file() -> None:
    assert secrets_text({"B": 'a"b', "A": "x$`\\"}) == 'A="x\\$\\`\\\\"\nB="a\\"b"\n'


@pytest.mark.parametrize("make", [lambda: quoted("a\0"), lambda: secrets_text({"A": "a\nb"})])
def test_what_no_file_can_hold_is_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"NUL|one line"):
        make()
