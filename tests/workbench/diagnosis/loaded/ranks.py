"""Ranks of an engine that fuses and shards as vLLM does, as dumps of their weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

State = dict[str, Tensor]
#: Changes what the ranks hold, in place: a state for each rank.
Bug = Callable[[list[State]], None]


def shard(whole: State, rank: int, size: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> State:
    """What a rank holds: q, k and v in one, gate and up in one, its rows of the padded vocabulary."""

    def rows(name: str, parts: int = size) -> Tensor:
        one = whole[name]
        return one.chunk(parts)[rank * parts // size].clone()

    held: State = {}
    for name, tensor in whole.items():
        if ".k_proj." in name or ".v_proj." in name or ".up_proj." in name:
            continue
        if ".q_proj." in name:
            k, v = (rows(name.replace("q_proj", one), min(size, kv_heads)) for one in ("k_proj", "v_proj"))
            held[name.replace("q_proj", "qkv_proj")] = torch.cat([rows(name), k, v])
        elif ".gate_proj." in name:
            held[name.replace("gate_proj", "gate_up_proj")] = torch.cat(
                [rows(name), rows(name.replace("gate_proj", "up_proj"))]
            )
        elif ".o_proj." in name or ".down_proj." in name:
            held[name] = tensor.chunk(size, 1)[rank].clone()
        elif "embed_tokens" in name or "lm_head" in name:
            padded = torch.cat([tensor, tensor.new_zeros(-len(tensor) % (64 * size), tensor.shape[1])])
            held[name] = padded.chunk(size)[rank].clone()
        else:
            held[name] = tensor.clone()
    return {name: tensor.to(dtype) for name, tensor in held.items()}


def written(dump: Path, states: list[State], **facts: object) -> Path:
    """The folders that the ranks write."""
    for rank, state in enumerate(states):
        folder = dump / f"rank{rank}"
        folder.mkdir(parents=True)
        save_file(
            {name: tensor.contiguous().clone() for name, tensor in state.items()},
            folder / "weights.safetensors",
        )
        reported = {"engine": "stand-in 1", "rank": rank, "size": len(states), **facts}
        (folder / "weights.json").write_text(json.dumps(reported))
    return dump


def whole_of(checkpoint: Path) -> State:
    """The checkpoint's tensors."""
    whole: State = load_file(checkpoint / "model.safetensors")
    return whole
