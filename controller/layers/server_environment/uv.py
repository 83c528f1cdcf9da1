"""The uv that builds environments: one version, pinned by the digests of its static wheels on PyPI.

From 0.12 on it takes the pre-releases that an engine's requirements name (sglang 0.5.10 and newer need a flash-attn-4
that has nothing else; older versions of uv install sglang 0.5.9 without a word).
"""

from __future__ import annotations

from dataclasses import dataclass

VERSION = "0.13.9"


@dataclass(frozen=True, slots=True)
class Wheel:
    """The file's name and SHA-256."""

    name: str
    sha256: str


WHEELS = {
    "x86_64": Wheel(
        "uv-0.13.9-py3-none-musllinux_1_1_x86_64.whl",
        "2c45530751517d6c3bbc69a19473f6effe47cce047bede01ffd8af7ea7b36b25",
    ),
    "aarch64": Wheel(
        "uv-0.13.9-py3-none-manylinux_2_17_aarch64.manylinux2014_aarch64.musllinux_1_1_aarch64.whl",
        "5435c5ce14a56431208ca0996416d310f1598e8c2c8ba707688985a16bb82dbe",
    ),
}
"""By the machine's architecture."""
