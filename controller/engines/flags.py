"""The options of an engine's version, and how what a spec says becomes exactly these options.

Engines of Python take a prefix of an option for the option itself, as long as it is the only one that begins so; an
upgrade that adds another makes it an error, or another option. So a unit has full names only, those of the version.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import JsonValue

from controller.spec.values import nearest

SCHEMA = 1
"""The version of the form in which lists of options are written."""

Value = bool | str | tuple[str | dict[str, JsonValue], ...] | dict[str, JsonValue]


class Takes(StrEnum):
    """What an option is followed by."""

    NOTHING = "nothing"
    VALUE = "value"
    MAYBE = "maybe"
    """A value or none."""
    VALUES = "values"
    """One or more values."""
    EACH = "each"
    """One value, and the option may be repeated."""


@dataclass(frozen=True, slots=True)
class Flag:
    """An option: its name and other names, all without dashes. ``choices`` is () when any value may be tried."""

    name: str
    aliases: tuple[str, ...] = ()
    takes: Takes = Takes.VALUE
    choices: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All its names."""
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class FlagList:
    """The options of one version of an engine, and the names of its parsers (() where they are not known)."""

    engine: str
    version: str
    flags: tuple[Flag, ...]
    tool_parsers: tuple[str, ...] = ()
    reasoning_parsers: tuple[str, ...] = ()

    def find(self, name: str) -> Flag | None:
        """An option by any of its full names."""
        return next((flag for flag in self.flags if name in flag.names), None)

    def beginning(self, prefix: str) -> tuple[Flag, ...]:
        """The options that a prefix may mean."""
        return tuple(flag for flag in self.flags if any(name.startswith(prefix) for name in flag.names))

    @property
    def names(self) -> tuple[str, ...]:
        """All names of all options."""
        return tuple(name for flag in self.flags for name in flag.names)

    def as_json(self) -> dict[str, Any]:
        """Give it as JSON, as the data files and the marker of an environment have it."""
        flags = [
            {
                "name": flag.name,
                **({"aliases": list(flag.aliases)} if flag.aliases else {}),
                **({"takes": flag.takes.value} if flag.takes is not Takes.VALUE else {}),
                **({"choices": list(flag.choices)} if flag.choices else {}),
            }
            for flag in self.flags
        ]
        return {
            "schema": SCHEMA,
            "engine": self.engine,
            "version": self.version,
            "flags": flags,
            "tool_parsers": list(self.tool_parsers),
            "reasoning_parsers": list(self.reasoning_parsers),
        }


def read_list(data: Any) -> FlagList:
    """Read a list from JSON, as ``programs/read_flags.py`` prints it.

    Raises:
        ValueError: it is none, or of a newer form.
    """
    try:
        if int(data["schema"]) > SCHEMA:
            raise ValueError(f"this list of options is of form {data['schema']}; this release reads up to {SCHEMA}")
        flags = tuple(
            Flag(
                str(flag["name"]),
                tuple(map(str, flag.get("aliases", ()))),
                Takes(flag.get("takes", Takes.VALUE)),
                tuple(map(str, flag.get("choices", ()))),
            )
            for flag in data["flags"]
        )
        parsers = tuple(map(str, data["tool_parsers"])), tuple(map(str, data["reasoning_parsers"]))
        return FlagList(str(data["engine"]), str(data["version"]), flags, *parsers)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"cannot read a list of options: {error!r}") from None


@dataclass(frozen=True, slots=True)
class Rename:
    """An option's earlier name and the one that has taken its place. ``source`` says where that is known from."""

    old: str
    new: str
    source: str


@dataclass(frozen=True, slots=True)
class Option:
    """An option as it is passed, under its full name; ``names`` are all its names in this version."""

    name: str
    value: Value
    takes: Takes
    names: tuple[str, ...]

    @property
    def argv(self) -> tuple[str, ...]:
        """The arguments that it becomes, none of which a shell ever sees."""
        option = f"--{self.name}"
        match self.value:
            case True:
                return (option,)
            case tuple() if self.takes is Takes.EACH:
                return tuple(part for item in self.value for part in (option, _text(item)))
            case tuple():
                return (option, *map(_text, self.value))
        text = _text(self.value)
        return (f"{option}={text}",) if text.startswith("-") else (option, text)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Note:
    """Something about an option that a person should know: it is written in a way that a later version refuses."""

    flag: str
    message: str
    todo: str


@dataclass(frozen=True, slots=True)
class Fault:
    """An option that cannot be passed. ``message`` begins with "cannot"; ``nearest`` was probably meant.

    ``field`` is the field of a ModelServer that asks for it, where that is not one of its flags.
    """

    flag: str
    message: str
    nearest: str
    todo: str
    field: tuple[str, ...] = ()

    @property
    def where(self) -> tuple[str, ...]:
        """The field of a ModelServer that it is about."""
        return self.field or ("serve", "flags", self.flag)


@dataclass(frozen=True, slots=True)
class Resolved:
    """What becomes of the options of a spec, sorted by name. With faults, it is as far as they could be told."""

    options: tuple[Option, ...]
    notes: tuple[Note, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def argv(self) -> tuple[str, ...]:
        """All arguments."""
        return tuple(part for option in self.options for part in option.argv)

    def value(self, *names: str) -> Value | None:
        """The value of an option by any of its names, None when it is not given."""
        return next((o.value for o in self.options if any(name in o.names for name in names)), None)

    def text(self, *names: str) -> str | None:
        """The value of an option that is given one text."""
        value = self.value(*names)
        return value if isinstance(value, str) else None

    def number(self, *names: str) -> float | None:
        """The value of an option that is given one number; None too when it is no number."""
        try:
            return float(self.text(*names) or "")
        except ValueError:
            return None

    def has(self, *names: str) -> bool:
        """Whether an option is given."""
        return self.value(*names) is not None


@dataclass(frozen=True, slots=True)
class Grammar:
    """How an engine reads its options.

    ``reserved`` are options that a spec gives in fields of its own, by the field. ``underscores``: ``max_len`` is
    taken for ``max-len``. ``dotted``: ``config.key`` is taken for a part of the JSON that ``config`` is given.
    """

    engine: str
    reserved: Mapping[str, str]
    renames: Sequence[Rename] = ()
    underscores: bool = False
    dotted: bool = False
    tool_parser: str = "tool-call-parser"
    reasoning_parser: str = "reasoning-parser"


def resolve(grammar: Grammar, flags: FlagList | None, given: Mapping[str, Value]) -> Resolved:
    """Give the options of a spec the names of a version, and say what is wrong with them.

    Without a list every option is taken as it is written, except those that the spec has fields for.
    """
    options: dict[str, Option] = {}
    notes: list[Note] = []
    faults: list[Fault] = []
    for name in sorted(given):
        found, said = _find(grammar, flags, name)
        if isinstance(found, Fault):
            faults.append(found)
            continue
        notes += said
        option = Option(found.name, given[name], found.takes, found.names)
        faults += _misused(grammar, flags, name, found, given[name])
        if option.name in options:
            faults.append(Fault(name, f"cannot pass --{option.name} twice", "", f"write {option.name} once"))
        options.setdefault(option.name, option)
    return Resolved(tuple(options[name] for name in sorted(options)), tuple(notes), tuple(faults))


def _find(grammar: Grammar, flags: FlagList | None, name: str) -> tuple[Flag | Fault, list[Note]]:
    """The option that is meant."""
    if flags is None:
        return _refuse_reserved(grammar, name, Flag(name, takes=Takes.MAYBE)), []
    base, dot, rest = name.partition(".") if grammar.dotted else (name, "", "")
    spelled = base.replace("_", "-") if grammar.underscores else base
    notes: list[Note] = []
    flag = flags.find(spelled)
    if flag is None and (rename := _renamed(grammar, flags, spelled)) is not None:
        flag = flags.find(rename.new)
        told = f"{flags.engine} {flags.version} has no --{rename.old} any more: it is --{rename.new} now"
        notes.append(Note(name, told, f"write {rename.new}"))
    if flag is None:
        meant = flags.beginning(spelled)
        if len(meant) != 1:
            return _unknown(flags, name, spelled, meant), []
        flag = meant[0]
        told = f"--{name} is short for --{flag.name}, until a version has another option that begins so"
        notes.append(Note(name, told, f"write {flag.name}"))
    refused = _refuse_reserved(grammar, name, flag)
    if isinstance(refused, Fault) or not dot:
        return refused, notes
    return Flag(f"{flag.name}.{rest}", takes=Takes.MAYBE), notes


def _renamed(grammar: Grammar, flags: FlagList, name: str) -> Rename | None:
    return next((r for r in grammar.renames if r.old == name and flags.find(r.new) is not None), None)


def _unknown(flags: FlagList, name: str, spelled: str, meant: Collection[Flag]) -> Fault:
    which = f"{flags.engine} {flags.version}"
    if meant:
        names = sorted(next(n for n in flag.names if n.startswith(spelled)) for flag in meant)
        listed = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        return Fault(name, f"cannot tell which option --{name} is short for: {listed}", "", "write one of them in full")
    guess = nearest(name.replace("_", "-"), flags.names)
    todo = f"write {guess}" if guess else "remove it, or use a version that has it"
    return Fault(name, f"cannot pass --{name}: {which} has no such flag", guess, todo)


def _refuse_reserved(grammar: Grammar, name: str, flag: Flag) -> Flag | Fault:
    fields = (grammar.reserved[known] for known in flag.names if known in grammar.reserved)
    field = next(fields, None)
    if field is None:
        return flag
    return Fault(name, f"cannot pass --{flag.name} as a flag: {field} gives it", "", f"remove it, and write {field}")


def _misused(grammar: Grammar, flags: FlagList | None, name: str, flag: Flag, value: Value) -> Iterable[Fault]:
    """What is wrong with the value of an option."""
    if flags is None:
        return
    match flag.takes:
        case Takes.NOTHING if value is not True:
            yield Fault(name, f"cannot give --{flag.name} a value: it is a switch", "", f"write {name}: true")
            return
        case Takes.VALUE | Takes.VALUES | Takes.EACH if value is True:
            yield Fault(name, f"cannot pass --{flag.name} without a value", "", f"write {name}: VALUE")
            return
        case Takes.VALUE | Takes.MAYBE if isinstance(value, tuple):
            yield Fault(name, f"cannot give --{flag.name} several values", "", f"write {name}: VALUE")
            return
    parsers = {grammar.tool_parser: flags.tool_parsers, grammar.reasoning_parser: flags.reasoning_parsers}
    choices = parsers.get(flag.name) or flag.choices
    values = value if isinstance(value, tuple) else (value,)
    for one in values if choices else ():
        if isinstance(one, str) and one not in choices:
            guess = nearest(one, choices)
            listed = ", ".join(choices) if len(choices) <= 12 else ", ".join(choices[:12]) + ", …"
            todo = f"write {guess}" if guess else f"write one of {listed}"
            which = f"{flags.engine} {flags.version}"
            yield Fault(name, f"cannot use {one} as --{flag.name}: {which} has {listed}", guess, todo)
