"""Attention: scale, heads, softmax, context."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched, repeat, softmax


@bug(
    "attention",
    accepted=("context", "attention", "heads", "softmax"),
    words="split|prefix|suffix|part|merg|join|head|context|value|combin",
    taps=("attn.context",),
    step=1,
    model="llama",
)
def suffix_of_each_head_read_by_the_stride_of_a_padded_prefix(p: Patched) -> None:
    """local-inference-lab/vllm#17: two contexts are merged; a head of the first is padded from eight to twelve."""

    def context(probs, v):
        if not p.decode:
            return probs @ v
        share = probs[..., 4:].sum(-1, keepdim=True)
        suffix = probs[..., 4:] @ v[:, :, 4:] / share
        at = torch.arange(8)[:, None] * 12 + torch.arange(8)
        read = suffix.flatten()[at % 64].view_as(suffix)
        return probs[..., :4] @ v[:, :, :4] + share * read

    p.attention(context=context)


@bug(
    "attention",
    accepted=("scores", "scale"),
    words="scale|sqrt|root|factor|times|divid",
    taps=("attn.scores",),
    model="qwen2-untied",
    dtype="bfloat16",
)
def root_of_the_scale_reaches_the_queries_alone(p: Patched) -> None:
    """Each side is to be multiplied by it, and the keys come from another kernel."""
    p.attention(scale=lambda scores, scaling: scores * scaling**0.5)


@bug(
    "heads",
    accepted=("context", "heads", "attention"),
    words="head|group|order|revers|permut|exchang|swap",
    taps=("attn.context",),
    model="qwen3-bias",
)
def queries_of_a_group_written_back_in_reverse(p: Patched) -> None:
    def context(probs, v):
        return (probs @ v).unflatten(1, (-1, 4)).flip(2).flatten(1, 2)

    p.attention(context=context)


@bug(
    "heads",
    accepted=("heads", "scores"),
    words="KV head|head|group|order|swap|exchang|pair",
    taps=("attn.scores",),
    step=1,
    model="llama",
)
def second_sequence_decodes_with_neighbouring_kv_heads_exchanged(p: Patched) -> None:
    """A swizzle of the grid that has an odd row of the batch go the other way."""

    def expand(kv, groups):
        return repeat(kv[:, [1, 0, 3, 2]] if p.decode and p.seq == 1 else kv, groups)

    p.attention(keys=expand, values=expand)


@bug(
    "heads",
    accepted=("context", "heads"),
    words="head|group|value|repeat|other",
    taps=("attn.context",),
    heads=(5,),
    ranks=(1,),
    model="mistral-full",
    tp=2,
)
def one_query_head_of_rank_1_takes_the_values_of_the_next_group(p: Patched) -> None:
    def values(kv, groups):
        return kv[:, [0, 1, 1, 1]] if p.rank == 1 else repeat(kv, groups)

    p.attention(values=values)


@bug(
    "attention",
    accepted=("softmax", "mask", "scores"),
    words="softmax|spars|skip|threshold|drop|zero|block|small|mask|key|tile",
    taps=("attn.probs",),
    step=1,
    model="qwen2-kv8",
    dtype="bfloat16",
)
def decode_skips_blocks_of_keys_with_small_scores(p: Patched) -> None:
    """Blocks of four whose maximum is more than a half below the row's, a threshold for other models."""

    def change(scores):
        if not p.decode:
            return softmax(scores)
        pad = -scores.shape[-1] % 4
        blocks = torch.nn.functional.pad(scores.float(), (0, pad), value=-1e9).unflatten(-1, (-1, 4))
        highest = blocks.amax(-1, keepdim=True)
        skipped = highest < highest.amax(-2, keepdim=True) - 0.5
        kept = blocks.masked_fill(skipped, -1e9).flatten(-2)
        return kept[..., : scores.shape[-1]].softmax(-1).to(scores.dtype)

    p.attention(softmax=change)


@bug(
    "attention",
    accepted=("softmax",),
    words="softmax|sum|normali|divid|denominator|one",
    taps=("attn.probs",),
    model="qwen3",
)
def sum_of_the_exponentials_starts_anew_at_the_second_tile(p: Patched) -> None:
    """Tiles of four keys; the values of the first are counted, their share in the sum is not."""

    def change(scores):
        powers = (scores - scores.amax(-1, keepdim=True)).exp()
        later = powers[..., 4:].sum(-1, keepdim=True)
        return powers / later.where(later > 0, powers.sum(-1, keepdim=True))

    p.attention(softmax=change)


@bug(
    "attention",
    accepted=("scores", "scale"),
    words="scale|sqrt|root|factor|times|divid|head.dim",
    taps=("attn.scores",),
    ranks=(0,),
    model="llama-mha",
    dtype="bfloat16",
    tp=4,
)
def rank_0_divides_by_the_head_dim_and_not_its_root(p: Patched) -> None:
    if p.rank == 0:
        p.attention(scale=lambda scores, scaling: scores * scaling**2)


@bug(
    "attention",
    accepted=("scores", "attention"),
    words="product|dimension|order|permut|pair|swap|exchang|element|quer|head",
    taps=("attn.scores",),
    heads=(7,),
    model="qwen3",
    dtype="float16",
)
def halves_of_each_packed_word_of_the_last_query_head_exchanged(p: Patched) -> None:
    """Two numbers of 16 bits in a register; a tile of one head is loaded in the other order."""

    def product(q, k):
        last = q[:, 7:].unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return torch.cat([q[:, :7], last], 1) @ k.transpose(2, 3)

    p.attention(product=product)


@bug(
    "attention",
    accepted=("softmax", "scores", "attention", "input"),
    words="layer|other|softmax|probabilit|reus|below|before|same",
    taps=("attn.probs",),
    layers=(2,),
    model="qwen2-kv8",
    tp=2,
)
def last_layer_reuses_the_probabilities_of_the_one_below(p: Patched) -> None:
    held = {}

    def keep(scores):
        held["probs"] = softmax(scores)
        return held["probs"]

    p.attention((1,), softmax=keep)
    p.attention((2,), softmax=lambda scores: held["probs"])


@bug(
    "attention",
    accepted=("context", "scale", "attention"),
    words="scale|factor|times|multipl|constant|0\\.7",
    taps=("attn.context",),
    layers=(0,),
    ranks=(1,),
    model="llama",
    tp=2,
)
def context_of_rank_1_multiplied_by_the_scale_of_its_values(p: Patched) -> None:
    """They were dequantised when they were read; the first layer's scale alone is not one."""
    if p.rank == 1:
        p.attention((0,), context=lambda probs, v: (probs @ v) * 0.7)


@bug(
    "attention",
    accepted=("scores", "attention", "input", "positions"),
    words="query|queries|token|row|same|repeat|before|score|position|first|shift",
    taps=("attn.scores",),
    model="llama-three",
    dtype="float16",
)
def second_query_of_a_packed_pair_of_tokens_is_the_first(p: Patched) -> None:
    """The mask is that of two tokens; the tile of queries is loaded without the row's own offset."""
    p.attention(product=lambda q, k: q[:, :, torch.arange(q.shape[2]) // 2 * 2] @ k.transpose(2, 3))
