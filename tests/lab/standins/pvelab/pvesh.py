"""The command ``pvesh``, with ``--output-format json`` and ``json-pretty``; the tables for people are not played."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from pvelab import api, ct
from pvelab.base import Die, split_list
from pvelab.ctconf import PROPERTIES

METHODS = ("get", "set", "create", "delete", "ls", "usage", "help")


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    quiet = "--nooutput" in arguments or "-nooutput" in arguments
    words = [argument for argument in arguments if argument.lstrip("-") not in ("nooutput", "noproxy")]
    if len(words) < 2 or words[0] not in METHODS:
        raise Die(f"ERROR: unknown command 'pvesh {' '.join(words[:1])}'")
    method, where, options = words[0], "/" + words[1].strip("/"), words[2:]
    parameters = _parameters(options)
    output = parameters.pop("output-format", "text")
    there = api.proxied(method, where, options)
    if there is not None:
        sys.stdout.write(there)
        return 0
    if method == "get":
        value = api.get(where, parameters)
    elif method == "create":
        value = api.create(where, parameters)
    elif method == "set":
        _set(where, parameters)
        value = None
    else:
        raise Die(f"the lab does not play 'pvesh {method}'")
    if value is not None and not quiet:
        _print(value, output)
    return 0


def _parameters(options: list[str]) -> dict[str, str]:
    """Options as ``--name value``, ``--name=value`` or ``--name`` alone; a value may be empty."""
    found: dict[str, str] = {}
    waiting = list(options)
    while waiting:
        match = re.fullmatch(r"--?([^=]+)(?:=(.*))?", waiting.pop(0), re.DOTALL)
        if match is None:
            raise Die("400 too many arguments", 2)
        if match[2] is not None:
            found[match[1]] = match[2]
        else:
            found[match[1]] = waiting.pop(0) if waiting and not waiting[0].startswith("-") else ""
    return found


def _set(where: str, parameters: dict[str, str]) -> None:
    match = re.fullmatch(r"/nodes/[^/]+/lxc/(\d+)/config", where)
    if match is None:
        raise Die(f"No 'set' handler defined for '{where}'", 1)
    digest, delete = parameters.pop("digest", ""), split_list(parameters.pop("delete", ""))
    if unknown := [name for name in parameters if name not in PROPERTIES]:
        usage = "pvesh set <api_path> [OPTIONS] [FORMAT_OPTIONS]"
        raise Die(f"Unknown option: {unknown[0]}\n400 unable to parse option\n{usage}", 2)
    ct.set_options(int(match[1]), dict(parameters), delete, [], digest)


def _print(value: Any, output: str) -> None:
    if output == "json":
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    elif output == "json-pretty":
        text = json.dumps(value, sort_keys=True, indent=3, separators=(",", " : "), ensure_ascii=False)
    else:
        raise Die(f"the lab plays pvesh with --output-format json or json-pretty, not {output}")
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode() + b"\n")
