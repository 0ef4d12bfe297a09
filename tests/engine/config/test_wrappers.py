"""Configurations of models that read images, as they are published: which text model is inside."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.query_scaling import QueryScaling
from lockstep.engine.errors import ConfigError

#: google/gemma-3-4b-it, which leaves its heads and its vocabulary to the class.
GEMMA: dict[str, Any] = {
    "model_type": "gemma3", "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}  # fmt: skip
#: Qwen/Qwen2.5-VL-7B-Instruct, which has no text_config.
QWEN: dict[str, Any] = {
    "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 32768, "use_sliding_window": False,
    "max_window_layers": 28, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 151645,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_config": {"hidden_size": 1280},
}  # fmt: skip
#: mistralai/Ministral-3-8B-Base-2512
MINISTRAL: dict[str, Any] = {
    "model_type": "mistral3", "dtype": "bfloat16", "vision_config": {}, "text_config": {
        "model_type": "ministral3", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
        "max_position_embeddings": 262144, "tie_word_embeddings": False, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
}  # fmt: skip


def test_what_a_text_config_leaves_out_is_the_class_s() -> None:
    model = ModelConfig.from_hf(GEMMA)
    assert (model.family, model.wrapper, model.tie_embeddings) == ("gemma3_text", "gemma3", True)
    assert (model.num_heads, model.num_kv_heads, model.head_dim, model.vocab_size) == (8, 4, 256, 262_208)
    assert (model.dtype, model.eos_ids) == ("bfloat16", (1, 106))


def test_a_config_without_a_text_config_is_the_text_model_s() -> None:
    model = ModelConfig.from_hf(QWEN)
    assert (model.family, model.wrapper, model.qkv_bias, model.tie_embeddings) == (
        "qwen2", "qwen2_5_vl", True, False,
    )  # fmt: skip
    assert (model.rope_theta, model.rope_scaling.kind, set(model.windows)) == (1e6, "none", {None})
    assert ModelConfig.from_hf(QWEN | {"tie_word_embeddings": True}).tie_embeddings


def test_queries_are_scaled_beyond_the_context_that_was_stretched() -> None:
    model = ModelConfig.from_hf(MINISTRAL)
    assert (model.family, model.max_position, model.context) == ("mistral", 262_144, 262_144)
    assert model.query_scaling == QueryScaling(0.1, 16_384)
    assert (model.rope_scaling.kind, set(model.windows), model.rms_eps) == ("yarn", {None}, 1e-5)
    assert not model.tie_embeddings, "as its text_config states, where config.json itself does not"


def test_the_head_is_tied_as_config_json_states_before_text_config() -> None:
    inner = GEMMA["text_config"] | {"tie_word_embeddings": True}
    assert not ModelConfig.from_hf(
        GEMMA | {"text_config": inner, "tie_word_embeddings": False}
    ).tie_embeddings


def test_kimi_k2_is_read_as_deepseek_v3() -> None:
    sizes = {
             "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "vocab_size": 99, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
             "kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    }  # fmt: skip
    ours, theirs = (ModelConfig.from_hf(sizes | {"model_type": name}) for name in ("kimi_k2", "deepseek_v3"))
    assert ours == theirs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, r"text_config is None: expected an object, where the text model of gemma3"),
        ({"text_config": {"model_type": "mamba2"}}, r"text_config: model_type is 'mamba2': not a supported"),
        (
            {"text_config": GEMMA["text_config"] | {"quantization_config": {"quant_method": "awq"}}},
            r"text_config: quantization_config",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config is .*awq"),
        (
            {"text_config": GEMMA["text_config"] | {"hidden_size": "big"}},
            r"text_config: hidden_size is 'big'",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(GEMMA | changes)
