"""Servers as specs describe them, for what engines say of them."""

from typing import Any

from controller.spec.load import load
from controller.spec.model import ModelServer

STORY = {
    "context-length": 262144,
    "tool-call-parser": "qwen3_coder",
    "reasoning-parser": "qwen3",
    "speculative-algorithm": "NEXTN",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
}
A6000 = 48 << 30
QWEN_27B = 55_563_000_000  # bytes of tensors, in bfloat16


def server(
    engine: str = "sglang",
    version: str = "0.5.11",
    flags: dict[str, Any] | None = None,
    serve: dict[str, Any] | None = None,
    **more: Any,
) -> ModelServer:
    return ModelServer.model_validate(
        {
            "kind": "ModelServer",
            "name": "qwen",
            "host": "box",
            "model": {
                "repo": "Qwen/Qwen3.6-27B",
                "revision": "0" * 40,
                "directory": "/models",
                **more.pop("model", {}),
            },
            "engine": {"name": engine, "version": version, **more.pop("with_engine", {})},
            "serve": {"port": 30000, "flags": flags or {}, **(serve or {})},
            **more,
        }
    )


def written(engine: str, version: str, flags: str) -> ModelServer:
    """A server whose flags are written in YAML, as a person does."""
    specs = load(
        {
            "a.yaml": f"""
kind: Host
name: box
address: box
platform: linux
---
kind: ModelServer
name: qwen
host: box
model: {{repo: Qwen/Qwen3.6-27B, revision: {"0123456789" * 4}, directory: /models}}
engine: {{name: {engine}, version: {version}}}
serve:
  port: 30000
  flags: {{{flags}}}
""".encode()
        }
    )
    return specs.servers["qwen"]
