"""How engines are started, installed and understood."""

from typing import Any

import pytest

from controller.engines.checking import known_bad, warnings
from controller.engines.registry import NoEngine, engine, engines
from controller.engines.words import Command, Place, causes_in, startup_seconds, tensor_parallel
from tests.plugins.servers import server

PLACE = Place(
    env_dir="/opt/reconcile/env/abc",
    weights_dir="/models/Qwen--Qwen3.6-27B/000",
    draft_dir="/models/draft",
    config="/opt/reconcile/server/qwen/config.yaml",
    gpus=("GPU-1", "GPU-2"),
    cuda_home="/usr/local/cuda-12.8",
)
VERSIONS = {"sglang": "0.5.11", "vllm": "0.33.0", "transformers": "5.24.0"}


def command(name: str, place: Place = PLACE, **more: Any) -> Command:
    use = server(name, VERSIONS[name], **more)
    return engine(name).command(use, place, engine(name).shipped_flags(VERSIONS[name]))


def test_engines_are_found_by_name() -> None:
    assert set(engines()) >= {"sglang", "vllm", "transformers", "external"}
    assert all(name == found.name for name, found in engines().items())
    with pytest.raises(NoEngine, match="did you mean sglang"):
        engine("sglnag")
    with pytest.raises(NoEngine, match="there are external"):
        engine("zzz")


def test_how_sglang_is_started() -> None:
    argv = command("sglang", flags={"context-length": "5", "trust-remote-code": True}).argv
    assert argv[:3] == ("/opt/reconcile/env/abc/bin/python", "-m", "sglang.launch_server")
    assert _pairs(argv[3:]) == {
        "--model-path": PLACE.weights_dir,
        "--host": "127.0.0.1",
        "--port": "30000",
        "--served-model-name": "Qwen/Qwen3.6-27B",
        "--tp-size": "2",
        "--enable-metrics": "",
        "--context-length": "5",
        "--trust-remote-code": "",
    }


def test_how_vllm_is_started() -> None:
    made = command(
        "vllm",
        serve={"served_model_name": "qwen", "address": "0.0.0.0"},
        model={"draft": {"repo": "a/b", "revision": "1" * 40}},
        flags={"speculative-config": {"num_speculative_tokens": 3}},
    )
    assert made.argv[:3] == ("/opt/reconcile/env/abc/bin/vllm", "serve", PLACE.weights_dir)
    given = _pairs(made.argv[3:])
    assert given["--tensor-parallel-size"] == "2"
    assert given["--served-model-name"] == "qwen"
    assert given["--speculative-config"] == '{"model": "/models/draft", "num_speculative_tokens": 3}'


def test_how_transformers_is_started() -> None:
    argv = command("transformers").argv
    assert argv[:3] == ("/opt/reconcile/env/abc/bin/transformers", "serve", PLACE.weights_dir)
    assert _pairs(argv[3:]) == {"--host": "127.0.0.1", "--port": "30000", "--device": "auto"}
    bare = Place("/e", "/w", "", "/c", ())
    assert _pairs(command("transformers", bare).argv[3:])["--device"] == "cpu"
    assert _pairs(command("transformers", bare, flags={"device": "cuda:1"}).argv[3:])["--device"] == "cuda:1"


def _pairs(argv: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    name = ""
    for part in argv:
        if part.startswith("--"):
            name = part
            pairs[name] = ""
        else:
            pairs[name] = part
    return pairs


@pytest.mark.parametrize("name", sorted(VERSIONS))
def test_no_secret_is_in_an_argument_or_a_variable_that_is_shown(name: str) -> None:
    made = command(name, serve={"api_key": {"secret": "key"}, "env": {"A": "1", "B": {"secret": "other"}}})
    assert made.secrets["B"] == "other"
    assert made.environment["A"] == "1"
    assert "B" not in made.environment
    assert "key" not in made.argv
    assert "key" not in made.environment.values()
    if name != "transformers":  # which has no key at all, and says so
        assert "key" in made.secret_names
    else:
        use = server(name, VERSIONS[name], serve={"api_key": {"secret": "key"}})
        (fault,) = engine(name).resolve(use, None, 1).faults
        assert fault.where == ("serve", "api_key")


def test_sglangs_key_is_in_its_config_file_whatever_is_in_it() -> None:
    made = command("sglang", serve={"api_key": {"secret": "key"}})
    assert made.argv[made.argv.index("--config") + 1] == PLACE.config
    assert made.config_text({"key": 'a"b: #c'}) == 'api-key: "a\\"b: #c"\n'
    with pytest.raises(KeyError):
        made.config_text({})
    assert not command("sglang").has_config


@pytest.mark.parametrize("name", sorted(VERSIONS))
def test_what_is_compiled_stays_with_the_environment_and_its_gpus(name: str) -> None:
    made = command(name).environment
    assert made["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert made["CUDA_HOME"] == "/usr/local/cuda-12.8"
    assert made["PATH"].split(":")[:2] == ["/opt/reconcile/env/abc/bin", "/usr/local/cuda-12.8/bin"]
    for variable in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME", "FLASHINFER_WORKSPACE_BASE"):
        assert made[variable].startswith(PLACE.env_dir)
    assert made["HF_HUB_OFFLINE"] == "1"
    assert command(name, serve={"env": {"HOME": "/root"}}).environment["HOME"] == "/root"


@pytest.mark.parametrize("name", sorted(VERSIONS))
def test_exactly_one_version_is_installed(name: str) -> None:
    use = server(name, VERSIONS[name], with_engine={"requirements": ["numpy==2.1"]})
    for arch in ("x86_64", "aarch64"):
        needed = engine(name).requirements(use, arch)
        assert needed.lines[0].endswith(f"=={VERSIONS[name]}")
        assert needed.lines[-1] == "numpy==2.1"
        assert (needed.version, needed.python) == (VERSIONS[name], "3.12")


def test_restarts_fit_the_exit_codes() -> None:
    assert engine("vllm").restart.policy == "always"  # it exits with 0 when its engine dies
    assert 2 in engine("vllm").restart.prevent
    assert {1, 2} <= set(engine("sglang").restart.prevent)
    assert 137 not in engine("sglang").restart.prevent
    assert 143 in engine("transformers").restart.success


def test_tensor_parallel_auto_is_the_number_of_gpus() -> None:
    assert tensor_parallel(server(), 2) == 2
    assert tensor_parallel(server(), 0) == 1
    assert tensor_parallel(server(serve={"tensor_parallel": 4}), 2) == 4


def test_a_start_has_time_for_its_weights() -> None:
    assert startup_seconds(0) > 130 * 2
    assert startup_seconds(52_000_000_000) == pytest.approx(300 + 260)


@pytest.mark.parametrize(
    ("name", "line", "code"),
    [
        ("sglang", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "no-cache-memory"),
        (
            "sglang",
            "ImportError: [sgl_kernel] CRITICAL: Could not load any common_ops library!",
            "kernels-do-not-load",
        ),
        ("sglang", "launch_server.py: error: ambiguous option: --pp could match --pp-size", "flag-refused"),
        ("sglang", "ValueError: Unknown speculative algorithm name: FOO", "unknown-algorithm"),
        ("sglang", "[Errno 98] error while attempting to bind on address ('0.0.0.0', 30000)", "port-taken"),
        ("sglang", "Subprocess scheduler_0 crashed with exit code -9", "child-died"),
        ("sglang", "CUDA error: no kernel image is available for execution on the device", "no-kernel-image"),
        ("vllm", "ValueError: No available memory for the cache blocks. Try", "no-cache-memory"),
        ("vllm", "ValueError: To serve at least one request with the model's max seq len (5)", "context-too-long"),
        ("vllm", "FileNotFoundError: Weight files referenced in index but missing: {'a'}", "weights-damaged"),
        ("vllm", "SafetensorError: Error: incomplete metadata, file not fully covered", "weights-damaged"),
        ("vllm", "KeyError: 'invalid tool call parser: qwen4 (chose from {})'", "unknown-parser"),
        (
            "vllm",
            "Total number of attention heads (4) must be divisible by tensor parallel size (3).",
            "heads-not-divisible",
        ),
        ("vllm", "OSError: [Errno 98] Address already in use", "port-taken"),
        ("vllm", "OSError: [Errno 28] No space left on device", "disk-full"),
        ("transformers", "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'", "no-ninja"),
    ],
)
def test_a_log_tells_its_cause(name: str, line: str, code: str) -> None:
    (found,) = causes_in(engine(name).causes, ["INFO all is well", line, "INFO bye"])
    assert (found.cause.code, found.line) == (code, line)
    assert found.cause.todo
    assert found.cause.source


def test_a_log_that_tells_nothing_has_no_cause() -> None:
    said = ["INFO: The server is fired up and ready to roll!", "decode batch, accept len: 2.53, accept rate: 0.51"]
    for found in engines().values():
        assert causes_in(found.causes, said) == ()


def test_the_most_telling_line_comes_first() -> None:
    log = ["torch.OutOfMemoryError: CUDA out of memory.", "Subprocess scheduler_0 crashed with exit code -9"]
    assert [found.cause.code for found in causes_in(engine("sglang").causes, log)] == [
        "cuda-out-of-memory",
        "child-died",
    ]


DENSE = ("Qwen3_5ForConditionalGeneration",)
MOE = ("Qwen3_5MoeForConditionalGeneration",)


@pytest.mark.parametrize(
    ("version", "repo", "architectures", "gpus", "bad"),
    [
        ("0.5.9", "Qwen/Qwen3.6-27B", DENSE, 2, True),
        ("0.5.9", "Qwen/Qwen3.6-27B", DENSE, 1, False),
        ("0.5.9", "Qwen/Qwen3.6-27B", MOE, 2, False),
        ("0.5.11", "Qwen/Qwen3.6-27B", DENSE, 2, False),
        ("0.5.9", "Qwen/Qwen3.6-27B", None, 2, True),
        ("0.5.9", "Qwen/Qwen3.5-9B-FP8", None, 2, True),
        ("0.5.9", "Qwen/Qwen3.5-35B-A3B", None, 2, False),
        ("0.5.9", "Qwen/Qwen3-32B", None, 2, False),
        ("0.5.9", "me/fine-tuned", DENSE, 4, True),
    ],
)
def test_what_is_known_bad(
    version: str, repo: str, architectures: tuple[str, ...] | None, gpus: int, bad: bool
) -> None:
    use = server("sglang", version, model={"repo": repo})
    found = known_bad(engine("sglang"), use, architectures, gpus)
    assert (found is not None) is bad
    assert found is None or (found.source and found.fixed == "0.5.10")


def test_validate_warns_of_it() -> None:
    (warning,) = warnings(server("sglang", "0.5.9"), 2)
    assert "sglang#19070" in warning.says
    assert warning.todo == "write version: 0.5.10 or later"
    assert list(warnings(server("sglang", "0.5.9"), 1)) == []
