"""What is foretold of an engine from config.json alone, against what the engine itself reports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from controller.engines import shipped
from controller.engines.flags import read_list
from controller.engines.registry import engine
from controller.engines.shape import shape_of
from tests.engines.serving import ENGINES, on_cpu, serving, spec, until_ready


def metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def gauge(text: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
    assert found is not None, f"no {name} in {text[:2000]}"
    return float(found[1])


def label(text: str, name: str) -> int:
    found = re.search(rf'^vllm:cache_config_info\{{.*\b{name}="(\d+)"', text, re.MULTILINE)
    assert found is not None, f"no {name} in {text[:2000]}"
    return int(found[1])


@pytest.mark.timeout(3600)
def test_the_pool_has_as_many_bytes_a_token_as_foretold(engine_name: str, models: Path, tmp_path: Path) -> None:
    if engine_name == "transformers":
        pytest.skip("it keeps no pool")
    model = models / "good"
    token = shape_of(json.loads((model / "config.json").read_text())).kv_bytes(1, 2)
    with serving(engine_name, model, tmp_path / "server") as one:
        until_ready(one)
        said = metrics(one.server.serve.port)
    if engine_name == "vllm":
        block = label(said, "block_size")
        pool, tokens = label(said, "kv_cache_memory_bytes"), label(said, "num_gpu_blocks") * block
    else:
        block = int(gauge(said, "sglang:page_size"))
        pool = round(gauge(said, "sglang:kv_cache_memory_usage_gb") * 2**30)
        tokens = int(gauge(said, "sglang:max_total_num_tokens"))
    print(f"\n{engine_name}: {tokens} tokens in {pool} bytes; foretold: {token} bytes a token")
    assert abs(pool - tokens * token) <= block * token  # a pool has whole blocks, SGLang's one more for padding


def test_the_options_of_an_installed_engine_are_read_and_are_those_that_are_shipped(engine_name: str) -> None:
    site = next((ENGINES / engine_name / "lib").glob("python3*/site-packages"))
    done = subprocess.run(
        [sys.executable, "-I", "-", engine_name, str(site)],
        input=shipped.READER,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    listed = read_list(json.loads(done.stdout))
    known = shipped.flags(engine_name, listed.version)
    assert known is None or known.flags == listed.flags
    use = spec(engine_name, 1, on_cpu(engine_name))
    assert engine(engine_name).resolve(use, listed, 0).faults == ()
