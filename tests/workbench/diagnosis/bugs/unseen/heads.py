"""Grouped queries: which KV head a query head reads."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched, repeat

HEADS = ("heads",)
WORDS = "head"


@bug("heads", accepted=HEADS, words=WORDS, taps=("attn.scores",), step=1, model="llama")
def decode_kernel_takes_heads_modulo(p: Patched) -> None:
    def read(kv: Tensor, groups: int) -> Tensor:
        return kv.repeat(1, groups, 1, 1) if p.decode else repeat(kv, groups)

    p.attention(keys=read, values=read)


@bug(
    "heads",
    accepted=("heads", "context"),
    words="head|value",
    taps=("attn.context",),
    model="qwen3",
)
def values_expanded_unlike_keys(p: Patched) -> None:
    p.attention(values=lambda v, groups: v.repeat(1, groups, 1, 1))


@bug("heads", accepted=HEADS, words=WORDS, taps=("attn.scores",), heads=(3,), model="qwen2-tied")
def group_boundary_counted_from_one(p: Patched) -> None:
    """(h + 1) / groups: the last head of a group already reads the next KV head."""

    def read(kv: Tensor, groups: int) -> Tensor:
        heads = torch.arange(1, kv.shape[1] * groups + 1) // groups
        return kv[:, heads.clamp(max=kv.shape[1] - 1)]

    p.attention(keys=read, values=read)


@bug(
    "heads",
    accepted=("heads", "sharding"),
    words=WORDS,
    taps=("attn.scores",),
    heads=(4, 5),
    ranks=(1,),
    model="llama",
    tp=2,
)
def global_head_number_on_the_local_keys(p: Patched) -> None:
    def read(kv: Tensor, groups: int) -> Tensor:
        local = kv.shape[1]
        heads = (torch.arange(local * groups) + p.rank * local * groups) // groups
        return kv[:, heads.clamp(max=local - 1)]

    p.attention(keys=read, values=read)


@bug("heads", accepted=HEADS, words=WORDS, taps=("attn.scores",), model="mistral-full")
def group_size_of_another_model_compiled_in(p: Patched) -> None:
    """Four query heads to a KV head: with groups of two the upper half of the KV heads is never read."""

    def read(kv: Tensor, groups: int) -> Tensor:
        return kv[:, torch.arange(kv.shape[1] * groups) // 4]

    p.attention(keys=read, values=read)
