"""Random models of the families that are others but for a few flags, and of those with an indexer or chunks."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.fuzz.draws import Fields, biases, experts, half_rotated, latent, rotation, types

Draw = Callable[[random.Random, int, int], Fields]


def _same(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {}


def _biased_alike(chance: random.Random, layers: int, head_dim: int) -> Fields:
    """transformers takes one answer for both."""
    biased = chance.random() < 0.5
    return {"attention_bias": biased, "mlp_bias": biased}


def _windows(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {"sliding_window": chance.choice((4, 9, 16)), "layer_types": types(chance, layers)}


def _ministral3(chance: random.Random, layers: int, head_dim: int) -> Fields:
    """Queries have a factor that grows with their position."""
    turned = rotation(chance, head_dim, ("yarn",)) | {"mscale": 1.0, "mscale_all_dim": 1.0}
    beta = chance.choice((0.1, 0.5))
    return {"sliding_window": None, "rope_parameters": turned | {"llama_4_scaling_beta": beta}}


def _vaultgemma(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {
        **_windows(chance, layers, head_dim),
        "attention_bias": chance.random() < 0.3,
        "query_pre_attn_scalar": chance.choice((5, 24, 256)),
        "attn_logit_softcapping": chance.choice((None, 2.0, 50.0)),
        "final_logit_softcapping": chance.choice((None, 3.0, 30.0)),
    }


def _scaled(chance: random.Random, layers: int, head_dim: int) -> Fields:
    """Granite's four factors."""
    return {
        "attention_multiplier": chance.choice((1.0, 0.3, 0.0625)),
        "embedding_multiplier": chance.choice((1.0, 6.0, 12.0)),
        "residual_multiplier": chance.choice((1.0, 0.22)),
        "logits_scaling": chance.choice((1.0, 4.0, 0.3125)),
    }


def _granitemoe(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return _scaled(chance, layers, head_dim) | experts(chance)


def _jais2(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {"layer_norm_eps": chance.choice((1e-6, 1e-5, 1e-3)), **biases(chance, layers, head_dim)}


def _hunyuan(chance: random.Random, layers: int, head_dim: int) -> Fields:
    """Its dynamic scaling has an exponent of its own, `alpha`, and is the same at any length."""
    dynamic = {
        "rope_type": "dynamic",
        "rope_theta": 1e4,
        "alpha": chance.choice((50.0, 1000.0)),
        "factor": 1.0,
    }
    turned = chance.choice((dynamic, rotation(chance, head_dim, ("default",))))
    return {"attention_bias": chance.random() < 0.5, "rope_parameters": turned}


def _hunyuan_moe(chance: random.Random, layers: int, head_dim: int) -> Fields:
    fields = experts(chance)
    return {
        **_hunyuan(chance, layers, head_dim),
        **fields,
        "moe_topk": [fields["num_experts_per_tok"]] * layers,
    }


def _ernie_moe(chance: random.Random, layers: int, head_dim: int) -> Fields:
    fields = experts(chance)
    return {
        "moe_num_experts": fields["num_experts"],
        "moe_k": fields["num_experts_per_tok"],
        "moe_intermediate_size": fields["moe_intermediate_size"],
        "moe_num_shared_experts": chance.choice((0, 1, 2)),
    }


def _corrected(chance: random.Random, layers: int, head_dim: int) -> Fields:
    """Experts by sigmoids with correction biases, in groups, beside shared ones."""
    return {
        **experts(chance),
        "num_experts": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": chance.choice((1, 2)),  # one group has four experts
        "n_shared_experts": chance.choice((1, 2)),
        "n_group": 2,
        "topk_group": chance.choice((1, 2)),
        "first_k_dense_replace": chance.randint(0, layers),
        "routed_scaling_factor": chance.choice((1.0, 1.5)),
    }


def _dots1(chance: random.Random, layers: int, head_dim: int) -> Fields:
    window = {"sliding_window": chance.choice((4, 9)), "layer_types": types(chance, layers)}
    return {**_corrected(chance, layers, head_dim), **window, "attention_bias": chance.random() < 0.5}


def _exaone_moe(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return _corrected(chance, layers, head_dim) | _windows(chance, layers, head_dim)


def _latent(chance: random.Random, layers: int, head_dim: int) -> Fields:
    """Where as many heads of keys are stated as there are of queries."""
    heads = chance.choice((2, 4))
    return latent(chance, layers, head_dim) | {"num_attention_heads": heads, "num_key_value_heads": heads}


def _indexed(chance: random.Random, layers: int, head_dim: int) -> Fields:
    """Latent attention to keys that an indexer chooses. Of few of its heads scores are equal."""
    groups = {
        "n_group": 2,
        "topk_group": chance.choice((1, 2)),
        "first_k_dense_replace": chance.randint(0, layers),
    }
    indexer = {
        "index_topk": chance.choice((4, 8, 16)),
        "index_head_dim": 16,
        "index_n_heads": 16,
        "q_lora_rank": chance.randint(5, 40),
    }
    return _latent(chance, layers, head_dim) | groups | indexer


def _glm_dsa(chance: random.Random, layers: int, head_dim: int) -> Fields:
    """Some layers take the keys that the one before them chose."""
    kinds = ["full", *(chance.choice(("full", "shared")) for _ in range(layers - 1))]
    return _indexed(chance, layers, head_dim) | {"indexer_types": kinds}


def _mistral4(chance: random.Random, layers: int, head_dim: int) -> Fields:
    fields = latent(chance, layers, head_dim)
    turned = rotation(chance, fields["qk_rope_head_dim"], ("yarn",)) | {"mscale": 1.0, "mscale_all_dim": 1.0}
    return {
        **fields,
        "n_group": 2,
        "topk_group": chance.choice((1, 2)),
        "first_k_dense_replace": chance.randint(0, layers),
        "rope_parameters": turned | {"llama_4_scaling_beta": chance.choice((0.1, 0.5))},
    }


def _youtu(chance: random.Random, layers: int, head_dim: int) -> Fields:
    fields = _latent(chance, layers, head_dim)
    return {key: one for key, one in fields.items() if "moe" not in key and "expert" not in key}


def _llama4(chance: random.Random, layers: int, head_dim: int) -> Fields:
    """Attention in chunks where tokens are rotated; an expert sees its input times its weight."""
    return {
        **experts(chance),
        "intermediate_size": chance.randint(5, 40),
        "intermediate_size_mlp": chance.randint(5, 150),
        "interleave_moe_layer_step": chance.choice((1, 2)),
        "no_rope_layers": [chance.randrange(2) for _ in range(layers)],
        "attention_chunk_size": chance.choice((4, 8, 16)),
        "use_qk_norm": chance.random() < 0.7,
        "attn_temperature_tuning": chance.random() < 0.7,
        "floor_scale": chance.choice((4, 16)),
        "attn_scale": chance.choice((0.1, 0.5)),
        "rope_parameters": rotation(chance, head_dim, ("default", "llama3")),
    }


#: Family -> what it alone has: (chance, layers, head_dim).
ALIKE: dict[str, Draw] = {
    "glm": half_rotated, "helium": biases, "internlm3": _biased_alike, "iquestcoder": _same, "ministral": _windows,
    "cwm": _windows, "ministral3": _ministral3, "vaultgemma": _vaultgemma, "hyperclovax": _scaled,
    "granitemoe": _granitemoe, "jais2": _jais2, "hunyuan_v1_dense": _hunyuan, "hunyuan_v1_moe": _hunyuan_moe,
    "ernie4_5_moe": _ernie_moe, "dots1": _dots1, "solar_open": _corrected, "exaone_moe": _exaone_moe,
    "deepseek_v32": _indexed, "glm_moe_dsa": _glm_dsa, "mistral4": _mistral4, "youtu": _youtu,
    "llama4_text": _llama4,
}  # fmt: skip
