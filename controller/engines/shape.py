"""What of a model's config.json decides how much memory it takes: its layers and their heads.

How the figures follow from the config was read in SGLang 0.5.11 and 0.5.23 (``configs/model_config.py``,
``configs/mamba_utils.py``, ``configs/qwen3_next.py``, ``model_executor/pool_configurator.py``) and vLLM 0.33.0
(``v1/kv_cache_interface.py``), and holds on a GPU to the byte: SGLang 0.5.11 on an H200 reported 512 bytes of keys a
token for 2 layers of 2 heads of 64, as this says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_OTHER_STATE = (
    "hybrid_override_pattern",  # Nemotron-H
    "attn_layer_period",  # Jamba
    "mamba_d_state",  # Falcon-H1, Bamba
    "mamba_d_ssm",
    "ssm_cfg",  # Mamba
    "linear_attn_config",  # Kimi Linear
    "attn_type_list",  # MiniMax
    "mamba_num_heads",
)
_PERIODS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}  # of sliding layers, each last one full
_ALWAYS_SLIDING = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
_NEXT = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}  # what Qwen3-Next's config class gives where the file does not say (SGLang 0.5.23, configs/qwen3_next.py)


class NotForetold(Exception):  # noqa: N818 - it says what is not known
    """How much memory something takes cannot be told; the message says why."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Layers of linear attention: a state for each request in place of keys and values for each token."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    state_bytes: int

    def bytes_per_request(self, split: int) -> int:
        """The states of one request on one GPU (SGLang 0.5.11, configs/mamba_utils.py: conv in two bytes)."""
        convolved = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        convolution = convolved // split * (self.kernel - 1) * 2
        recurrent = self.value_heads // split * self.value_dim * self.key_dim * self.state_bytes
        return (convolution + recurrent) * self.layers

    def how(self, split: int) -> str:
        """The same, as a person reckons it."""
        convolved = f"(2 x {self.key_heads} x {self.key_dim} + {self.value_heads} x {self.value_dim}) / {split}"
        recurrent = f"{self.value_heads} / {split} x {self.value_dim} x {self.key_dim} x {self.state_bytes} bytes"
        return f"({convolved} x {self.kernel - 1} x 2 bytes + {recurrent}) x {self.layers} layers"


@dataclass(frozen=True, slots=True)
class Shape:
    """A model by what takes memory and what has to be divided over GPUs. Dimensions are in elements.

    ``full`` and ``sliding`` are numbers of layers that keep keys and values of every token and of the last
    ``window`` tokens. ``latent`` is what MLA keeps of a token in place of heads, 0 for other models.
    ``drafting`` is the number of layers that draft for speculative decoding (MTP). ``width`` is the bytes of an
    element as the model computes. ``vision_heads`` is 0 for a model of text only.
    """

    architecture: str
    full: int
    sliding: int
    window: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    latent: int
    linear: Linear | None
    drafting: int
    max_context: int
    width: int
    vision_heads: int
    vision_hidden: int

    @property
    def layers(self) -> int:
        """All layers of attention."""
        return self.full + self.sliding + (self.linear.layers if self.linear else 0)

    @property
    def sees(self) -> bool:
        """Whether it takes images."""
        return self.vision_heads > 0

    def bytes_per_layer(self, split: int, element: float) -> float:
        """Keys and values of one token in one layer on one GPU; heads are copied where there are fewer than GPUs."""
        if self.latent:
            return self.latent * element  # each GPU has all of it
        return max(1, self.kv_heads // split) * (self.head_dim + self.value_dim) * element

    def kv_bytes(self, split: int, element: float) -> int:
        """Keys and values of one token on one GPU in the layers that keep every token's."""
        return round(self.full * self.bytes_per_layer(split, element))

    def kv_how(self, split: int, element: float) -> str:
        """Bytes of a token, as a person reckons them."""
        layers = f"{self.full} layers" + (
            f", and {self.sliding} that keep {self.window:,} tokens" if self.sliding else ""
        )
        if self.latent:
            return f"{self.latent} elements x {element:g} bytes x {layers}, on each GPU"
        heads = max(1, self.kv_heads // split)
        of = f"{heads} of {self.kv_heads} heads" if split > 1 else f"{heads} heads"
        return f"{of} x ({self.head_dim} + {self.value_dim}) x {element:g} bytes x {layers}"

    def sliding_bytes(self, split: int, element: float) -> int:
        """The same of the layers that keep the last ``window`` tokens only."""
        return round(self.sliding * self.bytes_per_layer(split, element))

    def draft_bytes(self, split: int, element: float) -> int:
        """The same of the layers that draft."""
        return round(self.drafting * self.bytes_per_layer(split, element))

    def undivided(self, split: int) -> tuple[str, ...]:
        """What does not divide over so many GPUs, in words; engines refuse to start then."""
        parts = [("attention heads", self.heads), ("heads of the vision tower", self.vision_heads)]
        if self.linear:
            parts += [
                ("key heads of linear attention", self.linear.key_heads),
                ("value heads of linear attention", self.linear.value_heads),
            ]
        wrong = [f"{number} {what}" for what, number in parts if number % split]
        if self.kv_heads > split and self.kv_heads % split:
            wrong.append(f"{self.kv_heads} key-value heads")
        return tuple(wrong)

    def splits(self, most: int) -> tuple[int, ...]:
        """The numbers of GPUs up to ``most`` that it divides over."""
        return tuple(split for split in range(1, most + 1) if not self.undivided(split))


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Read config.json.

    Raises:
        NotForetold: it has layers of a kind that this does not know, or lacks what all models have.
    """
    text = config.get("text_config")
    text = {**config, **text} if isinstance(text, Mapping) else config
    try:
        shape = _shape(config, text)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError, AttributeError) as error:
        raise NotForetold(f"its config.json cannot be understood: {error!r}") from None
    if not _is_possible(shape):
        raise NotForetold("its config.json has numbers that no model has")
    return shape


def _is_possible(shape: Shape) -> bool:
    """Whether all that is divided by is there, and nothing is negative."""
    linear = shape.linear
    parts = [shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim]
    others = [shape.full, shape.sliding, shape.window, shape.latent, shape.drafting, shape.max_context]
    if linear is not None:
        parts += [linear.key_heads, linear.value_heads, linear.key_dim, linear.value_dim, linear.kernel]
    others += [shape.vision_heads, shape.vision_hidden]
    return min(parts) > 0 and min(others) >= 0 and max(*parts, *others) < 1 << 40


def _shape(config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    odd = next((key for key in _OTHER_STATE if text.get(key)), None)
    if odd is not None:
        raise NotForetold(f"its config has {odd}: layers of a kind whose memory is not known here")
    hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    head_dim = int(text.get("head_dim") or hidden // heads)
    full, sliding, linear = _layers(text)
    vision = config.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    return Shape(
        architecture=next(iter(config.get("architectures") or ()), ""),
        full=full,
        sliding=sliding,
        window=int(text.get("sliding_window") or 0) if sliding else 0,
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        value_dim=int(text.get("v_head_dim") or head_dim),
        latent=int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"]) if text.get("kv_lora_rank") else 0,
        linear=_linear(text, linear) if linear else None,
        drafting=int(text.get("mtp_num_hidden_layers") or text.get("num_nextn_predict_layers") or 0),
        max_context=int(text.get("max_position_embeddings") or 0),
        width=_width(config, text),
        vision_heads=int(vision.get("num_heads") or vision.get("num_attention_heads") or 0),
        vision_hidden=int(vision.get("hidden_size") or 0),
    )


def _width(config: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    named = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return max(2, _BYTES.get(str(named), 2)) if str(named) != "float32" else 2  # engines serve float32 in 16 bits


def _layers(text: Mapping[str, Any]) -> tuple[int, int, int]:
    """How many layers have full, sliding and linear attention."""
    number = int(text["num_hidden_layers"])
    kinds = text.get("layer_types")
    if kinds:
        return _named(list(map(str, kinds)))
    interval = text.get("full_attention_interval") or (_is_next(text) and _NEXT["full_attention_interval"])
    if interval or text.get("linear_num_value_heads"):
        full = number // int(interval or _NEXT["full_attention_interval"])
        return full, 0, number - full
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return number, 0, 0
    kind = str(text.get("model_type", ""))
    period = int(text.get("sliding_window_pattern") or _PERIODS.get(kind, 0))
    if period:
        return number // period, number - number // period, 0
    if kind in _ALWAYS_SLIDING:
        return 0, number, 0
    return number, 0, 0  # what is not known to slide is counted in full, which is never too little


def _is_next(text: Mapping[str, Any]) -> bool:
    return str(text.get("model_type", "")) == "qwen3_next"


def _named(kinds: list[str]) -> tuple[int, int, int]:
    known = {
        "full_attention": 0,
        "attention": 0,
        "global_attention": 0,
        "sliding_attention": 1,
        "linear_attention": 2,
    }
    strange = sorted({kind for kind in kinds if kind not in known})
    if strange:
        raise NotForetold(f"its config has layers of kind {', '.join(strange)}, whose memory is not known here")
    counts = [0, 0, 0]
    for kind in kinds:
        counts[known[kind]] += 1
    return counts[0], counts[1], counts[2]


def _linear(text: Mapping[str, Any], layers: int) -> Linear:
    given = {**_NEXT, **text} if _is_next(text) else text
    state = str(text.get("mamba_ssm_dtype") or "float32")
    return Linear(
        layers=layers,
        key_heads=int(given["linear_num_key_heads"]),
        value_heads=int(given["linear_num_value_heads"]),
        key_dim=int(given["linear_key_head_dim"]),
        value_dim=int(given["linear_value_head_dim"]),
        kernel=int(given["linear_conv_kernel_dim"]),
        state_bytes=_BYTES.get(state, 4),
    )
