"""config.json of models, as far as memory depends on it: dimensions as published in the models' own repositories."""

from typing import Any


def qwen3_32b() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "sliding_window": None,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    }


def llama_70b() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    }


def deepseek_v3() -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 163840,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8"},
        "vocab_size": 129280,
    }


def gpt_oss_120b() -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "max_position_embeddings": 131072,
        "vocab_size": 201088,
    }


def hybrid(
    architecture: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    value_heads: int,
) -> dict[str, Any]:
    """A model of three layers of linear attention and one of full attention, over and over, that sees."""
    return {
        "architectures": [architecture],
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 256,
            "full_attention_interval": 4,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
            "linear_num_key_heads": 16,
            "linear_num_value_heads": value_heads,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
            "max_position_embeddings": 262144,
            "dtype": "bfloat16",
            "vocab_size": 248320,
        },
        "vision_config": {"depth": 27, "num_heads": 16, "hidden_size": 1152},
    }


def qwen_27b() -> dict[str, Any]:
    """Qwen3.5-27B and Qwen3.6-27B."""
    return hybrid("Qwen3_5ForConditionalGeneration", 64, 5120, 24, 4, 48)


def qwen_122b() -> dict[str, Any]:
    """Qwen3.5-122B-A10B."""
    return hybrid("Qwen3_5MoeForConditionalGeneration", 48, 3072, 32, 2, 64)


def qwen_35b() -> dict[str, Any]:
    """Qwen3.5-35B-A3B."""
    return hybrid("Qwen3_5MoeForConditionalGeneration", 40, 2048, 16, 2, 32)


def qwen3_next() -> dict[str, Any]:
    """Qwen3-Next-80B-A3B, whose file leaves the dimensions of its linear attention to the class."""
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
        "vocab_size": 151936,
    }


def tiny() -> dict[str, Any]:
    """The model that was served on an H200 with SGLang 0.5.11."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
    }
