"""What configurations are refused, and how."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.engine.config import EngineConfig, ModelConfig, check_fit
from lockstep.engine.errors import ConfigError
from tests.checkpoints import OWN, SIZES

LLAMA = SIZES | OWN["llama"] | {"model_type": "llama"}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt2"}, r"model_type is 'gpt2': not a supported .*qwen2, qwen3, llama, mistral"),
    ({"model_type": None}, r"model_type is missing"),
    ({"hidden_act": "relu"}, r"hidden_act is 'relu': .*silu"),
    ({"hidden_size": None}, r"hidden_size is missing"),
    ({"hidden_size": "64"}, r"hidden_size is '64': expected a whole number"),
    ({"hidden_size": True}, r"hidden_size is True: expected a whole number"),
    ({"hidden_size": 0}, r"hidden_size is 0: expected a whole number from 1"),
    ({"hidden_size": 2**60}, r"hidden_size is 1152921504606846976: expected a whole number"),
    ({"hidden_size": 60}, r"hidden_size is 60: num_attention_heads = 8 does not divide it"),
    (
        {"num_hidden_layers": 10**9},
        r"num_hidden_layers is 1000000000: expected a whole number from 1 to 10000",
    ),
    ({"num_key_value_heads": 3}, r"num_key_value_heads is 3: does not divide num_attention_heads = 8"),
    ({"head_dim": 7}, r"head_dim = 7 is odd"),
    ({"rms_norm_eps": "tiny"}, r"rms_norm_eps is 'tiny': expected a number"),
    ({"rms_norm_eps": float("nan")}, r"rms_norm_eps is nan: expected a finite number"),
    ({"rope_theta": -1.0}, r"rope_theta is -1.0: expected a finite number above 0"),
    ({"rope_theta": 10**400}, r"rope_theta is 1000.*: expected a finite number above 0"),
    ({"rope_scaling": "linear"}, r"rope_scaling is 'linear': expected a JSON object"),
    (
        {"rope_scaling": {"type": "su", "factor": 2.0}},
        r"'su': not .*default, linear, dynamic, llama3, yarn, longrope and proportional",
    ),
    ({"rope_scaling": {"type": "dynamic"}}, r"rope_scaling: factor is missing"),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
        r"short_factor is \[1.0\]: .*list of \d+ numbers",
    ),
    ({"rope_scaling": {"type": "linear"}}, r"rope_scaling: factor is missing"),
    ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, r"rope_scaling: low_freq_factor is missing"),
    (
        {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
        r"high_freq_factor is 4.0: must exceed low_freq_factor \(4\)",
    ),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, r"full_attention is .*single layer types"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5: .*only 1.0 is supported"),
    ({"torch_dtype": "float8_e4m3fn"}, r"torch_dtype is 'float8_e4m3fn': .*float32, bfloat16, float16"),
    ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings is 'yes': expected true or false"),
    ({"eos_token_id": "</s>"}, r"eos_token_id is '</s>': expected a token id"),
    ({"quantization_config": {"bits": 4}}, r"quantization_config is .*original"),
    ({"sliding_window": 128}, r"sliding_window is 128: llama has none"),
    (
        {"model_type": "mistral", "layer_types": ["full_attention"] * 3},
        r"layer_types disagrees with sliding_window",
    ),
    (
        {"model_type": "qwen2", "layer_types": ["full_attention"]},
        r"layer_types has 1 entries, num_hidden_layers is 3",
    ),
    ({"model_type": "qwen2", "layer_types": ["mamba"] * 3}, r"layer_types names 'mamba'"),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3}, r"no sliding window is in use"),
    ({"model_type": "cohere", "use_qk_norm": True}, r"use_qk_norm is True: .*each head's own"),
    (
        OWN["falcon_h1"] | {"model_type": "falcon_h1", "projectors_bias": True},
        "projectors_bias is True: a bias of one of Mamba-2's products alone",
    ),
    (
        OWN["falcon_h1"] | {"model_type": "falcon_h1", "hidden_act": "gelu"},
        "hidden_act is 'gelu': an activation other than silu",
    ),
    (
        OWN["falcon_h1"] | {"model_type": "falcon_h1", "ssm_multipliers": [1.0, 2.0]},
        "ssm_multipliers .*expected a list of 5 numbers",
    ),
    (
        {"model_type": "cohere2", "sliding_window": None, "layer_types": ["full_attention"] * 3},
        r"sliding_window is None: cohere2 without a window",
    ),
    ({"model_type": "ministral"}, r"layer_types is None: which layers have a window must be stated"),
    ({"model_type": "internlm3", "qkv_bias": True}, r"qkv_bias is True: differs from bias"),
    ({"model_type": "hyperclovax", "use_post_norm": False}, r"use_post_norm is False: without norms behind"),
    ({"model_type": "stablelm", "qk_layernorm": True}, r"qk_layernorm is True: .*each head's own"),
    ({"model_type": "ernie4_5_moe", "use_bias": True}, r"use_bias is True: a shared expert with biases"),
    ({"model_type": "hunyuan_v1_moe", "moe_topk": [1, 2, 1]}, r"moe_topk is \[1, 2, 1\]: layers that differ"),
    (
        {"model_type": "exaone4", "sliding_window_pattern": "LLLG"},
        r"sliding_window_pattern is 'LLLG': expected a whole number",
    ),
    ({"model_type": "llama", "hidden_act": "xielu"}, r"hidden_act is 'xielu': not a supported activation"),
    ({"hidden_act": "\x1b[31mred"}, r"hidden_act is '\\x1b\[31mred'"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_work_is_refused_by_name_and_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_hf(LLAMA | change)
    assert str(caught.value).startswith("config.json")
    assert "\n" not in str(caught.value)


def test_a_family_with_an_odd_default_needs_its_kv_heads_stated() -> None:
    config = SIZES | {"model_type": "qwen2"}
    del config["num_key_value_heads"]
    with pytest.raises(ConfigError, match="num_key_value_heads is missing"):
        ModelConfig.from_hf(config)


FITS = [
    ({}, 3, "tp=3 does not divide 8 attention heads: use 1, 2, 4 or 8"),
    ({}, 16, "tp=16 does not divide 8 attention heads: use 1, 2, 4 or 8"),
    (
        {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96},
        6,
        "tp=6 neither divides nor is a multiple of 4 key/value heads: use 1, 2, 4 or 12",
    ),
]


@pytest.mark.parametrize(("change", "tp", "message"), FITS)
def test_a_tp_that_cannot_split_the_model_names_those_that_can(
    change: dict[str, Any], tp: int, message: str
) -> None:
    model = ModelConfig.from_hf(LLAMA | change)
    with pytest.raises(ConfigError) as caught:
        check_fit(model, EngineConfig(tp=tp))
    assert str(caught.value) == message
    for good in message.split("use ")[1].replace(" or ", ", ").split(", "):
        check_fit(model, EngineConfig(tp=int(good)))


MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": None,
}


def test_experts_are_divided_among_ranks_that_they_divide_by() -> None:
    model = ModelConfig.from_hf(MIXTRAL)
    for tp, ep in ((2, 2), (4, 2), (8, 1)):
        check_fit(model, EngineConfig(tp=tp, ep=ep))
    with pytest.raises(ConfigError, match=r"^ep=4 does not divide 6 experts: with tp=4 use 1 or 2$"):
        check_fit(model, EngineConfig(tp=4, ep=4))
    with pytest.raises(ConfigError, match=r"^ep=2 divides experts among ranks, llama has none: use ep=1$"):
        check_fit(ModelConfig.from_hf(LLAMA), EngineConfig(tp=2, ep=2))
    with pytest.raises(ConfigError, match=r"^ep=3 does not divide tp=4: use 1, 2 or 4$"):
        EngineConfig(tp=4, ep=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7: there are 6 experts"),
        (
            {"model_type": "qwen2_moe", "num_experts": 6, "use_sliding_window": True, "sliding_window": 8},
            "which layers have a window must be stated by layer_types",
        ),
        ({"num_local_experts": 0}, "num_local_experts is 0: expected a whole number from 1"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv is 8.0: clamped projections are not supported"),
        (
            {"model_type": "qwen3_moe", "decoder_sparse_step": 9},
            "no layer has experts, though it is a qwen3_moe",
        ),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": 1},
            "mlp_only_layers is 1: expected a list of layers",
        ),
        (
            {"model_type": "glm4_moe", "n_group": 4, "topk_group": 1, "n_routed_experts": 6},
            "6 experts in n_group = 4 groups, of which topk_group = 1 are chosen, do not fit together",
        ),
    ],
)
def test_routing_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(MIXTRAL | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enable_moe_block": True, "num_experts": None}, "num_experts is missing"),
        (
            {
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 5,
                "moe_intermediate_size": 8,
            },
            "num_experts_per_tok is 5: there are 4 experts",
        ),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5: .* none of its type before it"),
        ({"num_global_key_value_heads": 3}, "num_key_value_heads is 4: .* of layer 1 does not divide"),
        (
            {"vocab_size_per_layer_input": 7},
            "vocab_size_per_layer_input is 7: another number than vocab_size = 131",
        ),
        (
            {"per_layer_config": {"1": {"sliding_window": 4}}},
            "sliding_window is 4: layers that differ in that",
        ),
    ],
)
def test_what_gemma4_cannot_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(SIZES | OWN["gemma4_text"] | {"model_type": "gemma4_text"} | change)
