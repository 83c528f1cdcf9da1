"""Secrets on the controller's machine."""

from __future__ import annotations

import os
from pathlib import Path

from controller.run import secrets
from controller.spec.model import SecretSource, Unreadable


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "there").write_text("said\n")
    device = secrets.read({"token": SecretSource(from_file="/dev/null")})["token"]
    assert isinstance(device, Unreadable)
    assert "/dev/null is not a file" in str(device)
    assert isinstance(secrets.read({"token": SecretSource(from_file=str(tmp_path / "pipe"))})["token"], Unreadable)
    (tmp_path / "link").symlink_to("there")
    assert secrets.read({"token": SecretSource(from_file=str(tmp_path / "link"))}) == {"token": "said"}
