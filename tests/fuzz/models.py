"""Random models of all families: every size, rotation, window and bias that a config.json may state, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.engine.config import EngineConfig, ModelConfig, check_fit
from lockstep.engine.config.thresholds import thresholds
from lockstep.engine.errors import ConfigError
from tests.checkpoints import CLASSES
from tests.fuzz.alike_models import ALIKE
from tests.fuzz.draws import Fields, biases, both_types, experts, half_rotated, latent, rotation, types
from tests.fuzz.further_models import FURTHER

DTYPES = ("float32", "bfloat16", "float16")
DEGREES = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A family and what its config.json holds."""

    family: str
    fields: Fields

    @property
    def config(self) -> Any:
        """As transformers reads it."""
        return CLASSES[self.family][0](**self.fields)


def random_model(chance: random.Random, family: str) -> RandomModel:
    """Two to four small layers."""
    kv_heads, group = chance.choice((1, 2, 3, 4)), chance.choice((1, 2, 3, 4))
    head_dim, layers = chance.choice((4, 8, 16, 32)), chance.choice((2, 3, 4))
    fields: Fields = {
        "hidden_size": kv_heads * group * head_dim,
        "intermediate_size": chance.randint(5, 150),
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "vocab_size": chance.randint(17, 300),
        "max_position_embeddings": 256,
        "rms_norm_eps": chance.choice((1e-6, 1e-5, 1e-3)),
        "tie_word_embeddings": chance.random() < 0.5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    if family not in UNSTATED and (family in HEADED or chance.random() < 0.3):
        fields["head_dim"] = head_dim
        if family != "qwen2" and chance.random() < 0.5:  # a head's width is not the hidden size's share
            fields["hidden_size"] = kv_heads * group * chance.choice((2, 6, 10))
    if family not in ("phi3", "glm4", "gemma3_text", "olmo3"):
        fields["rope_parameters"] = rotation(chance, head_dim)
    if family == "gemma4_text":
        fields["vocab_size_per_layer_input"] = fields["vocab_size"]
    return RandomModel(family, fields | OWN[family](chance, layers, head_dim))


#: Families that assume a width of heads of their own where none is stated.
HEADED = (
    "qwen3", "mistral", "gemma2", "gemma3_text", "glm4", "gpt_oss", "mixtral", "gemma", "glm4_moe", "minimax_m2",
    "nemotron_h", "seed_oss", "exaone4", "ernie4_5", "helium", "gemma4_text", "glm", "vaultgemma", "ministral",
    "ministral3", "cwm", "dots1", "exaone_moe", "solar_open", "llama4_text", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "internlm3", "iquestcoder", "ernie4_5_moe",
)  # fmt: skip
#: Those whose heads are as wide as several numbers state.
LATENT = (
    "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa", "mistral4", "youtu",
)  # fmt: skip
#: Those, those of no head_dim, and those whose norms or factors of LongRoPE go by the hidden size in transformers.
UNSTATED = (
    *LATENT, "olmoe", "cohere", "stablelm", "flex_olmo", "lfm2", "lfm2_moe", "bamba", "granitemoehybrid", "phi",
    "cohere2", "apertus", "olmo", "phimoe", "granitemoe", "jais2", "hyperclovax", "phi3",
)  # fmt: skip


def _mistral(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {"sliding_window": chance.choice((None, 4, 9, 16))}


def _qwen2(chance: random.Random, layers: int, head_dim: int) -> Fields:
    if chance.random() < 0.6:
        return {}
    first = {"max_window_layers": chance.randint(0, layers)}
    stated = first if chance.random() < 0.5 else {"layer_types": types(chance, layers)}
    return {"use_sliding_window": True, "sliding_window": chance.choice((4, 9, 16)), **stated}


def _qwen3(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {**_qwen2(chance, layers, head_dim), "attention_bias": chance.random() < 0.5}


def _olmo2(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {"attention_bias": chance.random() < 0.3}


def _olmo3(chance: random.Random, layers: int, head_dim: int) -> Fields:
    kinds = ("default", "yarn", "linear", "llama3")
    return {**_olmo2(chance, layers, head_dim), **_by_type(chance, layers, head_dim, kinds, ("default",))}


def _gemma2(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {
        **_gemma(chance),
        "attn_logit_softcapping": chance.choice((None, 2.0, 50.0)),
        "sliding_window": chance.choice((4, 9, 16)),
        "layer_types": types(chance, layers),
    }


def _gemma3(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {
        **_gemma(chance),
        **_by_type(chance, layers, head_dim, ("default", "linear", "yarn"), ("default",)),
    }


def _gemma(chance: random.Random) -> Fields:
    return {
        "attention_bias": chance.random() < 0.3,
        "final_logit_softcapping": chance.choice((None, 3.0, 30.0)),
        "query_pre_attn_scalar": chance.choice((5, 24, 256)),
        "hidden_activation": chance.choice(("gelu_pytorch_tanh", "gelu", "silu")),
    }


def _phi3(chance: random.Random, layers: int, head_dim: int) -> Fields:
    width = head_dim * chance.choice((1.0, 1.0, 0.75, 0.5))
    share = 1.0 if width % 2 else width / head_dim
    turned = rotation(chance, int(head_dim * share), ("default", "longrope"))
    return {
        "rope_parameters": turned | {"partial_rotary_factor": share},
        # The configuration class takes it for the context that LongRoPE's factors are of.
        "original_max_position_embeddings": turned.get("original_max_position_embeddings", 64),
        "sliding_window": chance.choice((None, 4, 9, 16)),
    }


def _granite(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {
        **biases(chance, layers, head_dim),
        "attention_multiplier": chance.choice((1.0, 0.3, 0.0625)),
        "embedding_multiplier": chance.choice((1.0, 6.0, 12.0)),
        "residual_multiplier": chance.choice((1.0, 0.22)),
        "logits_scaling": chance.choice((1.0, 4.0, 8.0)),
    }


def _smollm3(chance: random.Random, layers: int, head_dim: int) -> Fields:
    window = {
        "use_sliding_window": True,
        "sliding_window": chance.choice((4, 9)),
        "layer_types": types(chance, layers),
    }
    rotated = chance.choice((None, [chance.randrange(2) for _ in range(layers)]))  # None: by the interval
    return {
        **biases(chance, layers, head_dim),
        **(window if chance.random() < 0.4 else {}),
        "no_rope_layers": rotated,
        "no_rope_layer_interval": chance.choice((2, 4)),
    }


def _starcoder2(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {
        "use_bias": chance.random() < 0.7,
        "sliding_window": chance.choice((None, 4, 9, 16)),
        "norm_epsilon": chance.choice((1e-6, 1e-5, 1e-3)),
        "hidden_act": chance.choice(("gelu_pytorch_tanh", "gelu", "silu")),
    }


def _deepseek_v2(chance: random.Random, layers: int, head_dim: int) -> Fields:
    grouped = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": chance.choice((1, 2))}
    fields = latent(chance, layers, head_dim) | {"first_k_dense_replace": chance.randint(0, layers)}
    return fields | (grouped if chance.random() < 0.5 else {"topk_method": "greedy"})


def _deepseek_v3(chance: random.Random, layers: int, head_dim: int) -> Fields:
    groups = {"n_group": 2, "topk_group": chance.choice((1, 2)), "num_nextn_predict_layers": 0}
    dense = {"first_k_dense_replace": chance.randint(0, layers), "rope_interleave": chance.random() < 0.7}
    return latent(chance, layers, head_dim) | groups | dense


def _glm4_moe_lite(chance: random.Random, layers: int, head_dim: int) -> Fields:
    fields = latent(chance, layers, head_dim)
    heads = chance.choice((2, 4))
    kinds = types(chance, layers, ("dense", "sparse"))
    return fields | {"num_attention_heads": heads, "num_key_value_heads": heads, "mlp_layer_types": kinds}


def _linear(chance: random.Random, layers: int, head_dim: int) -> Fields:
    """Gated DeltaNet in some layers, attention behind a gate in the others, of whose heads a part is rotated."""
    keys, share = chance.choice((1, 2, 4)), chance.choice((0.25, 0.5, 1.0))
    width = max(8, head_dim)
    turned = rotation(chance, int(width * share), ("default", "linear", "yarn"))
    return {
        "head_dim": width,
        "layer_types": both_types(chance, layers, ("linear_attention", "full_attention")),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * chance.choice((1, 2, 3)),
        "linear_key_head_dim": chance.choice((4, 8, 16)),
        "linear_value_head_dim": chance.choice((4, 12, 16)),
        "linear_conv_kernel_dim": chance.choice((2, 4)),
        "rope_parameters": turned | {"partial_rotary_factor": share},
    }


def _gated_shared(chance: random.Random) -> Fields:
    """Experts, and one to which every token goes through a gate."""
    return experts(chance) | {"shared_expert_intermediate_size": chance.randint(5, 40)}


def _mixtral(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return experts(chance) | {"sliding_window": chance.choice((None, 4, 9, 16))}


def _qwen3_moe(chance: random.Random, layers: int, head_dim: int) -> Fields:
    single = {"mlp_only_layers": [chance.randrange(layers)], "attention_bias": chance.random() < 0.5}
    return experts(chance) | single


def _olmoe(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return experts(chance) | _olmo2(chance, layers, head_dim)


def _qwen2_moe(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return _gated_shared(chance) | {"qkv_bias": chance.random() < 0.7}


def _gpt_oss(chance: random.Random, layers: int, head_dim: int) -> Fields:
    """Gate and up lie in turn."""
    return experts(chance) | {
        "attention_bias": chance.random() < 0.7,
        "swiglu_limit": chance.choice((1.5, 7.0)),
        "sliding_window": chance.choice((4, 9, 16)),
        "layer_types": types(chance, layers),
        "rope_parameters": rotation(chance, head_dim, ("default", "linear", "yarn")) | {"truncate": False},
    }


def _qwen3_next(chance: random.Random, layers: int, head_dim: int) -> Fields:
    single = {"mlp_only_layers": [chance.randrange(layers)]}
    return _linear(chance, layers, head_dim) | _gated_shared(chance) | single


def _qwen3_5_moe(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return _linear(chance, layers, head_dim) | _gated_shared(chance)


def _glm4_moe(chance: random.Random, layers: int, head_dim: int) -> Fields:
    share = chance.choice((0.5, 1.0))
    turned = rotation(chance, int(head_dim * share), ("default", "linear", "yarn"))
    return {
        **experts(chance),
        "n_routed_experts": 8,
        "num_experts_per_tok": chance.choice((1, 2)),  # one group has four experts
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": chance.choice((1, 2)),
        "first_k_dense_replace": chance.randint(0, layers),
        "attention_bias": chance.random() < 0.5,
        "use_qk_norm": chance.random() < 0.5,
        "rope_parameters": turned | {"partial_rotary_factor": share},
    }


def _gemma1(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {"attention_bias": chance.random() < 0.3}


def _nemotron(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {
        **biases(chance, layers, head_dim),
        "norm_eps": chance.choice((1e-6, 1e-5, 1e-3)),
        "rope_parameters": rotation(chance, head_dim, ("default", "linear")) | {"partial_rotary_factor": 1.0},
    }


def _cohere(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {
        "attention_bias": chance.random() < 0.5,
        "logit_scale": chance.choice((0.0625, 0.3125, 1.0)),
        "layer_norm_eps": chance.choice((1e-6, 1e-5, 1e-3)),
    }


def _stablelm(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {
        "use_qkv_bias": chance.random() < 0.5,
        "use_parallel_residual": chance.random() < 0.3,
        "layer_norm_eps": chance.choice((1e-6, 1e-5, 1e-3)),
        "rope_parameters": rotation(chance, head_dim, ("default", "linear")) | {"partial_rotary_factor": 1.0},
    }


#: Family -> what it alone has: (chance, layers, head_dim).
OWN: dict[str, Callable[[random.Random, int, int], Fields]] = {
    "llama": biases, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3, "olmo2": _olmo2, "olmo3": _olmo3,
    "gemma2": _gemma2, "gemma3_text": _gemma3, "phi3": _phi3, "granite": _granite, "smollm3": _smollm3,
    "glm4": half_rotated, "starcoder2": _starcoder2, "deepseek_v2": _deepseek_v2, "deepseek_v3": _deepseek_v3,
    "glm4_moe_lite": _glm4_moe_lite, "qwen3_next": _qwen3_next, "qwen3_5_text": _linear,
    "qwen3_5_moe_text": _qwen3_5_moe, "mixtral": _mixtral, "qwen3_moe": _qwen3_moe, "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe, "gpt_oss": _gpt_oss, "glm4_moe": _glm4_moe, "gemma": _gemma1, "arcee": biases,
    "nemotron": _nemotron, "cohere": _cohere, "stablelm": _stablelm, **FURTHER, **ALIKE,
}  # fmt: skip
#: Those with layers that keep a state, and of the others those with experts.
STATES = (
    "bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next",
)  # fmt: skip
EXPERTS = (
    "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "gpt_oss", "granitemoe", "hunyuan_v1_moe",
    "llama4_text", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "solar_open",
)  # fmt: skip
#: What is drawn from together -> its families.
KINDS = {
    "dense": tuple(sorted(OWN.keys() - {*STATES, *EXPERTS, *LATENT})),
    "experts": EXPERTS,
    "latents": LATENT,
    "states": STATES,
}


def _by_type(
    chance: random.Random, layers: int, head_dim: int, full: tuple[str, ...], sliding: tuple[str, ...]
) -> Fields:
    """Windows in some layers, and a rotation for each of the two types."""
    return {
        "sliding_window": chance.choice((4, 9, 16)),
        "layer_types": types(chance, layers),
        "rope_parameters": {
            "full_attention": rotation(chance, head_dim, full),
            "sliding_attention": rotation(chance, head_dim, sliding),
        },
    }


def random_degrees(chance: random.Random, model: ModelConfig) -> tuple[int, int]:
    """A tensor parallelism that the model can be split by, and groups of its ranks that divide the experts."""
    return chance.choice([(tp, ep) for tp in DEGREES for ep in DEGREES if _fits(model, tp, ep)])


def _fits(model: ModelConfig, tp: int, ep: int) -> bool:
    try:
        check_fit(model, EngineConfig(tp=tp, ep=ep))
    except ConfigError:
        return False
    return True


def random_prompts(chance: random.Random, model: ModelConfig) -> list[list[int]]:
    """Up to three, from a single token to more than a cache's block holds, mostly one beyond every window and original
    context; the highest id among them."""
    lengths = [chance.choice((1, 2, 5, 9, 15, 16, 17, 33, 40)) for _ in range(chance.choice((1, 1, 2, 3)))]
    if chance.random() < 0.8:
        lengths[-1] = max(lengths[-1], *(one.tokens + 3 for one in thresholds(model)), 1)
    prompts = [[chance.randrange(model.vocab_size) for _ in range(length)] for length in lengths]
    prompts[0][-1] = model.vocab_size - 1
    return prompts
