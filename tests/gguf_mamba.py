"""What llama.cpp's converter makes of Mamba-2 in Granite and Nemotron-H: its keys, its tensors. Nothing here comes from
the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import torch

Tensors = dict[str, torch.Tensor]
Config = Mapping[str, Any]


def mamba_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    """The metadata of a state, and of which layers have one."""
    heads = config["num_key_value_heads"]
    if config["model_type"] == "falcon_h1":
        sizes = {key: config[f"mamba_{name}"] for key, name in _GRANITE.items()}
        inner, kinds = config["mamba_d_ssm"], ["attention"] * config["num_hidden_layers"]
    elif "mamba_d_state" in config:
        sizes = {key: config[f"mamba_{name}"] for key, name in _GRANITE.items()}
        inner = config["mamba_expand"] * config["hidden_size"]
        kinds = config["layer_types"]
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    else:
        sizes = {key: config[name] for key, name in _NEMOTRON.items()}
        inner = config["mamba_num_heads"] * config["mamba_head_dim"]
        kinds = config["layers_block_type"]
        width = config["moe_intermediate_size" if "moe" in kinds else "intermediate_size"]
        writer.add_feed_forward_length([width if kind in ("mlp", "moe") else 0 for kind in kinds])
    if config["model_type"] == "falcon_h1":
        writer.add_head_count_kv(heads)
    else:
        writer.add_head_count_kv([heads if kind in ("attention", "full_attention") else 0 for kind in kinds])
    writer.add_ssm_conv_kernel(sizes["conv"])
    writer.add_ssm_state_size(sizes["state"])
    writer.add_ssm_group_count(sizes["groups"])
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(sizes["heads"])


_GRANITE = {"conv": "d_conv", "state": "d_state", "groups": "n_groups", "heads": "n_heads"}
_NEMOTRON = {
    "conv": "conv_kernel",
    "state": "ssm_state_size",
    "groups": "n_groups",
    "heads": "mamba_num_heads",
}


def as_mamba(tensors: Tensors, config: Config) -> Tensors:
    """The tensors by the names that the table knows, in the layout of the file; those of other models as they are."""
    groups = config.get("mamba_n_groups", config.get("n_groups"))
    if config["model_type"] == "falcon_h1":
        tensors = _multiplied(tensors, config)
    found: Tensors = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == "A_log" and ".linear_attn." not in name:
            tensor = -torch.exp(tensor)
        if kind in ("A_log", "D"):
            tensor = tensor.reshape(-1, 1)
        if name.endswith(".conv1d.weight"):
            tensor = tensor.squeeze(1)
        if module.endswith((".mamba.norm", ".mixer.norm")):
            tensor = tensor.reshape(groups, -1)
        found[name.replace(".dt_bias", ".dt_proj.bias")] = tensor
    return found


def _multiplied(tensors: Tensors, config: Config) -> Tensors:
    """Falcon-H1's weights with its multipliers in them."""
    inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = (inner, inner, shared, shared, config["mamba_n_heads"])
    parts = torch.cat(
        [torch.full((size,), by) for size, by in zip(sizes, config["ssm_multipliers"], strict=True)]
    )
    into, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    factors = {
        ".gate_proj.": gate,
        ".down_proj.": down,
        ".q_proj.": into,
        ".k_proj.": into * config["key_multiplier"],
        ".v_proj.": into,
        ".o_proj.": config["attention_out_multiplier"],
        ".mamba.out_proj.": config["ssm_out_multiplier"],
        ".mamba.in_proj.": config["ssm_in_multiplier"] * parts[:, None],
        "lm_head.": config["lm_head_multiplier"],
        "embed_tokens.": config["embedding_multiplier"],
    }
    return {
        name: tensor * next((by for part, by in factors.items() if part in name), 1.0)
        for name, tensor in tensors.items()
    }
