"""Megatron-core's names of parameters in those of the checkpoint, and its stack of queries, keys and values."""

from __future__ import annotations

import re

from lockstep.engine.parallel.shards import Span

#: In Megatron's name -> in the checkpoint's, the first that is there.
_WORDS = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    ("pre_mlp_layernorm", "post_attention_layernorm"),
    ("self_attention.linear_qkv", "self_attn.linear_qkv"),
    ("self_attention.linear_proj", "self_attn.o_proj"),
    ("self_attention.q_layernorm", "self_attn.q_norm"),
    ("self_attention.k_layernorm", "self_attn.k_norm"),
    ("mlp.linear_fc1", "mlp.gate_up_proj"),
    ("mlp.linear_fc2", "mlp.down_proj"),
)
_LAYER = re.compile(r"(?:^|.*\.)decoder\.(layers\.\d+\.)(.+)", re.ASCII)
_OUTSIDE = (
    ("embedding.word_embeddings", "embed_tokens"),
    ("decoder.final_layernorm", "norm"),
    ("output_layer", "lm_head"),
)
#: The module that has queries, keys and values group by group.
GROUPED = "self_attn.linear_qkv"


def plain_name(name: str) -> str:
    """A name of Megatron-core's in words of the checkpoint's; any other as it is."""
    if match := _LAYER.fullmatch(name):
        local = match[2]
        found = next(((there, here) for there, here in _WORDS if local.startswith(there)), None)
        return match[1] + (local if found is None else found[1] + local[len(found[0]) :])
    for there, here in _OUTSIDE:
        if f".{name}".endswith((f".{there}.weight", f".{there}.bias")):
            return f"{here}.{name.rpartition('.')[2]}"
    return name


def grouped_rows(
    wholes: tuple[int, int, int], local: int, head_dim: int, rank: int, size: int
) -> list[tuple[int, Span, Span]]:
    """Of `local` rows in which each group of heads has its queries, then its key and its value: (0 of queries, 1 of
    keys, 2 of values; the rows in memory; those of the parameter). [] where they are no part of it."""
    groups, per_group = wholes[1] // head_dim, sum(wholes) * head_dim // wholes[1]
    if wholes[1] != wholes[2] or wholes[1] % head_dim or local % per_group or local * size not in (
        sum(wholes), sum(wholes) * size
    ):  # fmt: skip
        return []
    mine = local // per_group
    first = 0 if mine == groups else rank * mine
    queries = wholes[0] // groups
    found = []
    for i in range(mine):
        start = i * per_group
        for which, (at, count) in enumerate(
            ((0, queries), (queries, head_dim), (queries + head_dim, head_dim))
        ):
            taken = (first + i) * count
            found.append((which, Span(start + at, start + at + count), Span(taken, taken + count)))
    return found
