"""What random models of several families are drawn with: experts, kinds of layers, rotations."""

from __future__ import annotations

import random
from typing import Any

Fields = dict[str, Any]


def experts(chance: random.Random) -> Fields:
    """By the names that most families have for them, and those of the others."""
    count = chance.choice((4, 8))
    return {
        "num_experts": count,
        "num_local_experts": count,
        "num_experts_per_tok": chance.choice((1, 2, 3)),
        "moe_intermediate_size": chance.randint(5, 40),
        "norm_topk_prob": chance.random() < 0.7,
    }


def both_types(chance: random.Random, layers: int, kinds: tuple[str, str]) -> list[str]:
    """A kind for each layer, each of the two at least once."""
    found = types(chance, layers, kinds)
    found[0], found[-1] = chance.sample(kinds, 2)
    return found


def types(
    chance: random.Random, layers: int, kinds: tuple[str, ...] = ("full_attention", "sliding_attention")
) -> list[str]:
    """A kind for each layer."""
    return [chance.choice(kinds) for _ in range(layers)]


_KINDS = ("default", "default", "linear", "dynamic", "llama3", "yarn", "longrope")


def rotation(chance: random.Random, head_dim: int, kinds: tuple[str, ...] = _KINDS) -> Fields:
    """A rotation of `head_dim` channels."""
    kind = chance.choice(kinds)
    fields: Fields = {"rope_type": kind, "rope_theta": chance.choice((1e4, 5e5, 1e6))}
    if kind != "default":
        fields["factor"] = chance.choice((2.0, 4.0, 8.0))
    if kind in ("llama3", "yarn", "longrope"):
        fields["original_max_position_embeddings"] = chance.choice((16, 32, 64))
    if kind == "llama3":
        fields |= {"low_freq_factor": 1.0, "high_freq_factor": chance.choice((2.0, 4.0))}
    if kind == "longrope":
        fields |= {
            name: [round(chance.uniform(1, 8), 2) for _ in range(head_dim // 2)]
            for name in ("short_factor", "long_factor")
        }
    return fields


def latent(chance: random.Random, layers: int, head_dim: int) -> Fields:
    """Keys and values from latents; experts in some layers. DeepSeek-V2 rotates complex numbers: even widths."""
    rope, count = chance.choice((2, 4, 8)), chance.choice((4, 8))
    turned = rotation(chance, rope, ("default", "linear", "yarn", "yarn"))
    if turned["rope_type"] == "yarn" and chance.random() < 0.7:
        turned |= {"mscale": chance.choice((0.707, 1.0)), "mscale_all_dim": chance.choice((0.707, 1.0))}
    return {
        "num_key_value_heads": None,
        "attention_bias": chance.random() < 0.3,
        "kv_lora_rank": 2 * chance.randint(3, 20),
        "q_lora_rank": chance.choice((None, chance.randint(5, 40))),
        "qk_nope_head_dim": 2 * chance.randint(2, 10),
        "qk_rope_head_dim": rope,
        "v_head_dim": chance.randint(3, 24),
        "rope_parameters": turned,
        "n_routed_experts": count,
        "num_experts_per_tok": chance.choice((1, 2)),
        "n_shared_experts": chance.choice((1, 2)),
        "moe_intermediate_size": chance.randint(5, 40),
        "routed_scaling_factor": chance.choice((1.0, 2.5)),
        "norm_topk_prob": chance.random() < 0.7,
    }


def biases(chance: random.Random, layers: int, head_dim: int) -> Fields:
    """Of attention and of the MLP."""
    return {"attention_bias": chance.random() < 0.5, "mlp_bias": chance.random() < 0.5}


def half_rotated(chance: random.Random, layers: int, head_dim: int) -> Fields:
    """All channels of a head are rotated, or half of them."""
    share = chance.choice((0.5, 1.0))
    turned = rotation(chance, int(head_dim * share), ("default", "linear", "llama3"))
    return {
        "attention_bias": chance.random() < 0.7,
        "rope_parameters": turned | {"partial_rotary_factor": share},
    }
