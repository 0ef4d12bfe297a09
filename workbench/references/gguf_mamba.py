"""Mamba-2 of GGUF files as transformers has it: its configs' fields, its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.workbench.references.gguf_experts import ConfigFields, Metadata

#: transformers' families that have it.
FAMILIES = ("granitemoehybrid", "nemotron_h", "falcon_h1")
_INNER, _SHARED = "ssm.inner_size", "expert_shared_feed_forward_length"


def granite(file: Metadata) -> ConfigFields:
    """Granite's multipliers, and the sizes of its experts."""
    width = file.value("embedding_length") // file.value("attention.head_count")
    return {
        "attention_multiplier": file.value("attention.scale") or width**-0.5,
        "embedding_multiplier": file.value("embedding_scale") or 1.0,
        "residual_multiplier": file.value("residual_scale") or 1.0,
        "logits_scaling": file.value("logit_scale") or 1.0,
    }


def mamba_keys(file: Metadata) -> ConfigFields:
    """The sizes of Mamba-2 as Granite and Falcon-H1 call them."""
    layers = range(file.value("block_count"))
    return {
        "mamba_n_heads": file.value("ssm.time_step_rank"),
        "mamba_d_head": file.value(_INNER) // file.value("ssm.time_step_rank"),
        "mamba_n_groups": file.value("ssm.group_count"),
        "mamba_d_state": file.value("ssm.state_size"),
        "mamba_d_conv": file.value("ssm.conv_kernel"),
        "mamba_conv_bias": any(file.has(f"blk.{i}.ssm_conv1d.bias") for i in layers),
        "mamba_proj_bias": any(file.has(f"blk.{i}.ssm_in.bias") for i in layers),
    }


def falcon_h1(file: Metadata) -> ConfigFields:
    """The multipliers are in the file's weights."""
    single = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return {
        **mamba_keys(file),
        "mamba_d_ssm": file.value(_INNER),
        "mamba_rms_norm": file.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        **{f"{name}_multiplier": 1.0 for name in single},
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
    }


def granite_hybrid(file: Metadata) -> ConfigFields:
    """Layers without key/value heads have a state; whether the others rotate is a key of its own."""
    heads = file.value("attention.head_count_kv")
    turning = file.value("rope.scaling.finetuned")
    return {
        **granite(file),
        "num_local_experts": file.value("expert_count") or 0,
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if one else "linear_attention" for one in heads],
        "attention_bias": any(one and file.has(f"blk.{i}.attn_q.bias") for i, one in enumerate(heads)),
        "shared_intermediate_size": file.value(_SHARED) or file.value("feed_forward_length"),
        "position_embedding_type": "rope" if turning is None or turning else None,
        "mamba_expand": file.value(_INNER) // file.value("embedding_length"),
        **mamba_keys(file),
    }


def nemotron_h(file: Metadata) -> ConfigFields:
    """A layer with a width is an MLP or experts, one with key/value heads attention, else it has a state, whose step
    sizes have no limits."""
    layers = range(file.value("block_count"))
    heads, widths = (
        found if isinstance(found := file.value(key), list) else [found] * len(layers)
        for key in ("attention.head_count_kv", "feed_forward_length")
    )
    kinds = [
        ("moe" if file.has(f"blk.{i}.ffn_gate_inp.weight") else "mlp")
        if widths[i]
        else ("full_attention" if heads[i] else "linear_attention")
        for i in layers
    ]
    eps = file.value("attention.layer_norm_rms_epsilon") or file.value("attention.layer_norm_epsilon")
    return {
        "layers_block_type": kinds,
        "num_key_value_heads": max(heads),
        "intermediate_size": max(widths),
        "layer_norm_epsilon": eps,
        "mamba_num_heads": file.value("ssm.time_step_rank"),
        "mamba_head_dim": file.value(_INNER) // file.value("ssm.time_step_rank"),
        "n_groups": file.value("ssm.group_count"),
        "ssm_state_size": file.value("ssm.state_size"),
        "conv_kernel": file.value("ssm.conv_kernel"),
        "use_conv_bias": any(file.has(f"blk.{i}.ssm_conv1d.bias") for i in layers),
        "use_bias": any(file.has(f"blk.{i}.ssm_in.bias") for i in layers),
        "mlp_bias": any(file.has(f"blk.{i}.ffn_down.bias") for i in layers),
        "attention_bias": any(file.has(f"blk.{i}.attn_q.bias") for i in layers),
        **({"moe_shared_expert_intermediate_size": shared} if (shared := file.value(_SHARED)) else {}),
        "time_step_min": 1e-30,  # its logarithm is taken
    }


def restore_mamba(tensors: dict[str, Tensor], config: Any) -> None:
    """Put the tensors of Mamba-2, and of Granite's and Nemotron-H's blocks, by transformers' names and in its layout in
    the place of the file's."""
    granite, nemotron = (config.model_type == one for one in ("granitemoehybrid", "nemotron_h"))
    ours_of = _names_of(config)
    for name in [name for name in tensors if name.startswith("blk.")]:
        _, layer, module, *kind = name.split(".")
        if (ours := ours_of.get(module)) is None:
            continue
        values = tensors.pop(name)
        match module:
            case "ssm_a":
                values = (-values.double()).log().to(values.dtype).flatten()
            case "ssm_d" | "ssm_norm":
                values = values.flatten()
            case "ssm_conv1d" if kind == ["weight"]:
                values = values.unsqueeze(1)
        suffix = "" if ours.endswith(_BARE) else f".{kind[0]}"
        tensors[f"model.layers.{layer}.{ours}{suffix}"] = values
    if granite:
        _stack_gates(tensors)
    if nemotron:
        for name, ours in (("token_embd", "embeddings"), ("output_norm", "norm_f")):
            tensors[f"model.{ours}.weight"] = tensors.pop(f"{name}.weight")


_SSM = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_dt": "dt_bias",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
_NEMOTRON = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_up_exps": "mixer.experts.up_proj",
    "ffn_down_exps": "mixer.experts.down_proj",
}
_GRANITE = {
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_gate_shexp": "shared_mlp.gate",
    "ffn_up_shexp": "shared_mlp.up",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
#: Of a model without experts the MLP is what is called its shared one.
_GRANITE_DENSE = {name.removesuffix("_shexp"): ours for name, ours in _GRANITE.items()}
#: Parameters without a module of their own.
_BARE = (".A_log", ".D", ".dt_bias", "_correction_bias", ".experts.up_proj", ".experts.down_proj")


def _names_of(config: Any) -> dict[str, str]:
    """The file's modules -> transformers' names within the layer, of what gguf-py's table does not have."""
    nemotron = config.model_type == "nemotron_h"
    mixer = {module: f"{'mixer' if nemotron else 'mamba'}.{ours}" for module, ours in _SSM.items()}
    if nemotron:
        return mixer | _NEMOTRON
    if config.model_type != "granitemoehybrid":
        return mixer
    return mixer | _GRANITE | ({} if config.num_local_experts else _GRANITE_DENSE)


def _stack_gates(tensors: dict[str, Tensor]) -> None:
    """Gate and up of the shared MLP in one, gate over up."""
    for name in [name for name in tensors if name.endswith("shared_mlp.gate.weight")]:
        both = torch.cat((tensors.pop(name), tensors.pop(name.replace(".gate.", ".up."))))
        tensors[name.replace(".gate.", ".input_linear.")] = both
