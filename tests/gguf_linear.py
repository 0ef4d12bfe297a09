"""What llama.cpp's converter makes of linear attention: its keys, its tensors, the order of heads of values. Nothing
here comes from the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import torch

Tensors = dict[str, torch.Tensor]


def linear_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """The metadata of linear attention."""
    heads, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * width)
    kinds = config["layer_types"]
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    if full == list(range(full[0], len(kinds), full[0] + 1)):
        writer.add_full_attention_interval(full[0] + 1)
    else:
        writer.add_array(
            f"{writer.arch}.attention.recurrent_layers", [one not in full for one in range(len(kinds))]
        )
    if config["model_type"] != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def as_linear(tensors: Tensors, config: Mapping[str, Any], apart: bool) -> Tensors:
    """The tensors by the names that the table knows, in the layout of the file. `apart`: z in a tensor of its own, as
    in newer files of Qwen3-Next."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("in_proj_qkvz.weight") and apart:
            *qkv, z = _by_kind(tensor, config)
            found[name.replace("qkvz", "qkv")], found[name.replace("qkvz", "z")] = torch.cat(qkv), z
        else:
            kind = name.rpartition(".linear_attn.")[2]
            if kind == "A_log":
                tensor = -torch.exp(tensor)
            if kind == "conv1d.weight":
                tensor = tensor.squeeze(1)
            if config["model_type"] != "qwen3_next" and ".linear_attn." in name:
                tensor = _tiled(kind, tensor, config)
            found[name.replace(".dt_bias", ".dt_proj.bias")] = tensor
    return found


def _by_kind(tensor: torch.Tensor, config: Mapping[str, Any]) -> list[torch.Tensor]:
    """q, k, v and z of all heads, of what has them head by head."""
    heads = config["linear_num_key_heads"]
    each = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    sizes = [config["linear_key_head_dim"]] * 2 + [each] * 2
    parts = tensor.view(heads, sum(sizes), -1).split(sizes, 1)
    return [part.reshape(-1, tensor.shape[1]) for part in parts]


def _tiled(kind: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Heads of values in the order in which heads of keys take turns."""
    keys, values, width = (
        config[f"linear_{key}"] for key in ("num_key_heads", "num_value_heads", "value_head_dim")
    )
    order = torch.arange(values).view(keys, values // keys).T.flatten()
    channels = (order[:, None] * width + torch.arange(width)).flatten()
    before = 2 * keys * config["linear_key_head_dim"]
    if kind in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        return tensor[order]
    if kind == "in_proj_z.weight":
        return tensor[channels]
    if kind == "out_proj.weight":
        return tensor[:, channels]
    if kind in ("in_proj_qkv.weight", "conv1d.weight"):
        return torch.cat((tensor[:before], tensor[before:][channels]))
    return tensor
