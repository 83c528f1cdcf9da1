"""What a model takes, against figures that were worked out from the models' configs, and that engines reported."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.engines.fit import Model, Outcome
from controller.engines.registry import engine
from controller.engines.shape import NotForetold, shape_of
from tests.plugins import configs
from tests.plugins.servers import server

Config = Callable[[], dict[str, Any]]


@pytest.mark.parametrize(
    ("config", "one", "two"),
    [
        (configs.qwen3_32b, 262144, 131072),
        (configs.llama_70b, 327680, 163840),
        (configs.deepseek_v3, 70272, 70272),  # MLA: each GPU has all of it
        (configs.gpt_oss_120b, 36864, 18432),  # of the layers that keep all tokens
        (configs.qwen_27b, 65536, 32768),
        (configs.qwen_122b, 24576, 12288),
        (configs.qwen_35b, 20480, 10240),
        (configs.qwen3_next, 24576, 12288),
    ],
)
def test_keys_and_values_of_a_token(config: Config, one: int, two: int) -> None:
    shape = shape_of(config())
    assert (shape.kv_bytes(1, 2), shape.kv_bytes(2, 2)) == (one, two)


@pytest.mark.parametrize(
    ("config", "one", "two"),
    [(configs.qwen_27b, 153.9, 77.0), (configs.qwen_122b, 153.6, 76.8), (configs.qwen_35b, 64.4, 32.2)],
)
def test_states_of_a_request(config: Config, one: float, two: float) -> None:
    linear = shape_of(config()).linear
    assert linear is not None
    assert linear.bytes_per_request(1) / 1e6 == pytest.approx(one, abs=0.05)
    assert linear.bytes_per_request(2) / 1e6 == pytest.approx(two, abs=0.05)


def test_a_real_engine_reported_as_many_bytes() -> None:
    # SGLang 0.5.11 on an H200: 29117299 tokens, 13.88 GiB of keys and as much of values, in bfloat16
    shape = shape_of(configs.tiny())
    assert shape.kv_bytes(1, 2) == 2 * 512
    assert 29117299 * shape.kv_bytes(1, 2) / 2**30 == pytest.approx(2 * 13.88, abs=0.01)
    # vLLM 0.32.0 on a CPU, same kind of model with 1 GiB for its cache: 8192 blocks of 128 tokens
    assert 8192 * 128 * shape.kv_bytes(1, 2) == 2**30


def test_sliding_layers_keep_a_window() -> None:
    shape = shape_of(configs.gpt_oss_120b())
    assert (shape.full, shape.sliding, shape.window) == (18, 18, 128)
    assert shape.sliding_bytes(1, 2) == 36864


def test_what_slides_without_a_list_of_layers() -> None:
    gemma = {"model_type": "gemma3_text", "sliding_window": 1024}
    assert _layers(**gemma, num_hidden_layers=26) == (4, 22)
    assert _layers(model_type="mistral", sliding_window=4096) == (0, 32)
    assert _layers(model_type="qwen2", sliding_window=4096, use_sliding_window=False) == (32, 0)
    assert _layers(model_type="who-knows", sliding_window=4096) == (32, 0)


def _layers(**more: Any) -> tuple[int, int]:
    shape = shape_of({"num_hidden_layers": 32, "hidden_size": 64, "num_attention_heads": 4, **more})
    return shape.full, shape.sliding


def test_heads_have_to_divide() -> None:
    shape = shape_of(configs.qwen_27b())
    assert shape.splits(24) == (1, 2, 4, 8)
    assert shape.undivided(3) == (
        "16 heads of the vision tower",
        "16 key heads of linear attention",
        "4 key-value heads",
    )
    assert shape.undivided(8) == ()


def test_heads_are_copied_where_there_are_fewer_than_gpus() -> None:
    shape = shape_of(configs.qwen_122b())  # two key-value heads
    assert shape.undivided(4) == ()
    assert shape.kv_bytes(4, 2) == shape.kv_bytes(2, 2)


@pytest.mark.parametrize(
    "odd",
    [
        {"hybrid_override_pattern": "M-M-*"},
        {"mamba_d_state": 128},
        {"layer_types": ["full_attention", "crystal_attention"]},
        {"hidden_size": None},
        {"num_attention_heads": 0, "head_dim": None},
        {"num_hidden_layers": "many"},
    ],
)
def test_what_is_not_understood_is_said(odd: dict[str, Any]) -> None:
    with pytest.raises(NotForetold):
        shape_of({**configs.qwen3_32b(), **odd})
    with pytest.raises(NotForetold):
        shape_of({})


PARTS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 1 << 70),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.sampled_from(["full_attention", "linear_attention", "sliding_attention"]), max_size=4),
)


@given(
    which=st.sampled_from([configs.qwen_27b, configs.deepseek_v3, configs.gpt_oss_120b, configs.llama_70b]),
    changes=st.dictionaries(
        st.sampled_from(sorted({*configs.qwen_27b()["text_config"], *configs.deepseek_v3()})), PARTS
    ),
    engine_name=st.sampled_from(["sglang", "vllm", "transformers"]),
    gpus=st.lists(st.integers(0, 1 << 40), max_size=3),
)
@settings(deadline=None)
def test_no_config_makes_anybody_stumble(
    which: Config, changes: dict[str, Any], engine_name: str, gpus: list[int]
) -> None:
    config = which()
    target = config.get("text_config", config)
    target.update(changes)
    use = server(engine_name, {"sglang": "0.5.23", "vllm": "0.33.0", "transformers": "5.24.0"}[engine_name])
    try:
        found = engine(engine_name).fit(use, None, Model(shape_of(config), 10**10), None, gpus)
    except NotForetold:
        return
    assert (found.outcome is Outcome.REFUSES) <= bool(found.problems)
