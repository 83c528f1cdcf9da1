"""Spec files on disk."""

from __future__ import annotations

import os
from pathlib import Path

from controller.spec.load import is_spec_file


class NoSpecs(Exception):  # noqa: N818 - the name says what is wrong
    """There is nothing to read specs from; the message says where was looked and what to do."""


def directory(given: str | None) -> Path:
    """Where the specs lie: ``--specs``, else RECONCILE_SPECS, else ``specs``."""
    return Path(given or os.environ.get("RECONCILE_SPECS") or "specs")


def read(where: Path) -> dict[str, bytes]:
    """Every spec file under a folder, or the one file named, by path; hidden files and folders are left out.

    Raises NoSpecs when there is none, OSError when one cannot be read.
    """
    if where.is_file():
        return {str(where): where.read_bytes()}
    if not where.is_dir():
        raise NoSpecs(f"cannot find specs: there is no folder {where}; name one with --specs DIR or RECONCILE_SPECS")
    found = {
        str(path): path.read_bytes()
        for path in sorted(where.rglob("*.yaml"))
        if is_spec_file(path.name)
        and not any(part.startswith(".") for part in path.relative_to(where).parts)
        and path.is_file()
    }
    if not found:
        raise NoSpecs(f"cannot find specs: {where} holds no *.yaml file")
    return found
