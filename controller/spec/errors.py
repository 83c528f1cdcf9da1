"""What is wrong with spec files, each error with its place and a way out, as text and as JSON."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from controller.spec.literals import looks_like_secret
from controller.spec.model import Place
from controller.spec.ref import Ref

_WIDTH = 80
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


class Code(StrEnum):
    """The kinds of errors. The list is closed."""

    UNREADABLE = "unreadable"
    """The file is not text that can be read: encoding, size, depth, empty."""
    SYNTAX = "syntax"
    """It is not YAML, or YAML that specs do not use."""
    TWICE = "twice"
    """A key, a name, or the Fleet is there a second time."""
    UNKNOWN_KIND = "unknown-kind"
    """A document's kind is missing or none of ours."""
    UNKNOWN_FIELD = "unknown-field"
    """A field that the kind does not have."""
    MISSING = "missing"
    """A field that has to be given is not."""
    VALUE = "value"
    """A field's value is not one that it can have."""
    SECRET = "secret"  # noqa: S105 - the kind of error
    """A secret is written out."""
    NOT_FOUND = "not-found"
    """It names an object or a secret that no spec defines."""
    CONFLICT = "conflict"
    """Two objects want what only one can have, or do not fit each other."""


@dataclass(frozen=True)
class SpecError:
    """One thing that is wrong in a spec file. No secret is in it."""

    place: Place
    code: Code
    says: str
    """A sentence that begins with "cannot"."""
    object: Ref | None = None
    """The object in whose document it is, when that could be read."""
    field: str = ""
    """The path of the field: ``nvidia.gpus[0].owner``."""
    found: str = ""
    """What stands there."""
    allowed: str = ""
    """What may stand there."""
    nearest: str = ""
    """The word that was probably meant."""
    todo: str = ""
    """What to do next."""
    also: tuple[Place, ...] = ()
    """Other places that have a part in it."""
    concerns: tuple[Ref, ...] = ()
    """The objects that are not to be touched while it stands."""

    def text(self) -> str:
        """Write it for a terminal of 80 columns, without a newline at the end."""
        where = ", ".join(part for part in (str(self.object or ""), self.field) if part)
        place = f"{self.place}:{self.place.column}"
        lines = [f"{place}: {where}" if where else place, *_wrapped("  ", self.says)]
        for label, words in (
            ("found", self.found),
            ("allowed", self.allowed),
            ("nearest", self.nearest),
            ("see also", ", ".join(str(place) for place in self.also)),
            ("next", self.todo),
        ):
            if words:
                lines += _wrapped(f"    {label + ':':<10}", words)
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Give it as JSON; every key is always there."""
        return {
            "file": self.place.file,
            "line": self.place.line,
            "column": self.place.column,
            "object": str(self.object) if self.object else None,
            "field": self.field or None,
            "code": self.code.value,
            "message": self.says,
            "found": self.found or None,
            "allowed": self.allowed or None,
            "nearest": self.nearest or None,
            "next": self.todo or None,
            "see_also": [{"file": place.file, "line": place.line, "column": place.column} for place in self.also],
        }


def _wrapped(prefix: str, words: str) -> list[str]:
    return textwrap.wrap(
        words,
        width=_WIDTH,
        initial_indent=prefix,
        subsequent_indent=" " * len(prefix),
        break_long_words=False,
        break_on_hyphens=False,
    )


def written(path: tuple[str | int, ...]) -> str:
    """Write a path as people do: ``nvidia.gpus[0].owner``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            word = "(not shown)" if looks_like_secret(part) else shortened(part)
            text += f".{word}" if re.fullmatch(r"[\w-]+", word) else f'."{word}"'
    return text.removeprefix(".")


def shortened(text: str) -> str:
    """Give text on one line, its beginning if it is long, and escapes for what does not print or turns text around."""
    one_line = _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return one_line if len(one_line) <= 60 else one_line[:59] + "…"


def in_order(errors: Iterable[SpecError]) -> tuple[SpecError, ...]:
    """Sort errors by where they are, and leave out what is said twice of one place, and all else of a secret."""
    once: dict[tuple[Place, str], SpecError] = {}
    errors = list(errors)
    secrets = {error.place for error in errors if error.code is Code.SECRET}
    for error in errors:
        if error.code is Code.SECRET or error.place not in secrets:
            once.setdefault((error.place, error.says), error)
    return tuple(sorted(once.values(), key=lambda e: (e.place.file, e.place.line, e.place.column, e.says)))


def render(errors: Sequence[SpecError]) -> str:
    """Write all errors for a terminal of 80 columns, with a last line that counts them."""
    files = len({error.place.file for error in errors})
    count = f"{len(errors)} error{'s' * (len(errors) != 1)} in {files} file{'s' * (files != 1)}"
    return "\n\n".join([*(error.text() for error in errors), count]) + "\n"
