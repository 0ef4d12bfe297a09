"""Linear attention of GGUF files as transformers has it: its config's fields, its tensors, its order of heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.workbench.references.gguf_experts import ConfigFields, Metadata, partly_rotated


def linear_attention(file: Metadata, rope: ConfigFields) -> ConfigFields:
    """Which layers have it, its heads; of the others a part of each head is rotated. llama.cpp renormalises the weights
    of experts always."""
    heads, layers = file.value("ssm.time_step_rank"), range(file.value("block_count"))
    every, stated = file.value("full_attention_interval") or 4, file.value("attention.recurrent_layers")
    linear = stated or [(i + 1) % every != 0 for i in layers]
    kinds = ["linear_attention" if one else "full_attention" for one in linear]
    return {
        **partly_rotated(file, rope),
        "layer_types": kinds[: len(layers) - (file.value("nextn_predict_layers") or 0)],
        "linear_num_key_heads": file.value("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": file.value("ssm.state_size"),
        "linear_value_head_dim": file.value("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": file.value("ssm.conv_kernel"),
        "shared_expert_intermediate_size": file.value("expert_shared_feed_forward_length")
        or file.value("feed_forward_length"),
        "norm_topk_prob": True,
    }


def restore_linear(tensors: dict[str, Tensor], config: Any) -> None:
    """Put the tensors of layers with linear attention by transformers' names and in its layout in the place of the
    file's, and take 1 off the weights of norms."""
    for name in list(tensors):
        _, layer, module, *_ = (*name.split("."), "", "")
        stem = f"model.layers.{layer}.linear_attn"
        if name.endswith("norm.weight") and module != "ssm_norm":
            tensors[name] = tensors[name] - 1
        elif name.startswith("blk.") and (module.startswith("ssm_") or module in ("attn_qkv", "attn_gate")):
            ours, values = _restored(module, tensors.pop(name), config)
            tensors[f"{stem}.{ours}"] = values
    if config.model_type != "qwen3_next":
        return
    for name in [name for name in tensors if name.endswith(".in_proj_qkv.weight")]:
        z = tensors.pop(name.replace("qkv", "z"))
        tensors[name.replace("qkv", "qkvz")] = _by_heads(tensors.pop(name), z, config)


_NAMES = {
    "attn_qkv": "in_proj_qkv.weight",
    "attn_gate": "in_proj_z.weight",
    "ssm_in": "in_proj_qkvz.weight",
    "ssm_ba": "in_proj_ba.weight",
    "ssm_alpha": "in_proj_a.weight",
    "ssm_beta": "in_proj_b.weight",
    "ssm_conv1d": "conv1d.weight",
    "ssm_a": "A_log",
    "ssm_dt": "dt_bias",
    "ssm_norm": "norm.weight",
    "ssm_out": "out_proj.weight",
}


def _restored(module: str, stored: Tensor, config: Any) -> tuple[str, Tensor]:
    """transformers' name within the layer's module, and its tensor."""
    values = (-stored.double()).log().to(stored.dtype) if module == "ssm_a" else stored
    if config.model_type != "qwen3_next":
        values = _in_order(module, values, config)
    return _NAMES.get(module, module), values.unsqueeze(1) if module == "ssm_conv1d" else values


def _in_order(module: str, values: Tensor, config: Any) -> Tensor:
    """Heads of values one behind the other where they share a head of keys: in the file heads of keys take turns."""
    keys, count, width = (
        getattr(config, f"linear_{one}") for one in ("num_key_heads", "num_value_heads", "value_head_dim")
    )
    place = torch.arange(count).view(count // keys, keys).T.flatten()
    channels = (place[:, None] * width + torch.arange(width)).flatten()
    before = 2 * keys * config.linear_key_head_dim
    match module:
        case "ssm_a" | "ssm_dt" | "ssm_alpha" | "ssm_beta":
            return values[place]
        case "attn_gate":
            return values[channels]
        case "ssm_out":
            return values[:, channels]
        case "attn_qkv" | "ssm_conv1d":
            return torch.cat((values[:before], values[before:][channels]))
        case _:
            return values


def _by_heads(qkv: Tensor, z: Tensor, config: Any) -> Tensor:
    """q, k, v and z of each head of keys one below the other."""
    heads = config.linear_num_key_heads
    width = heads * config.linear_key_head_dim
    q, k, v = qkv.split((width, width, len(z)))
    return torch.cat([one.view(heads, -1, qkv.shape[1]) for one in (q, k, v, z)], 1).flatten(0, 1)
