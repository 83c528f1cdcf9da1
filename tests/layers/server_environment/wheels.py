"""Tiny wheels: engines that do nothing, in several versions, and the uv that the tests have."""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

from uv import find_uv_bin

from controller.engines.words import Requirements
from controller.layers.server_environment.uv import Wheel
from controller.spec.model import ModelServer

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


class Toy:
    """An engine that is nothing but a package."""

    name = "toy"
    manages = True

    def requirements(self, server: ModelServer, arch: str) -> Requirements:
        lines = (f"toy=={server.engine.version}", *server.engine.requirements)
        return Requirements(lines, "toy", server.engine.version, "toy", server.engine.python or PYTHON, False)

    def shipped_flags(self, version: str) -> None:
        return None


def toys(folder: Path) -> Path:
    """A folder of wheels: the toy in versions that work, that do not import, and a pre-release."""
    wheel(folder, "part", "1.0", {"part/__init__.py": "VERSION = '1.0'\n"})
    wheel(folder, "part", "1.5", {"part/__init__.py": "VERSION = '1.5'\n"})
    for each in ("1.0", "2.0"):
        wheel(folder, "toy", each, {"toy/__init__.py": "import part\n"}, requires=("part==1.0",))
    wheel(folder, "toy", "3.0", {"toy/__init__.py": "import absent_part\n"})
    wheel(folder, "toy", "5.0b1", {"toy/__init__.py": ""}, requires=("part>=1.0",))
    return folder


def wheel(folder: Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()) -> Path:
    """Write a wheel into a folder."""
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_hash(text)},{len(text.encode())}\n" for path, text in content.items())
    content[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    target = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
    return target


def _hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def uv_wheel(folder: Path, version: str) -> Wheel:
    """Write a wheel that has the tests' own uv where PyPI's have theirs."""
    target = folder / f"uv-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        archive.write(find_uv_bin(), f"uv-{version}.data/scripts/uv")
    return Wheel(target.name, hashlib.sha256(target.read_bytes()).hexdigest())
