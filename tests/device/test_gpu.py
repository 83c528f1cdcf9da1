"""On a machine with a real NVIDIA GPU: what is seen of it, and engines on it, from our unit's text to their answers.

RECONCILE_DEVICE names the directory that tests/device/set-up made; without it these tests are left out. The machine
needs neither systemd nor a network. ``DIRECTORY/fits/bin/python -m pytest tests/device -s``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from controller.engines import shipped
from controller.engines.flags import read_list
from controller.engines.registry import engine
from tests.engines.serving import ROOT, How, look, serving, spec, until_ready

RUNS = int(os.environ.get("RECONCILE_RUNS", "20"))
DEVICE = Path(os.environ.get("RECONCILE_DEVICE", "/nowhere"))
SGLANG = "0.5.11"
PROGRAMS = ROOT / "controller/layers/server_environment/programs"

pytestmark = pytest.mark.skipif(not DEVICE.is_dir(), reason="RECONCILE_DEVICE names no machine's environments")


def nvidia_smi() -> dict[str, str]:
    """The first GPU as nvidia-smi tells of it."""
    names = ("uuid", "pci.bus_id", "name", "driver_version", "compute_cap", "memory.total")
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return dict(zip(names, (part.strip() for part in done.stdout.splitlines()[0].split(",")), strict=True))


@pytest.fixture(scope="session")
def gpu() -> dict[str, str]:
    return nvidia_smi()


def how(name: str, gpu: dict[str, str], **flags: Any) -> How:
    """An engine on the GPU. What would be compiled at start is left to backends that need no compiler's cache."""
    if name == "transformers":
        return How(DEVICE / "fits", "5.6.0", {"dtype": "bfloat16", **flags}, gpus=(gpu["uuid"],))
    own = {"attention-backend": "triton", "sampling-backend": "pytorch", "mem-fraction-static": 0.2}
    return How(DEVICE / "fits", SGLANG, {**own, **flags}, gpus=(gpu["uuid"],), cuda_home="/usr/local/cuda")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models")
    program = ROOT / "tests/engines/tiny_model.py"
    subprocess.run([str(DEVICE / "fits/bin/python"), str(program), str(target)], check=True, timeout=600)
    return target


def reconcile(*arguments: str, specs: Path) -> Any:
    done = subprocess.run(
        [
            *(sys.executable, "-c", "import sys; from controller.cli import main; sys.exit(main())", *arguments),
            *("--specs", str(specs), "--state", str(specs / "state"), "-o", "json"),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode in (0, 1, 2), done.stderr
    print(done.stderr[-500:])
    return json.loads(done.stdout)


def test_the_gpu_is_seen_as_it_is(gpu: dict[str, str], tmp_path: Path) -> None:
    pci = gpu["pci.bus_id"].lower()[4:]
    (tmp_path / "specs.yaml").write_text(
        f"""\
kind: Host
name: here
platform: linux
ssh: {{connection: local}}
nvidia: {{gpus: [{{pci: "{pci}", model: "{gpu["name"]}"}}]}}
---
kind: ModelServer
name: tiny
host: here
model: {{repo: test/tiny, revision: {"0" * 40}, directory: /models}}
engine: {{name: sglang, version: {SGLANG}}}
serve: {{port: 30000}}
"""
    )
    (seen,) = reconcile("gpus", specs=tmp_path)["gpus"]
    assert seen["uuid"] == gpu["uuid"]
    assert seen["driver"] == "nvidia"
    assert seen["memory_total"] == int(gpu["memory.total"]) << 20
    plan = reconcile("plan", specs=tmp_path)
    print(json.dumps(plan, indent=1)[:4000])
    assert not [each for each in plan["drift"] if each["layer"] == "host.gpu-health"]


def prove(environment: Path, gpu: dict[str, str], tmp_path: Path) -> dict[str, Any]:
    """What came of running the environment's kernels, as the step does it."""
    marker = tmp_path / "env.json"
    marker.write_text(json.dumps({"engine": "sglang", "proofs": []}))
    command = [str(environment / "bin/python"), "-I", str(PROGRAMS / "prove.py"), str(marker)]
    done = subprocess.run(
        [*command, gpu["driver_version"], "boot", gpu["uuid"]], capture_output=True, text=True, timeout=600, check=False
    )
    print(done.stdout, done.stderr)
    (found,) = json.loads(marker.read_text())["proofs"]
    return dict(found)


def test_kernels_that_fit_are_proved(gpu: dict[str, str], tmp_path: Path) -> None:
    found = prove(DEVICE / "fits", gpu, tmp_path)
    assert found["result"] == "passed", found


def test_kernels_that_do_not_fit_are_found(gpu: dict[str, str], tmp_path: Path) -> None:
    found = prove(DEVICE / "unfit", gpu, tmp_path)
    assert found["result"] == "failed"
    assert found["said"]


def test_the_options_of_the_installed_engine_are_read() -> None:
    python = str(DEVICE / "fits/bin/python")
    site = subprocess.run(
        [python, "-c", "import pathlib, sglang; print(pathlib.Path(sglang.__file__).parents[1])"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout.splitlines()[-1]
    done = subprocess.run(
        [python, "-I", "-", "sglang", site],
        input=shipped.READER,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found = read_list(json.loads(done.stdout))
    assert found == shipped.flags("sglang", SGLANG)
    # The parser that the engine itself builds
    live = subprocess.run(
        [
            python,
            "-c",
            "import argparse, sglang.srt.server_args as a; p = argparse.ArgumentParser(allow_abbrev=False); "
            "a.ServerArgs.add_cli_args(p); print(*sorted(o for x in p._actions for o in x.option_strings))",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    options = {each[2:] for each in live.stdout.splitlines()[-1].split() if each.startswith("--")} - {"help"}
    unknown = sorted(option for option in options if found.find(option) is None)
    assert unknown == []
    print(f"\nSGLang {SGLANG}: {len(options)} options, all of them read")


def test_an_unknown_flag_is_refused_before_a_start(gpu: dict[str, str]) -> None:
    given = how("sglang", gpu, **{"tool-call-parsr": "qwen3_coder"})
    resolved = engine("sglang").resolve(spec("sglang", 30000, given), shipped.flags("sglang", SGLANG), 1)
    (fault,) = resolved.faults
    assert "tool-call-parser" in f"{fault.message} {fault.todo}"
    print(f"\n{fault.message}; {fault.todo}")


@pytest.mark.parametrize("name", ["transformers", "sglang"])
@pytest.mark.timeout(900)
def test_a_sound_model_passes(name: str, gpu: dict[str, str], models: Path, tmp_path: Path) -> None:
    # transformers serve 5.6.0 takes no calls and no thoughts apart
    asked = ["arithmetic"] if name == "transformers" else ["arithmetic", "tool-call", "reasoning"]
    with serving(name, models / "good", tmp_path / "server", how(name, gpu), min_context=320, output=asked) as one:
        health = until_ready(one)
        runs = [one.output() for _ in range(RUNS if name == "sglang" else 3)]
        wrong = [each for found in runs for each in found["checks"] if each["result"] != "passed"]
        assert wrong == []
        speeds = sorted(found["figures"]["tokens_per_second"] for found in runs)
        first = runs[-1]["figures"]["first_token_seconds"]
        memory = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        print(
            f"\n{name} on {gpu['name']}: ready after {health['took']:.0f} s ({' > '.join(health['ladder'])}); "
            f"{len(runs)} runs of {len(runs[0]['checks'])} checks, never flagged; tokens/s {speeds[0]:.0f} to "
            f"{speeds[-1]:.0f}; first token {first * 1000:.0f} ms; compute processes {memory.strip()!r}"
        )


@pytest.mark.parametrize("name", ["transformers", "sglang"])
@pytest.mark.timeout(900)
def test_damaged_weights_are_healthy_and_caught(name: str, gpu: dict[str, str], models: Path, tmp_path: Path) -> None:
    with serving(name, models / "damaged", tmp_path / "server", how(name, gpu)) as one:
        assert until_ready(one)["level"] == "generates"
        found = one.output()
        failed = {each["name"]: each["evidence"] for each in found["checks"] if each["result"] == "failed"}
        assert {"capital", "arithmetic", "concurrency"} <= set(failed)
        print(f"\n{name}: generates, and fails {', '.join(failed)}: {failed['capital'][:200]}")


@pytest.mark.timeout(900)
def test_speculation_is_measured_and_a_dead_engine_is_seen(gpu: dict[str, str], models: Path, tmp_path: Path) -> None:
    flags = {"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": 8}
    bounds = {"draft_acceptance": {"at_least": 0.0, "at_most": 1.0}}
    with serving("sglang", models / "good", tmp_path / "server", how("sglang", gpu, **flags), **bounds) as one:
        until_ready(one)
        found = [one.output() for _ in range(2)][-1]  # the second time it has seen the text
        assert [each for each in found["checks"] if each["result"] == "failed"] == []
        figures = found["figures"]
        assert figures["draft_acceptance"] is not None
        print(f"\nNGRAM: {figures['draft_acceptance']:.1%} accepted, {figures['accepted_length']} tokens a pass")
        scheduler = subprocess.run(
            ["pgrep", "-g", str(one.process.pid), "-f", "sglang::scheduler"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.split()
        assert scheduler
        os.kill(int(scheduler[0]), signal.SIGKILL)
        until = time.monotonic() + 60
        while (health := look(one))["process"]:
            assert time.monotonic() < until, health
            time.sleep(0.2)
        assert health["level"] == "no-answer"
        print(f"killed scheduler: ended with {one.process.wait(timeout=60)}, level {health['level']}")
