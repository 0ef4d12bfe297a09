"""What transformers' configs of further architectures are read from GGUF files, and their parameters that are metadata
there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gguf import ReaderField
from torch import Tensor

from lockstep.workbench.references.gguf_experts import ConfigFields, Metadata, deepseek

_CHUNK = 8192


def llama4(file: Metadata) -> ConfigFields:
    """What llama.cpp's program has of it, and no file: chunks, layers that do not rotate, and what scales their
    queries; the model with 128 experts has no norms of q and k."""
    layers = range(file.value("block_count"))
    period = file.value("attention.sliding_window_pattern") or 4
    return {
        "intermediate_size": file.value("expert_feed_forward_length"),
        "intermediate_size_mlp": file.value("feed_forward_length"),
        "moe_layers": [i for i in layers if file.has(f"blk.{i}.ffn_gate_inp.weight")],
        "no_rope_layers": [int((i + 1) % 4 != 0) for i in layers],
        "layer_types": [f"{'chunked' if (i + 1) % period else 'full'}_attention" for i in layers],
        "attention_chunk_size": _CHUNK,
        "floor_scale": _CHUNK,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "use_qk_norm": file.value("expert_count") != 128,
    }


def phimoe(file: Metadata, fields: ConfigFields) -> ConfigFields:
    """`fields`: as of Phi-3."""
    rope, original = fields["rope_parameters"], fields["original_max_position_embeddings"]
    if rope["rope_type"] == "longrope":
        scale = rope.pop("attention_factor")
        rope |= {"short_mscale": scale, "long_mscale": scale, "original_max_position_embeddings": original}
    return {**fields, "lm_head_bias": file.has("output.bias"), "router_jitter_noise": 0.01}


def mistral4(file: Metadata, rope: ConfigFields) -> ConfigFields:
    """DeepSeek's attention; queries grow by a tenth where the file does not state it."""
    reported = deepseek(file, rope)
    beta = file.value("attention.temperature_scale")
    rope = {**reported["rope_parameters"], "llama_4_scaling_beta": 0.1 if beta is None else beta}
    width = reported["qk_nope_head_dim"] + reported["qk_rope_head_dim"]
    return {**reported, "model_type": "mistral4", "head_dim": width, "rope_parameters": rope}


def deepseek2(file: Metadata, rope: ConfigFields) -> ConfigFields:
    """Mistral-Large-3's files state `deepseek2`, and how queries grow; Youtu's have no experts."""
    if file.value("attention.temperature_scale") is not None:
        return mistral4(file, rope)
    reported = deepseek(file, rope)
    return (
        reported
        if file.value("expert_count")
        else {**reported, "model_type": "youtu", "attention_bias": False}
    )


def mistral3(file: Metadata, rope: ConfigFields) -> ConfigFields:
    """Ministral-3: YaRN's `mscale` is 1."""
    if rope["rope_type"] == "yarn":
        weight = file.value("rope.scaling.yarn_log_multiplier") or 0.0
        rope = {**rope, "mscale": 1.0, "mscale_all_dim": weight}
    beta = file.value("attention.temperature_scale") or 0.0
    return {"rope_parameters": {**rope, "llama_4_scaling_beta": beta}, "sliding_window": None}


def gemma4(file: Metadata, fields: ConfigFields) -> ConfigFields:
    """`fields`: the types of layers. Where they differ in size, the file has a list."""
    kinds, shared = fields["layer_types"], file.value("attention.shared_kv_layers") or 0
    layers = range(len(kinds))

    def of(key: str, kind: str) -> Any:
        stated = file.value(key)
        found = stated if isinstance(stated, list) else [stated] * len(kinds)
        return next((found[i] for i in layers if kinds[i] == f"{kind}_attention"), found[0])

    widths = file.value("feed_forward_length")
    width = widths[0] if isinstance(widths, list) else widths
    full = [i for i in layers[: len(kinds) - shared] if kinds[i] == "full_attention"]
    factors = file.named("rope_freqs.weight")
    turning = sum(factor == 1.0 for factor in factors) / len(factors)
    theta, local = file.value("rope.freq_base"), file.value("rope.freq_base_swa") or 1e4
    return {
        **fields,
        "sliding_window": file.value("attention.sliding_window"),
        "head_dim": file.value("attention.key_length_swa"),
        "global_head_dim": file.value("attention.key_length"),
        "num_key_value_heads": of("attention.head_count_kv", "sliding"),
        "num_global_key_value_heads": of("attention.head_count_kv", "full"),
        "attention_k_eq_v": any(not file.has(f"blk.{i}.attn_v.weight") for i in full),
        "num_kv_shared_layers": shared,
        "intermediate_size": width,
        "use_double_wide_mlp": isinstance(widths, list) and widths[-1] == 2 * width,
        "hidden_size_per_layer_input": file.value("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": len(file.named("token_embd.weight")),
        "final_logit_softcapping": file.value("final_logit_softcapping"),
        "enable_moe_block": bool(file.value("expert_count")),
        "top_k_experts": file.value("expert_used_count"),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": turning
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }  # fmt: skip


def hunyuan_moe(file: Metadata) -> ConfigFields:
    """So many experts in every layer; the shared one is as wide as an MLP."""
    return {"moe_topk": file.value("expert_used_count"), "attention_bias": file.has("blk.0.attn_q.bias")}


def ernie4_5_moe(file: Metadata) -> ConfigFields:
    """Ernie's own names of the same."""
    layers = [i for i in range(file.value("block_count")) if file.has(f"blk.{i}.ffn_gate_inp.weight")]
    return {
        "moe_num_experts": file.value("expert_count"),
        "moe_k": file.value("expert_used_count"),
        "moe_layer_start_index": layers[0],
        "moe_layer_end_index": layers[-1],
        "moe_layer_interval": file.value("interleave_moe_layer_step") or 1,
        "moe_num_shared_experts": file.value("expert_shared_count") or 0,
        "use_bias": file.has("blk.0.attn_q.bias"),
    }


def exaone_moe(file: Metadata, fields: ConfigFields) -> ConfigFields:
    """`fields`: as of EXAONE 4."""
    layers = range(file.value("block_count") - (file.value("nextn_predict_layers") or 0))
    kinds = ["sparse" if file.has(f"blk.{i}.ffn_gate_inp.weight") else "dense" for i in layers]
    return {**fields, "num_shared_experts": file.value("expert_shared_count"), "mlp_layer_types": kinds}


def xielu_numbers(fields: Mapping[str, ReaderField], layers: int) -> dict[str, Tensor]:
    """The numbers of Apertus' activation, by transformers' names; empty where the file has none."""
    found = dict[str, Tensor]()
    for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ())):
        if (field := fields.get(f"xielu.{name}")) is not None:
            stated = field.contents()
            each = stated if isinstance(stated, list) else [stated] * layers
            for layer, value in enumerate(each):
                found[f"model.layers.{layer}.mlp.act_fn.{name}"] = torch.full(shape, float(value))
    return found
