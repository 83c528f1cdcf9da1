"""reconcile fit, and what validate says of servers' engines, on the demo's fleet with a Hub of its own."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Shell
from tests.plugins import configs
from tests.plugins.servers import QWEN_27B

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB = {
    f"Qwen/Qwen3.6-27B@{COMMIT}": {
        "repo": "Qwen/Qwen3.6-27B",
        "revision": COMMIT,
        "files": {"model-1.safetensors": {"size": QWEN_27B, "whole": QWEN_27B}},
        "texts": {"config.json": json.dumps(configs.qwen_27b())},
    }
}
STORY = (
    "context-length: 262144, tool-call-parser: qwen3_coder, reasoning-parser: qwen3, speculative-algorithm: NEXTN, "
    "speculative-num-steps: 3, speculative-eagle-topk: 1, speculative-num-draft-tokens: 4, "
    "mamba-scheduler-strategy: extra_buffer, max-running-requests: 6"
)


def serve(shell: Shell, flags: str = STORY, engine: str = "{name: sglang, version: 0.5.11}", more: str = "") -> None:
    """Add a server and a Hub to the demo."""
    (shell.place / "specs/server.yaml").write_text(
        f"kind: ModelServer\nname: qwen\ncontainer: ct129\n"
        f"model: {{repo: Qwen/Qwen3.6-27B, revision: {COMMIT}, directory: /models}}\n"
        f"engine: {engine}\nserve: {{port: 30000, flags: {{{flags}}}}}\n{more}"
    )
    file = shell.place / "specs/fleet.sim.yaml"
    if "\nhub:" not in file.read_text():
        file.write_text(f"{file.read_text()}\nhub: {json.dumps(HUB)}\n")


def test_the_storys_sum(shell: Shell) -> None:
    serve(shell, more="checks: {min_context: 131072}\n")
    ran = shell.run("fit", "qwen")
    assert (ran.code, ran.err) == (2, ""), ran
    assert "sglang starts, and cannot hold one request of 262,144 tokens" in ran.out
    assert "0000:4f:00.0  NVIDIA RTX A6000  48.00 GiB" in ran.out
    assert "a token takes 32,768 bytes" in ran.out
    assert "a request takes 76,972,032 bytes besides" in ran.out
    sizes = [
        float(line.split("GiB")[0].split()[-1].replace(",", "")) for line in ran.out.splitlines() if "GiB  " in line
    ]
    *parts, pool = sizes[2:] if sizes[0] == sizes[1] == 48 else sizes
    assert sum(parts) == pytest.approx(pool, abs=0.03)


def test_the_sum_as_json_after_its_schema(shell: Shell) -> None:
    serve(shell)
    ran = shell.run("fit", "ModelServer/qwen", "-o", "json")
    report = ran.json("fit")
    assert (ran.code, report["outcome"]) == (2, "short")
    assert (report["kv_bytes_per_token"], report["state_bytes_per_request"]) == (32768, 76972032)
    *parts, pool = [line["bytes"] for line in report["lines"] if line["bytes"] is not None]
    assert sum(parts) == pool
    assert report["tokens"] == report["pool_tokens"] == pool // 32768
    assert [gpu["pci"] for gpu in report["gpus"]] == ["0000:4f:00.0", "0000:ce:00.0"]


def test_what_fits_ends_well(shell: Shell) -> None:
    serve(shell, "context-length: 32768")
    ran = shell.run("fit", "qwen")
    assert ran.code == 0, ran
    assert "qwen: it fits" in ran.out


def test_what_would_not_start_says_what_to_do(shell: Shell) -> None:
    engine = "{name: vllm, version: 0.33.0}"
    serve(shell, "max-model-len: 262144, gpu-memory-utilization: 0.7", engine)
    ran = shell.run("fit", "qwen")
    assert ran.code == 2, ran
    assert "qwen: vllm would not start" in ran.out
    assert "to do: write max-model-len: " in ran.out


def test_a_server_that_there_is_not_and_a_model_that_there_is_not(shell: Shell) -> None:
    ran = shell.run("fit", "qwne")
    assert ran.code == 1
    assert "cannot find a server called qwne" in ran.err
    serve(shell)
    spec = shell.place / "specs/server.yaml"
    spec.write_text(spec.read_text().replace("Qwen3.6-27B,", "Qwen3.6-28B,"))
    ran = shell.run("fit", "qwen")
    assert ran.code == 1
    assert "the Hub has no model Qwen/Qwen3.6-28B" in " ".join(ran.out.split())


def test_validate_warns_and_goes_on(shell: Shell) -> None:
    serve(shell, "speculative-algo: NEXTN", "{name: sglang, version: 0.5.9}")
    ran = shell.run("validate")
    assert ran.code == 0, ran
    assert "next: write speculative-algorithm" in ran.out
    assert "sglang#19070" in ran.out
    assert "The specs are valid" in ran.out
    assert all(len(line) <= 80 for line in ran.out.splitlines())
    report = shell.run("validate", "-o", "json").json("validate")
    assert [row["field"] for row in report["warnings"]] == ["serve.flags.speculative-algo", "engine.version"]
    assert report["errors"] == []


def test_validate_refuses_what_the_version_does_not_have(shell: Shell) -> None:
    serve(shell, "context-lenght: 5, tool-call-parser: qwen3-coder, port: 5")
    ran = shell.run("validate")
    assert ran.code == 2
    for said in ("context-length", "write qwen3_coder", "serve.port gives it"):
        assert said in " ".join(ran.err.split()), ran.err
    serve(shell, "", "{name: sglnag, version: 0.5.9}")
    ran = shell.run("validate")
    assert ran.code == 2
    assert "nearest:  sglang" in ran.err


def test_a_server_that_is_only_watched_needs_no_version(shell: Shell) -> None:
    serve(shell, "", "external")
    ran = shell.run("validate")
    assert ran.code == 0, ran
    ran = shell.run("fit", "qwen")
    assert ran.code == 1
    assert "it is watched only" in ran.out
