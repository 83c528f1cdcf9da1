"""Reading what the probe's ``files`` helper prints: many small files, byte for byte, in two processes on the host."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from controller.facts.words import ParseError

_HEAD = re.compile(r"(\d+) (\d+) (/\S+)")


@dataclass(frozen=True, slots=True)
class File:
    """One file as it was: its text (bytes outside UTF-8 as surrogates) and when it was changed, in Unix seconds."""

    text: str
    mtime: int

    @property
    def sha256(self) -> str:
        """The digest that a script on the host compares before it replaces the file."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogateescape")).hexdigest()


def read_files(out: str) -> dict[str, File]:
    """The files in the output of ``files``, by path.

    Raises ParseError ``not-text`` when a file's bytes did not come whole: it was changed while it was read, or holds
    NUL bytes, which no text file that this project reads may hold.
    """
    if not out:
        return {}
    head, mark, body = out.partition("--\n")
    if not mark:
        raise ParseError("cut-off", "the list of files has no end")
    sizes: dict[str, tuple[int, int]] = {}
    for line in head.splitlines():
        match = _HEAD.fullmatch(line)
        if match is None:
            raise ParseError("garbage", f"cannot read a file's size from {line!r}")
        sizes[match[3]] = (int(match[1]), int(match[2]))
    lines: dict[str, list[str]] = {path: [] for path in sizes}
    for line in body.split("\n")[:-1]:
        path, colon, text = line.partition(":")
        if not colon or path not in lines:
            raise ParseError("garbage", f"cannot tell which file holds {line[:60]!r}")
        lines[path].append(text)
    return {path: File(_whole(path, size, lines[path]), mtime) for path, (size, mtime) in sizes.items()}


def _whole(path: str, size: int, lines: list[str]) -> str:
    text = "".join(line + "\n" for line in lines)
    length = len(text.encode("utf-8", "surrogateescape"))
    if length == size + 1:  # grep ends every line; the file's last one had no end
        return text[:-1]
    if length != size:
        raise ParseError("not-text", f"{path} has {size} bytes and {length} of them came: changing, or not text")
    return text
