"""The lab's own tests run in one lab."""

from __future__ import annotations

import pytest

from tests.lab.fixtures import clean_lab, lab, new_lab

__all__ = ["clean_lab", "lab", "new_lab"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder that uses a lab."""
    for item in items:
        if {"lab", "new_lab"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("lab")
