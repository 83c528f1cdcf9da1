"""Tiny wheels: engines that do nothing, in several versions, and the uv that the tests have."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

from uv import find_uv_bin

from controller.layers.server_environment.uv import Wheel


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
