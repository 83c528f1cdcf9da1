"""Looks at real hosts: what they answer, and what they do not."""

from __future__ import annotations

import pytest

from controller.world.port import Look


def test_one_look(sshd, worlds):
    world = worlds()
    seen = world.observe([Look("one")])["one"]
    assert seen.failure is None
    assert seen.sections["host.test"].out == "hello\n"
    assert "world" in seen.sections
