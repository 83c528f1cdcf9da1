"""Spec files on disk."""

from __future__ import annotations

import os
from pathlib import Path


class NoSpecs(Exception):  # noqa: N818 - the name says what is wrong
    """There is nothing to read specs from; the message says where was looked and what to do."""


def directory(given: str | None) -> Path:
    """Where the specs lie: ``--specs``, else RECONCILE_SPECS, else ``specs``."""
    return Path(given or os.environ.get("RECONCILE_SPECS") or "specs")


def read(where: Path) -> dict[str, bytes]:
    """Every ``*.yaml`` and ``*.yml`` under a folder (or one file), by path; simulated fleets and hidden files left out.

    A file that cannot be opened is there with the name and no content would be wrong, so its OSError is raised.
    """
    if where.is_file():
        return {str(where): where.read_bytes()}
    if not where.is_dir():
        raise NoSpecs(f"cannot find specs: there is no folder {where}; name one with --specs DIR or RECONCILE_SPECS")
    found = {
        str(path): path.read_bytes()
        for path in sorted(where.rglob("*.y*ml"))
        if path.suffix in (".yaml", ".yml")
        and not path.name.endswith((".sim.yaml", ".sim.yml"))
        and not any(part.startswith(".") for part in path.relative_to(where).parts)
        and path.is_file()
    }
    if not found:
        raise NoSpecs(f"cannot find specs: {where} holds no *.yaml file")
    return found
