"""The one question that a host is asked, and the frame of its answer.

A persistent ``/bin/sh`` is sent ``script(...)`` once, and one line ``look(...)`` for each look; it answers with one
section per layer between nonces, each with its lengths in bytes, stderr apart and exit code kept.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

from controller.core.package import text
from controller.facts.words import Section

LIMIT = 4 * 1024 * 1024  # bytes of one answer; a real host's is under 100 KiB


class FrameError(ValueError):
    """An answer that is not a frame of this look."""


def script(fragments: Mapping[str, str]) -> str:
    """The text that defines ``look`` in the host's shell, from section name to sh fragment, in order."""
    parts = [text("controller.core", "probe.sh")]
    calls = []
    for index, (name, fragment) in enumerate(fragments.items()):
        parts.append(f"section_{index}() {{\n{fragment}\n}}")
        calls.append(f"section {shlex.quote(name)} section_{index}")
    parts.append("sections() {\n" + "\n".join(calls or [":"]) + "\n}\n")
    return "\n".join(parts)


def look(nonce: str, max_age: float, guests: Iterable[int]) -> str:
    """The line that asks for one look. ``max_age`` in seconds bounds what slow tools may answer from memory."""
    return f"look {nonce} {max(0, int(max_age))} {shlex.quote(' '.join(str(g) for g in guests))}\n"


class Stuck(FrameError):  # noqa: N818 - it says how the host is
    """The host answers that an earlier look still hangs there."""


_STUCK = re.compile(rb"\S+ stuck (\d+) (-?\d+)\n")
_SECTION = re.compile(rb"(\S+) section (\S+) (\d+) (\d+) (\d+)\n")


def complete(data: bytes | bytearray, nonce: str) -> bool:
    """Whether the answer to this look has wholly come."""
    return data.endswith(f"\n{nonce} end\n".encode())


def read(data: bytes, nonce: str) -> dict[str, Section]:
    """Split a whole answer into its sections. Raises FrameError with what is wrong with it (Stuck: there are none)."""
    begin = f"{nonce} begin\n".encode()
    if not data.startswith(begin):
        raise FrameError(f"the answer begins with {data[:40]!r}")
    sections: dict[str, Section] = {}
    position = len(begin)
    end = f"\n{nonce} end\n".encode()
    while data[position:] != end[1:]:
        if stuck := _STUCK.match(data, position):
            raise Stuck(f"does not look: an earlier look hangs there since {int(stuck[2])} s (process {int(stuck[1])})")
        match = _SECTION.match(data, position)
        if match is None or match[1].decode("ascii", "replace") != nonce:
            raise FrameError(f"no section where one should be: {data[position : position + 40]!r}")
        out_from = match.end()
        err_from = out_from + int(match[4])
        stop = err_from + int(match[5])
        if data[stop : stop + 1] != b"\n":
            raise FrameError(f"section {match[2]!r} is not as long as it says")
        name = match[2].decode("ascii", "replace")
        out = data[out_from:err_from].decode("utf-8", "surrogateescape")
        err = data[err_from:stop].decode("utf-8", "replace")
        sections[name] = Section(int(match[3]), out, err)
        position = stop + 1
    return sections
