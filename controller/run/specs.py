"""Spec files on disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from controller.spec.load import is_spec_file


class NoSpecs(Exception):  # noqa: N818 - the name says what is wrong
    """There is nothing to read specs from; the message says where was looked and what to do."""


def directory(given: str | None) -> Path:
    """Where the specs lie: ``--specs``, else RECONCILE_SPECS, else ``specs``."""
    return Path(given or os.environ.get("RECONCILE_SPECS") or "specs")


def read(where: Path) -> dict[str, bytes | OSError]:
    """Every spec file under a folder, or the one file named, by path; hidden files and folders are left out.

    A file that cannot be read is there with its error: what it defines is not known, which is not the same as nothing.
    Raises NoSpecs when there is none, and when a folder cannot be looked into.
    """
    if where.is_file():
        if not is_spec_file(where.name):
            raise NoSpecs(f"cannot take {where} for specs: a spec file's name ends in .yaml (and not in .sim.yaml)")
        return {str(where): _content(where)}
    if not where.is_dir():
        raise NoSpecs(f"cannot find specs: there is no folder {where}; name one with --specs DIR or RECONCILE_SPECS")
    found = {str(path): _content(path) for path in sorted(_files(where)) if is_spec_file(path.name)}
    if not found:
        other = "; its *.yml files are not read, rename them" if any(p.suffix == ".yml" for p in _files(where)) else ""
        raise NoSpecs(f"cannot find specs: {where} holds no *.yaml file{other}")
    return found


def passed_over(where: Path) -> list[str]:
    """Files that somebody may take for specs, and that are not read because of their name."""
    return sorted(str(path) for path in _files(where) if path.suffix == ".yml") if where.is_dir() else []


def _files(where: Path) -> Iterator[Path]:
    """What is no folder under a folder, links to nowhere too; folders are followed through links, each once."""
    seen: set[str] = set()
    for folder, folders, files in os.walk(where, onerror=_refuse, followlinks=True):
        real = os.path.realpath(folder)
        folders[:] = [] if real in seen else [name for name in folders if not name.startswith(".")]
        if real not in seen:
            yield from (Path(folder, name) for name in files if not name.startswith("."))
        seen.add(real)


def _refuse(error: OSError) -> None:
    raise NoSpecs(f"cannot look for specs in {error.filename}: {error.strerror}")


def _content(path: Path) -> bytes | OSError:
    if path.exists() and not path.is_file():
        return OSError(errno.EINVAL, "it is neither a file nor a folder", str(path))  # reading a pipe may never end
    try:
        return path.read_bytes()
    except OSError as error:
        return error
