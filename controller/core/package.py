"""The package's own text files (probe fragments, scripts), read once when a module is imported."""

from __future__ import annotations

from importlib.resources import files

from controller.core.words import Script


def text(package: str, name: str) -> str:
    """The text of a file that lies in a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def script(package: str, name: str) -> Script:
    """An action's script, named by where it lies."""
    return Script(f"{package.replace('.', '/')}/{name}", text(package, name))
