"""The command ``rbd`` of Ceph: ``status``, ``showmapped``, ``ls``, ``info``."""

from __future__ import annotations

import json
import sys
from typing import Any

from pvelab import storage
from pvelab.base import Die, path

_WITH_VALUE = (
    *("p", "pool", "image", "format", "m", "n", "id", "name", "keyring", "conf", "c", "k", "auth_supported"),
    "namespace",
)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    options, words = _parse(arguments)
    as_json = options.get("format") == "json"
    command = words.pop(0) if words else ""
    if command in ("ls", "list"):
        _list(options.get("pool") or (words[0] if words else storage.pool()), as_json)
    elif command == "showmapped" or (command == "device" and words[:1] in (["list"], ["ls"])):
        _show_mapped(as_json)
    elif command in ("status", "info"):
        image = _image(options, words)
        _status(image, as_json) if command == "status" else _info(image, as_json)
    else:
        raise Die(f"rbd: the lab does not play '{command}'", 22)
    return 0


def _parse(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    options, words, waiting = {}, [], list(arguments)
    while waiting:
        argument = waiting.pop(0)
        name, equals, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-"):
            words.append(argument)
        elif equals:
            options[name] = value
        elif name in _WITH_VALUE and waiting:
            options[name] = waiting.pop(0)
    if "p" in options:
        options["pool"] = options["p"]
    return options, words


def _check_pool(name: str) -> None:
    if name != storage.pool():
        raise Die(f"rbd: error opening pool '{name}': (2) No such file or directory", 2)


def _image(options: dict[str, str], words: list[str]) -> str:
    spec = options.get("image") or (words[0] if words else "")
    if not spec:
        raise Die("rbd: image name was not specified", 22)
    pool, slash, image = spec.rpartition("/")
    _check_pool(options.get("pool") or (pool if slash else storage.pool()))
    if not path(f"{storage.RBD}/{image}").is_dir():
        raise Die(f"rbd: error opening image {image}: (2) No such file or directory", 2)
    return image


def _list(pool: str, as_json: bool) -> None:
    _check_pool(pool)
    top = path(storage.RBD)
    folders = [it for it in top.iterdir() if it.is_dir()] if top.is_dir() else []
    names = sorted(it.name for it in folders if not it.name.startswith("."))
    if as_json:
        _print(names)
    else:
        sys.stdout.writelines(f"{name}\n" for name in names)


def _show_mapped(as_json: bool) -> None:
    found = [
        {"id": str(n), "pool": storage.pool(), "namespace": "", "name": name, "snap": "-", "device": f"/dev/rbd{n}"}
        for n, name in enumerate(storage.mapped())
    ]
    if as_json:
        _print(found)
    elif found:
        columns = ("id", "pool", "namespace", "image", "snap", "device")
        rows = [dict(zip(columns, columns, strict=True))] + [{**it, "image": it["name"]} for it in found]
        widths = {column: max(len(row[column]) for row in rows) for column in columns}
        for row in rows:
            print("  ".join(row[column].ljust(widths[column]) for column in columns))


def _status(image: str, as_json: bool) -> None:
    found = storage.watchers(image)
    if as_json:
        shown = [{"address": f"{it.address}:0/{it.pid}", "client": it.client, "cookie": it.cookie} for it in found]
        _print({"watchers": shown})
    elif found:
        print("Watchers:")
        for it in found:
            print(f"\twatcher={it.address}:0/{it.pid} client.{it.client} cookie={it.cookie}")
    else:
        print("Watchers: none")


def _info(image: str, as_json: bool) -> None:
    features = ["layering", "exclusive-lock", "object-map", "fast-diff", "deep-flatten"]
    if as_json:
        _print({"name": image, "size": 200 << 30, "objects": 51200, "order": 22, "format": 2, "features": features})
    else:
        print(f"rbd image '{image}':")
        print("\tsize 200 GiB in 51200 objects", "\torder 22 (4 MiB objects)", "\tformat: 2", sep="\n")
        print(f"\tfeatures: {', '.join(features)}")


def _print(value: Any) -> None:
    print(json.dumps(value, separators=(",", ":")))
