"""Whether it fits: the sums of the engines, on the story's cards and on one that was measured."""

import re
from typing import Any

import pytest

from controller.engines.fit import GIB, Fit, Model, NotForetold, Outcome
from controller.engines.registry import engine
from controller.engines.shape import shape_of
from tests.plugins import configs
from tests.plugins.servers import A6000, QWEN_27B, STORY, server

BUFFERED = {**STORY, "mamba-scheduler-strategy": "extra_buffer", "max-running-requests": 6}


def fit(
    name: str = "sglang",
    version: str = "0.5.11",
    flags: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    weights: int = QWEN_27B,
    gpus: tuple[int, ...] = (A6000, A6000),
    draft: Model | None = None,
    **more: Any,
) -> Fit:
    use = server(name, version, {k: v if v is True else str(v) for k, v in (flags or {}).items()}, **more)
    model = Model(shape_of(config or configs.qwen_27b()), weights)
    return engine(name).fit(use, engine(name).shipped_flags(version), model, draft, gpus)


def codes(found: Fit) -> list[str]:
    return [problem.code for problem in found.problems]


# The story


def test_the_storys_context_does_not_fit_and_sglang_starts_all_the_same() -> None:
    found = fit(flags=BUFFERED)
    assert (found.split, found.context) == (2, 262144)
    assert (found.kv_token, found.state_request) == (32768, 76972032)
    assert found.outcome is Outcome.SHORT
    assert found.pool_tokens is not None
    assert 80_000 < found.pool_tokens < 262144
    assert not found.problems


def test_the_storys_flags_alone_are_doubtful_and_the_sum_says_what_to_write() -> None:
    found = fit(flags=STORY)
    assert found.outcome is Outcome.DOUBTFUL
    assert codes(found) == ["speculation-needs-extra-buffer", "states-too-big"]
    assert found.pool_tokens is not None
    assert 131072 <= found.pool_tokens < 262144
    # ...and what is to be written makes it start
    assert "mamba-scheduler-strategy: extra_buffer" in found.problems[0].todo
    assert "max-running-requests: 6" in found.problems[1].todo
    assert fit(flags=BUFFERED).outcome is Outcome.SHORT


def test_later_versions_share_memory_between_states_and_tokens() -> None:
    found = fit(version="0.5.23", flags=STORY)
    assert found.outcome is Outcome.SHORT
    assert not found.problems
    assert found.requests is not None
    assert 0 < found.requests < 48


def test_vllm_refuses_where_one_request_does_not_fit() -> None:
    flags = {"max-model-len": 262144, "gpu-memory-utilization": 0.7}
    found = fit("vllm", "0.33.0", flags)
    assert found.outcome is Outcome.REFUSES
    assert codes(found) == ["context-too-long"]
    # with what its message says it starts
    length = int(found.problems[0].todo.split("max-model-len: ")[1].split()[0])
    assert 0 < length < 262144
    assert fit("vllm", "0.33.0", {**flags, "max-model-len": length}).outcome is not Outcome.REFUSES


def test_vllm_at_its_default_has_room_for_the_storys_context() -> None:
    found = fit("vllm", "0.33.0", {"max-model-len": "256K"})
    assert found.context == 262144
    assert found.outcome is Outcome.FITS


# What was measured


def test_sglangs_pool_on_an_h200() -> None:
    # SGLang 0.5.11, --mem-fraction-static 0.2, 143771 MiB by nvidia-smi: "#tokens: 29117299"
    found = fit(flags={"mem-fraction-static": 0.2}, config=configs.tiny(), weights=2_000_000, gpus=(143771 << 20,))
    assert found.outcome is Outcome.FITS
    assert found.pool_tokens == pytest.approx(29117299, rel=0.01)


# Each engine's rules


def test_the_sum_adds_up() -> None:
    for found in (fit(flags=BUFFERED), fit(version="0.5.23", flags=STORY), fit(flags={"context-length": 4096})):
        *parts, pool = [line.bytes for line in found.lines if line.bytes is not None]
        assert sum(parts) == pool
        assert found.pool_tokens == pool // found.kv_token


def test_what_a_note_promises_comes_true() -> None:
    found = fit(flags=BUFFERED)
    (note,) = found.notes
    ratio = note.split("mamba-full-memory-ratio: ")[1].split()[0]
    promised = int(note.split("room for ")[1].split()[0].replace(",", ""))
    better = fit(flags={**BUFFERED, "mamba-full-memory-ratio": ratio})
    assert better.requests == found.requests == 6
    assert better.pool_tokens == pytest.approx(promised, rel=0.03)
    assert promised > (found.pool_tokens or 0)


def test_the_bytes_of_a_token_and_a_request_can_be_checked_by_hand() -> None:
    for config in (configs.qwen_27b(), configs.qwen3_32b(), configs.deepseek_v3()):
        found = fit(version="0.5.23", config=config, gpus=(141 * GIB,) * 8)
        assert _worth(found.kv_how) == found.kv_token
        assert not found.state_request or _worth(found.state_how) == found.state_request


def _worth(how: str) -> float:
    """What an expression of the report is worth."""
    plain = re.sub(r" of \d+ heads| heads| elements| bytes| layers|, on each GPU", "", how)
    return float(eval(plain.replace(" x ", " * "), {"__builtins__": {}}))


def test_copies_for_drafts_are_in_the_sum() -> None:
    four = fit(version="0.5.23", flags=STORY)
    none = fit(version="0.5.23", flags={"context-length": 262144})
    line = next(line for line in four.lines if line.what == "copies of states for drafts")
    assert line.bytes is not None
    assert four.requests is not None
    assert -line.bytes == 76972032 * (four.requests + 1) * 4
    assert not [line for line in none.lines if line.what == "copies of states for drafts"]


def test_narrower_keys_and_values_make_twice_the_room() -> None:
    wide, narrow = (
        fit(config=configs.qwen3_32b()),
        fit(config=configs.qwen3_32b(), flags={"kv-cache-dtype": "fp8_e4m3"}),
    )
    assert narrow.kv_token * 2 == wide.kv_token
    assert narrow.pool_tokens == pytest.approx(2 * (wide.pool_tokens or 0), abs=2)


def test_sliding_layers_take_a_part_of_the_pool() -> None:
    found = fit(config=configs.gpt_oss_120b(), weights=65 * GIB, gpus=(80 * GIB, 80 * GIB))
    assert found.kv_token == round(18432 + 0.8 * 18432)
    apart = fit(
        config=configs.gpt_oss_120b(),
        weights=65 * GIB,
        gpus=(80 * GIB, 80 * GIB),
        flags={"disable-hybrid-swa-memory": True},
    )
    assert apart.kv_token == 2 * 18432


def test_a_latent_cache_is_not_divided() -> None:
    found = fit(config=configs.deepseek_v3(), weights=688_600_000_000, gpus=(141 * GIB,) * 8)
    assert found.kv_token == 70272
    assert found.outcome is Outcome.FITS


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_weights_that_are_more_than_the_gpus_have(name: str) -> None:
    found = fit(name, "0.33.0" if name == "vllm" else "0.5.11", gpus=(24 * GIB, 24 * GIB))
    assert found.outcome is Outcome.REFUSES
    assert "no-cache-memory" in codes(found)


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_heads_that_do_not_divide(name: str) -> None:
    found = fit(name, "0.33.0" if name == "vllm" else "0.5.11", gpus=(A6000,) * 3)
    assert found.outcome is Outcome.REFUSES
    assert codes(found)[0] == "heads-not-divisible"
    assert "1, 2" in found.problems[0].todo


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_more_parts_than_gpus(name: str) -> None:
    found = fit(name, "0.33.0" if name == "vllm" else "0.5.11", serve={"tensor_parallel": 4})
    assert found.outcome is Outcome.REFUSES
    assert "too-few-gpus" in codes(found)


def test_the_smallest_gpu_counts() -> None:
    assert fit(flags=BUFFERED, gpus=(80 * GIB, A6000)).pool_tokens == fit(flags=BUFFERED).pool_tokens


def test_a_draft_model_takes_memory_too() -> None:
    draft = Model(shape_of(configs.tiny()), 6 * GIB)
    alone, both = fit("vllm", "0.33.0"), fit("vllm", "0.33.0", draft=draft)
    assert both.weights == alone.weights + 3 * GIB
    assert both.kv_token > alone.kv_token
    assert "of the draft model" in both.kv_how
    found = fit(flags={**BUFFERED, "speculative-algorithm": "EAGLE3"}, draft=Model(draft.shape, 60 * GIB))
    assert "draft-does-not-fit" in codes(found)


def test_transformers_spreads_whole_layers() -> None:
    found = fit("transformers", "5.24.0")
    assert found.outcome is Outcome.FITS
    assert found.pool_tokens is None
    assert fit("transformers", "5.24.0", gpus=(A6000,)).outcome is Outcome.REFUSES


@pytest.mark.parametrize(
    ("name", "flags", "gpus"),
    [
        ("sglang", {}, ()),
        ("sglang", {}, (0, 0)),
        ("sglang", {"pp-size": 2}, (A6000, A6000)),
        ("sglang", {"nnodes": 2}, (A6000, A6000)),
        ("sglang", {"cpu-offload-gb": 8}, (A6000, A6000)),
        ("sglang", {"device": "cpu"}, (A6000, A6000)),
        ("vllm", {}, ()),
        ("vllm", {"pipeline-parallel-size": 2}, (A6000, A6000)),
        ("transformers", {}, ()),
        ("external", {}, (A6000,)),
    ],
)
def test_what_cannot_be_foretold_is_not_guessed(name: str, flags: dict[str, Any], gpus: tuple[int, ...]) -> None:
    version = {"sglang": "0.5.11", "vllm": "0.33.0"}.get(name, "5.24.0")
    with pytest.raises(NotForetold):
        fit(name, version, flags, gpus=gpus)
