"""Experts and latent attention of GGUF files as transformers has them: its config's fields, its stacked tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

#: Fields of a transformers config.
ConfigFields = dict[str, Any]
_SIGMOID = 2


class Metadata(Protocol):
    """What is asked of a file."""

    def value(self, key: str) -> Any: ...

    def has(self, name: str) -> bool: ...

    def named(self, name: str) -> Any: ...


def expert_fields(file: Metadata) -> ConfigFields:
    """How many there are and how they are chosen, by every name that a family has for it; empty without experts."""
    if not (count := file.value("expert_count")):
        return {}
    layers = range(file.value("block_count"))
    width = file.value("expert_feed_forward_length") or file.value("feed_forward_length")
    dense = [i for i in layers if not file.has(f"blk.{i}.ffn_gate_inp.weight")]
    return {
        "num_experts": count,
        "num_local_experts": count,
        "n_routed_experts": count,
        "num_experts_per_tok": file.value("expert_used_count"),
        "moe_intermediate_size": width,
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
        "first_k_dense_replace": len(dense),
        "n_shared_experts": file.value("expert_shared_count"),
        "n_group": file.value("expert_group_count") or 1,
        "topk_group": file.value("expert_group_used_count") or 1,
        "routed_scaling_factor": file.value("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(file.value("expert_weights_norm")),
    }


def qwen3_moe(file: Metadata) -> ConfigFields:
    """llama.cpp renormalises always."""
    return {"norm_topk_prob": True}


def qwen2_moe(file: Metadata) -> ConfigFields:
    """One shared expert, of a width of its own."""
    width = file.value("expert_shared_feed_forward_length")
    return {
        "shared_expert_intermediate_size": width or file.value("feed_forward_length"),
        "norm_topk_prob": False,
        "qkv_bias": file.has("blk.0.attn_q.bias"),
    }


def gpt_oss(file: Metadata, rope: ConfigFields) -> ConfigFields:
    """Every second layer sees everything; the ramp of YaRN is not rounded, as in the original."""
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(file.value("block_count"))]
    return {
        "sliding_window": file.value("attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": {**rope, "truncate": False},
    }


def partly_rotated(file: Metadata, rope: ConfigFields) -> ConfigFields:
    """Of each head the first channels are rotated."""
    width, rotated = file.value("attention.key_length"), file.value("rope.dimension_count")
    return {
        "rope_parameters": {**rope, "partial_rotary_factor": rotated / width},
        "rotary_dim": rotated,
        "use_qk_norm": file.has("blk.0.attn_q_norm.weight"),
    }


def deepseek(file: Metadata, rope: ConfigFields) -> ConfigFields:
    """V2 where scores are a softmax, else V3; widths of heads as they are before anything is absorbed."""
    absorbed = file.value("attention.key_length_mla") is not None
    key, value = (file.value(f"attention.{one}_length" + "_mla" * absorbed) for one in ("key", "value"))
    rotated, groups = file.value("rope.dimension_count"), file.value("expert_group_count") or 1
    if rope["rope_type"] == "yarn":
        weight = round(file.value("rope.scaling.yarn_log_multiplier") / 0.1, 6)
        rope = {**rope, "mscale": weight, "mscale_all_dim": weight}
    return {
        "model_type": "deepseek_v3" if file.value("expert_gating_func") == _SIGMOID else "deepseek_v2",
        "num_key_value_heads": file.value("attention.head_count"),
        "kv_lora_rank": file.value("attention.kv_lora_rank"),
        "q_lora_rank": file.value("attention.q_lora_rank"),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "head_dim": rotated,
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "rope_parameters": rope,
    }


def stored_name(name: str) -> str:
    """transformers' name of a parameter as gguf-py's table has it: with a module of its own."""
    if name.endswith("e_score_correction_bias"):
        layer = name.split(".")[2]
        return f"model.layers.{layer}.mlp.gate.e_score_correction.bias"
    if name.endswith(".expert_bias"):
        return f"{name}.bias"
    if name.endswith("block_sparse_moe.router.weight"):
        return name.replace(".router.", ".router.layer.")
    return f"{name}.weight" if name.endswith((".sinks", ".layer_scalar")) else name


#: The module that has a layer's experts, by `model_type`.
_BLOCKS = {
    **dict.fromkeys(("llama4_text", "lfm2_moe"), "feed_forward"),
    **dict.fromkeys(("granitemoe", "granitemoehybrid"), "block_sparse_moe"),
    "gemma4_text": "",  # beside its MLP
}


def stack_experts(tensors: dict[str, Tensor], model_type: str) -> None:
    """In place of gate and up, and of keys and values of latents, the tensors that transformers has: those by their
    names in the file are taken out, these put in by their names there."""
    interleaved, turned = model_type == "gpt_oss", model_type in ("gpt_oss", "llama4_text")
    block = _BLOCKS.get(model_type, "mlp")
    for name in [name for name in tensors if name.endswith(".scale")]:  # Gemma-4's
        router = f"model.layers.{name.split('.')[1]}.router"
        tensors[f"{router}.{'scale' if 'gate_inp' in name else 'per_expert_scale'}"] = tensors.pop(name)
    for name in [name for name in tensors if ".ffn_down_exps." in name]:
        layer, kind = name.split(".")[1], name.rsplit(".", 1)[1]
        module = ".".join(filter(None, ("model.layers", layer, block, "experts")))
        down = tensors.pop(name)
        if (both := tensors.pop(f"blk.{layer}.ffn_gate_up_exps.{kind}", None)) is None:
            gate, up = (tensors.pop(f"blk.{layer}.ffn_{one}_exps.{kind}") for one in ("gate", "up"))
            both = torch.stack((gate, up), 2).flatten(1, 2) if interleaved else torch.cat((gate, up), 1)
        if turned:
            both, down = (one.transpose(1, 2) if kind == "weight" else one for one in (both, down))
        suffix = "" if kind == "weight" else "_bias"
        tensors |= {f"{module}.gate_up_proj{suffix}": both, f"{module}.down_proj{suffix}": down}
    for name in [name for name in tensors if name.endswith(".attn_k_b.weight")]:
        keys, values = tensors.pop(name), tensors.pop(name.replace("attn_k_b", "attn_v_b"))
        whole = torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)
        tensors[f"model.layers.{name.split('.')[1]}.self_attn.kv_b_proj.weight"] = whole


def one_row(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A shared expert's gate may be stored as a vector."""
    found = tensors[name]
    return found.unsqueeze(0) if name.endswith("ffn_gate_inp_shexp.weight") and found.dim() == 1 else found
