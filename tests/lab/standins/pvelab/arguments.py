"""Command lines as ``PVE::CLIHandler`` and Perl's Getopt::Long read them, with what they say when they cannot."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pvelab.base import Die, parameter_error, warn
from pvelab.schema import Field, check, parse_boolean

VMID = Field("integer", minimum=1)
SNAPSHOT = Field(format="pve-configid", max_length=40)
BOOLEAN = Field("boolean")


@dataclass(frozen=True)
class Command:
    """One subcommand: its positional arguments, its options, and what it does with them."""

    run: Callable[[dict[str, Any]], int | None]
    positional: Mapping[str, Field] = field(default_factory=dict)
    options: Mapping[str, Field] = field(default_factory=dict)
    usage: str = "[OPTIONS]"
    takes_rest: bool = False  # all that is left is the value of ``extra-args``


def call(program: str, name: str, command: Command, arguments: Sequence[str]) -> int:
    """Parse the arguments of a subcommand, check them, and run it."""
    usage = " ".join((program, name, *(f"<{argument}>" for argument in command.positional), command.usage)).rstrip()
    values = parse(usage, command, arguments)
    errors = {}
    for key, value in values.items():
        known = command.positional.get(key) or command.options.get(key)
        if known is None:
            continue
        if message := check(known, value, key):
            errors[key] = message
        elif known.kind == "boolean":
            values[key] = parse_boolean(str(value))
        elif known.kind == "integer":
            values[key] = int(value)
    if errors:
        raise parameter_error(usage, errors)
    return command.run(values) or 0


def parse(usage: str, command: Command, arguments: Sequence[str]) -> dict[str, Any]:
    """Take arguments apart: options anywhere before ``--``, with one dash or two, abbreviated where unique."""
    values: dict[str, Any] = {}
    rest: list[str] = []
    wrong = False
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if argument == "--":
            rest += waiting
            break
        match = re.fullmatch(r"--?([^-=][^=]*)(?:=(.*))?", argument, re.DOTALL)
        if match is None:
            rest.append(argument)
            continue
        name, value = _option(match[1], command.options), match[2]
        if name is None:
            warn(f"Unknown option: {match[1]}")
            wrong = True
        elif value is not None:
            values[name] = value
        elif command.options[name].kind == "boolean":
            values[name] = waiting.pop(0) if waiting and not waiting[0].startswith("-") else "1"
        elif waiting:
            values[name] = waiting.pop(0)
        else:
            warn(f"Option {match[1]} requires an argument")
            wrong = True
    if wrong:
        raise Die(f"400 unable to parse option\n{usage}", 2)
    for name in command.positional:
        if not rest:
            raise Die(f"400 not enough arguments\n{usage}")
        values[name] = rest.pop(0)
    if command.takes_rest:
        values["extra-args"] = rest
    elif rest:
        raise Die(f"400 too many arguments\n{usage}")
    return values


def _option(given: str, options: Mapping[str, Field]) -> str | None:
    if given in options:
        return given
    meant = [name for name in options if name.startswith(given)]
    return meant[0] if len(meant) == 1 else None
