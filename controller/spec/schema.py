"""The JSON Schema of a document of a spec file, for editors to complete from and to check against.

It is a little stricter than the loader in how scalars are written (a port in quotes is a port for the loader) and
more lenient in what has to be there, as ``Fleet.defaults`` may give any field.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core import core_schema

from controller.spec.model import Container, Fleet, Host, Kind, ModelServer
from controller.spec.values import write_duration

Schema = dict[str, Any]

_OF_ITS_OWN = ("kind", "name", "renamed_from")


class _Generate(GenerateJsonSchema):
    """Takes scalars as editors see them: with YAML's own types, where the loader sees text."""

    def str_schema(self, schema: core_schema.StringSchema) -> Schema:
        return {**super().str_schema(schema), "type": ["string", "number"]}  # version: 0.10, revision: all digits

    def bool_schema(self, schema: core_schema.BoolSchema) -> Schema:
        return {"enum": [True, False, "yes", "no", "on", "off"]}

    def encode_default(self, dft: Any) -> Any:
        return write_duration(dft) if isinstance(dft, timedelta) else super().encode_default(dft)

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # the name of the field is its title


def schema() -> Schema:
    """Return the JSON Schema (draft 2020-12) of one document of a spec file."""
    _, generated = models_json_schema(
        [(model, "validation") for model in (Fleet, Host, Container, ModelServer)],
        schema_generator=_Generate,
    )
    parts: dict[str, Schema] = generated["$defs"]
    whole = {ref for part in parts.values() for ref in _refs_of_items(part)} | {"SecretRef"}
    for name, part in parts.items():
        if name not in whole:
            part.pop("required", None)
    parts["Gpu"]["required"].remove("owner")  # a plain Linux host's GPUs are its own
    _list_of_gpus(parts["Container"]["properties"])
    _name_of_engine(parts["ModelServer"]["properties"])
    for kind in ("Fleet", *Kind):
        parts[kind]["required"] = ["kind"] if kind == "Fleet" else ["kind", "name"]
    defaults = {f"{kind}Defaults": _defaults(kind, parts[kind]) for kind in Kind}
    parts["Fleet"]["properties"]["defaults"] |= {
        "additionalProperties": False,
        "properties": {kind.value: {"$ref": f"#/$defs/{kind}Defaults"} for kind in Kind},
    }
    parts["Fleet"]["properties"]["defaults"].pop("propertyNames", None)
    kinds = ("Fleet", *(kind.value for kind in Kind))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "reconcile spec",
        "description": "One object that is wanted; several documents may stand in one file.",
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": {"enum": list(kinds), "description": "What this document defines."}},
        "allOf": [
            {
                "if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]},
                "then": {"$ref": f"#/$defs/{kind}"},
            }
            for kind in kinds
        ],
        "$defs": {**parts, **defaults},
    }


def _defaults(kind: Kind, part: Schema) -> Schema:
    properties = {name: field for name, field in part["properties"].items() if name not in _OF_ITS_OWN}
    return {
        "type": "object",
        "description": f"Fields for every {kind} that does not give them itself; maps merge, lists replace.",
        "additionalProperties": False,
        "properties": properties,
    }


def _list_of_gpus(properties: dict[str, Schema]) -> None:
    """Let a list stand for ``devices``, as the loader does."""
    devices = {"type": "array", "items": {"type": "string"}, "description": "PCI addresses or UUIDs."}
    properties["gpus"]["anyOf"].insert(0, devices)


def _name_of_engine(properties: dict[str, Schema]) -> None:
    """Let ``external`` stand for an engine that is only watched, as the loader does."""
    engine = properties["engine"]
    properties["engine"] = {
        "anyOf": [{"const": "external"}, {"$ref": engine.pop("$ref")}],
        **engine,
    }


def _refs_of_items(part: Any) -> Iterator[str]:
    """Give the parts that stand in lists: a list is replaced as a whole, so its items have to be whole."""
    if isinstance(part, dict):
        items = part.get("items")
        if isinstance(items, dict) and "$ref" in items:
            yield items["$ref"].removeprefix("#/$defs/")
        for value in part.values():
            yield from _refs_of_items(value)
    elif isinstance(part, list):
        for value in part:
            yield from _refs_of_items(value)
