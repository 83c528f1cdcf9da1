"""The text of a spec file, read into documents whose every value knows its file, line and column.

Only YAML's events are used: nothing is constructed, every scalar stays text, and no input can make the reader
recurse or multiply. Anchors, aliases, merge keys and tags are refused: what documents have in common stands in
``Fleet.defaults``, and each line means what it says.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, StreamMark, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from controller.spec.errors import Code, SpecError
from controller.spec.literals import looks_like_secret
from controller.spec.model import Place
from controller.spec.values import Text

MAX_BYTES = 2**20
"""A spec file is written by hand; a bigger one is something else."""
MAX_DEPTH = 32
"""The deepest field of a spec is at 6; the rest is for JSON in flags."""

MAX_ERRORS = 200
"""In how a file is written; with more of them it is something else."""

# Control characters, halves of characters, and what turns the direction of text so that it reads as something else.
_BAD_CHARACTER = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class Scalar:
    """A scalar as text; None when nothing, ``~`` or ``null`` stands there without quotes."""

    place: Place
    value: Text | None


@dataclass(frozen=True)
class Items:
    """A list."""

    place: Place
    items: "list[Node]" = field(default_factory=list)


@dataclass(frozen=True)
class Entries:
    """A mapping, with the place of each key."""

    place: Place
    values: "dict[str, Node]" = field(default_factory=dict)
    keys: dict[str, Place] = field(default_factory=dict)


@dataclass(frozen=True)
class Hole:
    """What was refused when it was read (an alias), so that nobody can say whether it is right."""

    place: Place


Node = Scalar | Items | Entries | Hole


@dataclass(frozen=True)
class FileText:
    """What could be read of one file."""

    documents: tuple[Node, ...]
    errors: tuple[SpecError, ...]
    whole: bool
    """False when the reading broke off, so that there may be documents nobody has seen."""


@lru_cache(maxsize=1024)  # most files are as they were the last time
def read_documents(file: str, data: bytes) -> FileText:
    """Read all documents of a file; the ones before a syntax error are there, too. They are not to be changed."""
    text, error = _decode(file, data)
    if error:
        return FileText((), (error,), whole=False)
    reader = _Reader(file)
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            if not reader.take(event):
                return FileText(tuple(reader.documents), tuple(reader.errors), whole=False)
    except ReaderError as broken:
        before = text[: broken.position]
        place = Place(file, before.count("\n") + 1, broken.position - before.rfind("\n"))
        reader.errors.append(_character(place, broken.character))
        return FileText(tuple(reader.documents), tuple(reader.errors), whole=False)
    except MarkedYAMLError as broken:
        reader.errors.append(_syntax(file, broken))
        return FileText(tuple(reader.documents), tuple(reader.errors), whole=False)
    except (YAMLError, ValueError, OverflowError):  # an escape beyond Unicode, a directive with an absurd number
        says = "cannot read this file as YAML"
        reader.errors.append(SpecError(Place(file, reader.line), Code.SYNTAX, says))
        return FileText(tuple(reader.documents), tuple(reader.errors), whole=False)
    return FileText(tuple(reader.documents), tuple(reader.errors), whole=True)


def unread(file: str, error: OSError) -> FileText:
    """Say of a file that it is there and could not be read."""
    found, todo = error.strerror or type(error).__name__, "make it readable for the user that the controller runs as"
    said = SpecError(Place(file, 1), Code.UNREADABLE, "cannot read this file", found=found.lower(), todo=todo)
    return FileText((), (said,), whole=False)


def _decode(file: str, data: bytes) -> tuple[str, SpecError | None]:
    def unreadable(says: str, todo: str, line: int = 1, column: int = 1, found: str = "") -> tuple[str, SpecError]:
        return "", SpecError(Place(file, line, column), Code.UNREADABLE, says, found=found, todo=todo)

    if len(data) > MAX_BYTES:
        return unreadable(
            "cannot take this for a spec file: it is too big",
            "split it, or keep what is not a spec out of this directory",
            found=f"{len(data):,} bytes; at most {MAX_BYTES:,} are read",
        )
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return unreadable("cannot read UTF-16", "save it as UTF-8")
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode()
    except UnicodeDecodeError as bad:
        before = data[: bad.start]
        column = len(before[before.rfind(b"\n") + 1 :].decode(errors="replace")) + 1
        return unreadable(
            "cannot read this as UTF-8",
            "save it as UTF-8",
            before.count(b"\n") + 1,
            column,
            f"byte 0x{data[bad.start]:02x}",
        )
    if not text.strip():
        # A write that was cut short leaves this, and what the file defined must not be forgotten for that.
        return unreadable(
            "cannot tell what an empty file means",
            "to define nothing, delete it or leave a comment in it",
            found="nothing at all" if not data else "white space",
        )
    return text, None


@dataclass
class _Open:
    """A mapping or list that is being read."""

    node: Items | Entries | Hole
    """A Hole for a mapping or list that stands where only a name can: what is in it is read and dropped."""
    key: str | None = None
    key_place: Place | None = None
    key_read: bool = False


class _Reader:
    """Builds documents out of YAML's events."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.line = 1
        self.documents: list[Node] = []
        self.errors: list[SpecError] = []
        self._open: list[_Open] = []

    def take(self, event: Event) -> bool:
        """Take the next event; False when reading on makes no sense."""
        place = self._place(event.start_mark)
        self.line = place.line
        match event:
            case AliasEvent():
                self._refuse(
                    place,
                    "cannot use an alias (*)",
                    "write it out, or put what objects share under Fleet.defaults; put text with a leading * in quotes",
                )
                self._add(Hole(place))
            case ScalarEvent():
                self._look_at_properties(event, place)
                self._add(self._scalar(event, place))
            case MappingStartEvent() | SequenceStartEvent():
                self._look_at_properties(event, place)
                if len(self._open) >= MAX_DEPTH:
                    says = f"cannot read on: mappings and lists lie more than {MAX_DEPTH} deep in each other"
                    self.errors.append(SpecError(place, Code.UNREADABLE, says))
                    return False
                self._open.append(_Open(self._collection(event, place)))
            case MappingEndEvent() | SequenceEndEvent():
                self._add(self._open.pop().node)
            case _:
                pass
        if len(self.errors) >= MAX_ERRORS:
            says = f"cannot take this for a spec file: it has {MAX_ERRORS} errors in how it is written"
            self.errors.append(SpecError(place, Code.UNREADABLE, says, todo="keep what is not a spec out of here"))
            return False
        return True

    def _collection(self, event: Event, place: Place) -> Items | Entries | Hole:
        above = self._open[-1] if self._open else None
        if above and isinstance(above.node, Entries) and not above.key_read:
            self._refuse(
                place,
                "cannot use a mapping or a list as the name of a field",
                "put text that begins with { or [ in quotes",
            )
            return Hole(place)
        return Entries(place) if isinstance(event, MappingStartEvent) else Items(place)

    def _add(self, node: Node) -> None:
        if not self._open:
            self.documents.append(node)
            return
        above = self._open[-1]
        match above.node:
            case Items() as into:
                into.items.append(node)
            case Entries() as into if above.key_read:
                if above.key is not None and above.key_place is not None:
                    into.values[above.key], into.keys[above.key] = node, above.key_place
                above.key, above.key_read = None, False
            case Entries() as into:
                above.key, above.key_place, above.key_read = self._key(node, into), node.place, True
            case Hole():
                pass

    def _key(self, node: Node, into: Entries) -> str | None:
        """Give the name under which the next value goes; None to drop the value."""
        if not isinstance(node, Scalar):
            return None
        key = str(node.value or "")
        if key == "<<":
            self._refuse(node.place, "cannot merge with <<", "put what objects share under Fleet.defaults")
            return None
        if key in into.values:
            shown = "a key that is not shown here" if looks_like_secret(key) else f'"{key}"'
            self.errors.append(
                SpecError(
                    node.place,
                    Code.TWICE,
                    "cannot have the same key twice in one mapping",
                    found=shown,
                    also=(into.keys[key],),
                    todo="leave one of them out, or begin another document with ---",
                )
            )
            return None
        return key

    def _scalar(self, event: ScalarEvent, place: Place) -> Node:
        plain = event.style is None
        if bad := _BAD_CHARACTER.search(event.value):
            self.errors.append(_character(place, ord(bad.group())))
            return Hole(place)
        if plain and event.value in ("", "~", "null", "Null", "NULL"):
            return Scalar(place, None)
        return Scalar(place, Text(event.value, plain=plain))

    def _look_at_properties(self, event: ScalarEvent | MappingStartEvent | SequenceStartEvent, place: Place) -> None:
        if event.anchor:
            self._refuse(place, "cannot use an anchor (&)", "remove it; what objects share goes under Fleet.defaults")
        if event.tag:
            self._refuse(place, "cannot use a tag (!)", "remove it: every field knows its type")

    def _refuse(self, place: Place, says: str, todo: str) -> None:
        self.errors.append(SpecError(place, Code.SYNTAX, says, todo=todo))

    def _place(self, mark: StreamMark) -> Place:
        return Place(self.file, mark.line + 1, mark.column + 1)


def _character(place: Place, character: int | str) -> SpecError:
    number = ord(character) if isinstance(character, str) else character
    return SpecError(
        place,
        Code.UNREADABLE,
        "cannot use this character",
        found=f"U+{number:04X}",
        todo="remove it; your editor may not show it",
    )


# What the parser says, what that mostly means, and what to do. Its own words may quote the file, so they are not shown.
_MEANINGS = (
    (r"character '\\t'", "cannot use a tab here", "indent with spaces"),
    (r"scanning an (alias|anchor)", "cannot begin text with * or & without quotes", "put the text in quotes"),
    (
        r"mapping values are not allowed",
        "cannot have a second colon here",
        "put text with a colon and a space in quotes",
    ),
    (
        r"could not find expected ':'",
        "cannot find the colon of this line",
        "write NAME: VALUE, or indent text that goes on",
    ),
    (
        r"cannot start any token",
        "cannot begin text with this character without quotes",
        "put the text in quotes",
    ),
    (
        r"expected <block end>|expected the node content|did not find expected <document start>",
        "cannot tell what this belongs to",
        "give it the indentation of the lines it belongs to; close what was opened before",
    ),
    (
        r"expected ',' or|expected ']'|expected '}'",
        "cannot find the end of this list or mapping",
        "add a comma, or close the bracket",
    ),
    (r"unexpected end of stream", "cannot find the end of this text", "close its quote"),
    (r"unexpected document separator", "cannot have --- inside a quoted text", "close its quote"),
    (r"escape|hexa?decimal", "cannot read this escape", "use single quotes for text with backslashes"),
)


def _syntax(file: str, broken: MarkedYAMLError) -> SpecError:
    mark = broken.problem_mark or broken.context_mark
    place = Place(file, mark.line + 1, mark.column + 1) if mark else Place(file, 1)
    began = broken.context_mark
    also = (Place(file, began.line + 1, began.column + 1),) if began and mark and began.line != mark.line else ()
    problem = f"{broken.context or ''} {broken.problem or ''}"
    for pattern, says, todo in _MEANINGS:
        if re.search(pattern, problem):
            return SpecError(place, Code.SYNTAX, says, todo=todo, also=also)
    return SpecError(place, Code.SYNTAX, "cannot read this as YAML", also=also)


def walk(node: Node, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Scalar]]:
    """Give every scalar below a node with its path."""
    match node:
        case Scalar():
            yield path, node
        case Items():
            for place, item in enumerate(node.items):
                yield from walk(item, (*path, place))
        case Entries():
            for key, value in node.values.items():
                yield from walk(value, (*path, key))
        case Hole():
            pass
