"""Running a layer's probe fragment for real, under a POSIX shell, against a tree of files."""

from __future__ import annotations

import subprocess
from pathlib import Path

from controller.core import probe
from controller.facts.words import Section


def ask(fragment: str, root: Path, guests: tuple[int, ...] = (), shell: str = "dash") -> Section:
    """The section that the fragment answers with when its files lie under ``root``."""
    text = f"root={root}\n" + probe.script({"section": fragment}) + f"run_dir={root}/run\n" + probe.look("N", 0, guests)
    done = subprocess.run([shell], input=text.encode(), capture_output=True, timeout=30, check=False)
    return probe.read(done.stdout, "N")["section"]


def write(root: Path, files: dict[str, str]) -> None:
    """Lay files down under ``root``, by absolute path."""
    for path, content in files.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
