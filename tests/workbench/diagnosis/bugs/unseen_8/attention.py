"""Attention: scale, heads, softmax."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched, repeat, softmax


@bug(
    "attention",
    accepted=("scale", "scores"),
    words="scale|sqrt|factor|times|divid",
    taps=("attn.scores",),
    model="qwen2-untied",
    dtype="bfloat16",
)
def long_prompts_take_a_kernel_without_the_scale(p: Patched) -> None:
    """It is chosen for more than eight new tokens."""
    p.attention(scale=lambda scores, scaling: scores if p.new > 8 else scores * scaling)


@bug(
    "heads",
    accepted=("heads", "scores"),
    words="head|group|repeat",
    taps=("attn.scores",),
    layers=(2,),
    step=1,
    model="llama",
)
def last_layer_decodes_with_its_heads_divided_twice(p: Patched) -> None:
    """The cache is read as if its heads had been repeated before they were written."""

    def expand(kv, groups):
        heads = torch.arange(kv.shape[1] * groups) // groups
        return kv[:, heads // groups] if p.decode else repeat(kv, groups)

    p.attention((2,), keys=expand, values=expand)


@bug(
    "heads",
    accepted=("heads", "scores"),
    words="head|group|other|swap|exchang|order",
    taps=("attn.scores",),
    heads=(4, 5),
    ranks=(1,),
    model="mistral-full",
    tp=2,
)
def second_rank_s_first_queries_read_its_second_kv_head(p: Patched) -> None:
    """The offset of the rank's query heads is taken off in heads of the cache."""

    def expand(kv, groups):
        return kv[:, [1, 1, 1, 1]] if p.rank == 1 else repeat(kv, groups)

    p.attention(keys=expand, values=expand)


@bug(
    "attention",
    accepted=("softmax", "attention"),
    words="softmax|sum|normali|divid|denominator|one",
    taps=("attn.probs",),
    heads=(7,),
    step=1,
    model="llama-mha",
)
def last_head_is_not_divided_by_its_sum_in_decode(p: Patched) -> None:
    def change(scores):
        probs = softmax(scores)
        if p.decode:
            probs[:, 7] = (scores[:, 7] - scores[:, 7].amax(-1, keepdim=True)).exp()
        return probs

    p.attention(softmax=change)
