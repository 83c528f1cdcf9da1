"""The schema that editors use says yes to what is right and no to what is not."""

import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from controller.spec.load import load, read
from controller.spec.policy import Permission
from controller.spec.schema import schema

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("RECONCILE_SHARED", ROOT.parent / "shared"))
EXAMPLE = sorted((ROOT / "specs" / "example").rglob("*.yaml"))


@pytest.fixture(scope="module")
def validator() -> Any:
    jsonschema.Draft202012Validator.check_schema(schema())
    return jsonschema.Draft202012Validator(schema())


def documents(text: str) -> list[Any]:
    return list(YAML(typ="safe", pure=True).load_all(text))


def contract() -> str:
    path = SHARED / "interface.md"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    found = re.search(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL)
    assert found
    return found.group(1)


def test_the_example_is_right() -> None:
    found = load({str(path.relative_to(ROOT)): path.read_bytes() for path in EXAMPLE})
    assert [str(one.ref) for one in found] == [
        "Host/kpro5",
        "Host/spark1",
        "Host/spark2",
        "Container/ct129",
        "ModelServer/qwen3.6-27b",
        "ModelServer/embedder",
    ]


@pytest.mark.parametrize("path", EXAMPLE, ids=lambda path: path.name)
def test_the_schema_takes_the_example(path: Path, validator: Any) -> None:
    for document in documents(path.read_text()):
        validator.validate(document)


def test_the_schema_takes_the_contracts_example(validator: Any) -> None:
    assert [validator.validate(document) for document in documents(contract())] == [None] * 4


def test_the_contracts_example_lacks_only_what_it_does_not_show() -> None:
    # It is an excerpt: it names two hosts and a secret that stand elsewhere.
    text = contract()
    assert {error.says for error in read({"a.yaml": text.encode()}).errors} == {
        "cannot find a host called spark1",
        "cannot find a host called spark2",
        "cannot find a secret called qwen",
    }
    text = text.replace("secrets:\n", "secrets:\n  qwen: {from_env: QWEN_API_KEY}\n", 1)
    hosts = "".join(f"---\nkind: Host\nname: spark{n}\naddress: 10.1.2.{n}\nplatform: linux\n" for n in (1, 2))
    found = load({"a.yaml": text.encode(), "b.yaml": hosts.encode()})
    server = found.servers["qwen3.6-27b"]
    assert server.policy.rollback
    assert server.serve.flags["context-length"] == "262144"
    assert found.hosts["kpro5"].gpus[4].pci == "0000:b1:00.0"
    assert found.containers["ct129"].policy.allow == (
        Permission.MOVE_CONTAINER,
        Permission.TAKE_OVER_CONTAINER,
        Permission.RESTART_CONTAINER,
        Permission.EDIT_CONTAINER_CONFIG,
    )


@pytest.mark.parametrize(
    "document",
    [
        {"kind": "Container", "name": "a", "id": 100, "host": "h", "gpus": ["4f:00.0"]},
        {"kind": "Container", "name": "a"},  # the rest may come from the defaults
        {"kind": "Host", "name": "a", "nvidia": {"gpus": [{"pci": "4f:00.0", "model": "X"}]}},
        {"kind": "ModelServer", "name": "a", "gpus": [0, "4f:00.0"], "engine": {"version": 0.1, "python": 3.12}},
        {"kind": "ModelServer", "name": "a", "serve": {"flags": {"a": True, "b": 1, "c": ["x"], "d": {"e": 1}}}},
        {"kind": "ModelServer", "name": "a", "engine": "external"},
        {"kind": "ModelServer", "name": "a", "serve": {"env": {"A": 1, "B": {"secret": "x"}}}},
        {"kind": "Fleet", "defaults": {"ModelServer": {"policy": {"mode": "enforce"}, "serve": {"address": "::"}}}},
    ],
)
def test_right(document: Any, validator: Any) -> None:
    validator.validate(document)


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"kind": "Nothing"},
        {"kind": "Container"},
        {"kind": "Container", "name": "a", "hots": "h"},
        {"kind": "Container", "name": "a", "id": 99},
        {"kind": "Container", "name": "a", "mounts": [{"when_missing": "drop"}]},
        {"kind": "Host", "name": "a", "platform": "promox"},
        {"kind": "Host", "name": "a", "nvidia": {"gpus": [{"pci": "4f", "model": "X"}]}},
        {"kind": "Host", "name": "a", "policy": {"allow": ["anything"]}},
        {"kind": "Host", "name": "a", "policy": {"windows": [{"cron": "0 2 * * *"}]}},
        {"kind": "ModelServer", "name": "a", "model": {"token": "hf"}},
        {"kind": "ModelServer", "name": "a", "engine": "sglang"},
        {"kind": "ModelServer", "name": "a", "engine": {"name": "sglang", "versoin": "1"}},
        {"kind": "ModelServer", "name": "a", "serve": {"port": 70000}},
        {"kind": "ModelServer", "name": "a", "serve": {"flags": {"a": False}}},
        {"kind": "Fleet", "defaults": {"Hosts": {}}},
        {"kind": "Fleet", "defaults": {"Host": {"name": "a"}}},
        {"kind": "Fleet", "defaults": {"Host": {"adress": "a"}}},
    ],
)
def test_wrong(document: Any, validator: Any) -> None:
    assert not validator.is_valid(document)


def test_every_field_says_what_it_is() -> None:
    parts = schema()["$defs"]
    silent = [
        f"{name}.{field}"
        for name, part in parts.items()
        for field, shape in part.get("properties", {}).items()
        if field != "kind" and "description" not in shape and "$ref" not in shape
    ]
    assert silent == []
