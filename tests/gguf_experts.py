"""What llama.cpp's converter makes of experts and latent attention: its keys, and its stacks. Nothing here comes from
the engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import gguf
import torch

Tensors = dict[str, torch.Tensor]
Config = Mapping[str, Any]
_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.weight")
#: What the converter calls Mixtral's matrices before it looks names up.
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def expert_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    """The metadata of experts, and of latents where there are any."""
    if "kv_lora_rank" in config:
        _latent_keys(writer, config)
    family = config["model_type"]
    count = next(
        (
            config[key]
            for key in ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
            if config.get(key)
        ),
        0,
    )
    if not count:
        return
    if family == "gemma4_text" and not config["enable_moe_block"]:
        return
    writer.add_expert_count(count)
    keys = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
    chosen = next(config[key] for key in keys if key in config)
    writer.add_expert_used_count(chosen[0] if isinstance(chosen, list) else chosen)
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if family in ("gpt_oss", "minimax_m2", "llama4_text", "hunyuan_v1_moe"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if family == "nemotron_h":
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_shared_count(config["n_shared_experts"])
    if "shared_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if family == "hunyuan_v1_moe":
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    if family == "llama4_text":
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    if family == "ernie4_5_moe":
        _ernie_keys(writer, config)
    if family == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
    if family == "lfm2_moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
    if family in ("glm4_moe", "minimax_m2", "deepseek_v3", "lfm2_moe"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if family in ("glm4_moe", "deepseek_v2", "deepseek_v3", "mistral4", "exaone_moe"):
        writer.add_expert_shared_count(config[f"{'num' if family == 'exaone_moe' else 'n'}_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if family in ("glm4_moe", "deepseek_v3", "mistral4", "exaone_moe") and config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)


def _ernie_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"] // config["num_key_value_heads"])


def _latent_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(rope)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    if (weight := config["rope_parameters"].get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * weight)


def unstacked(tensors: Tensors, config: Config, split_expansion: bool) -> Tensors:
    """The checkpoint's tensors as the converter hands them to its table of names."""
    found: Tensors = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: _number(item[0])):
        if match := _EXPERT.fullmatch(name):
            module = match[1].replace("block_sparse_moe", "mlp")
            if module.startswith("backbone."):
                module = module.replace("backbone", "model").replace("mixer", "mlp")
            experts.setdefault(f"{module}.experts.{_MIXTRAL.get(match[3], match[3])}.weight", []).append(
                tensor
            )
        elif name.endswith(".router.scale"):
            found[name.replace("router.scale", "router.proj.scale")] = tensor
        elif name.endswith(".per_expert_scale"):
            found[name.replace("router.per_expert_scale", "experts.down_proj.scale")] = tensor
        elif ".experts." in name and config["model_type"] in ("mistral4", "gemma4_text"):
            found[f"{name}.weight"] = tensor
        elif ".experts." in name and config["model_type"] == "llama4_text":
            found |= _of_llama4(name, tensor.transpose(1, 2))
        elif ".experts." in name:  # gpt-oss
            found |= _of_gpt_oss(name, tensor)
        elif name.endswith("kv_b_proj.weight") and split_expansion:
            heads, plain, value = (
                config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
            )
            both = tensor.view(heads, plain + value, -1)
            found[name.replace("kv_b_proj", "k_b_proj")] = both[:, :plain].transpose(1, 2)
            found[name.replace("kv_b_proj", "v_b_proj")] = both[:, plain:]
        elif name.endswith("_linear.weight"):
            found |= _of_granite(name, tensor, config)
        elif name.endswith("e_score_correction_bias"):
            found[name.replace("_bias", ".bias")] = tensor
        elif name.endswith(".expert_bias"):
            found[f"{name}.bias"] = tensor
        elif name.endswith(".sinks"):
            found[f"{name}.weight"] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack(each) for name, each in experts.items()}


def _number(name: str) -> int:
    match = _EXPERT.fullmatch(name)
    return int(match[2]) if match else -1


def _of_granite(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    """The experts' stacks, and the shared expert, which without experts is the MLP."""
    if "shared_mlp" in name:
        stem = name.split("shared_mlp")[0] + (
            "mlp" if not config["num_local_experts"] else "mlp.shared_expert"
        )
    else:
        stem = name.split("block_sparse_moe")[0] + "mlp.experts"
    if name.endswith("output_linear.weight"):
        return {f"{stem}.down_proj.weight": tensor}
    gate, up = tensor.chunk(2, dim=-2)
    return {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}


def _of_llama4(name: str, tensor: torch.Tensor) -> Tensors:
    if name.endswith("down_proj"):
        return {f"{name}.weight": tensor}
    gate, up = tensor.chunk(2, dim=1)
    return {
        name.replace("gate_up_proj", "gate_proj.weight"): gate,
        name.replace("gate_up_proj", "up_proj.weight"): up,
    }


def _of_gpt_oss(name: str, tensor: torch.Tensor) -> Tensors:
    kind = "bias" if name.endswith("_bias") else "weight"
    rows = tensor if kind == "bias" else tensor.transpose(1, 2)
    stack = name.removesuffix("_bias")
    if stack.endswith("down_proj"):
        return {f"{stack}.{kind}": rows}
    return {
        f"{stack.replace('gate_up_proj', part)}.{kind}": rows[:, first::2]
        for part, first in (("gate_proj", 0), ("up_proj", 1))
    }
