"""Fixtures for tests that need a lab. A conftest.py imports what it uses from here.

Without root or without what the lab needs, tests are skipped and say why; with RECONCILE_REQUIRE_LAB=1 they fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.lab.lab import Lab, missing


def need_lab() -> None:
    """Skip the test when no lab can be had here, or fail it when one is required."""
    if reason := missing():
        if os.environ.get("RECONCILE_REQUIRE_LAB") == "1":
            pytest.fail(reason)
        pytest.skip(f"{reason}: the lab tests did not run")


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """One lab with the default hosts for the whole session. A test that changes it also asks for ``clean_lab``."""
    need_lab()
    with Lab() as started:
        yield started


@pytest.fixture
def clean_lab(lab: Lab) -> Lab:
    """The session's lab, put back to its first state before the test."""
    lab.reset()
    return lab


@pytest.fixture
def new_lab() -> Iterator[Callable[..., Lab]]:
    """Start a lab of one's own, ``new_lab(hosts=…, pve_files=…)``; it goes when the test ends."""
    need_lab()
    with ExitStack() as stack:

        def start(**wanted: Any) -> Lab:
            return stack.enter_context(Lab(**wanted))

        yield start
