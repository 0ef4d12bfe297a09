"""Attention: the scale, the heads, the scores, the softmax, the context."""

from __future__ import annotations

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched, repeat


@bug(
    "attention",
    accepted=("scores", "scale"),
    words="scale|sqrt|factor|times|head_dim",
    taps=("attn.scores",),
    model="llama-mha",
    dtype="bfloat16",
)
def scale_forgotten_in_every_layer(p: Patched) -> None:
    p.attention(scale=lambda s, scaling: s)


@bug(
    "attention",
    accepted=("scores", "scale", "sharding"),
    words="scale|sqrt|factor|times|head_dim",
    taps=("attn.scores",),
    model="qwen2-tied",
    tp=2,
)
def scale_from_the_width_cut_among_the_ranks(p: Patched) -> None:
    """head_dim taken for hidden / tp / heads."""
    p.attention(scale=lambda s, scaling: s * scaling * p.tp**0.5)


@bug(
    "attention",
    accepted=("softmax", "heads"),
    words="head",
    taps=("attn.probs",),
    heads=(5,),
    layers=(1,),
    model="mistral-window",
)
def one_head_takes_the_probabilities_of_the_one_before(p: Patched) -> None:
    """Its tile is read before it was written."""

    def softmax(s):
        probs = s.softmax(-1)
        probs[:, 5] = probs[:, 4].clone()
        return probs

    p.attention((1,), softmax=softmax)


@bug(
    "attention",
    accepted=("heads", "scores"),
    words="tile|h % |repeat|interleav|order|KV head|group",
    taps=("attn.scores",),
    step=1,
    model="qwen2-untied",
)
def keys_alone_tiled_by_the_decode_kernel(p: Patched) -> None:
    p.attention(keys=lambda k, groups: k.repeat(1, groups, 1, 1) if p.decode else repeat(k, groups))


@bug(
    "attention",
    accepted=("heads", "sharding"),
    words="KV head|head|group|repeat",
    taps=("attn.scores",),
    model="llama",
    tp=2,
)
def every_rank_reads_its_first_kv_head_alone(p: Patched) -> None:
    """Multi-query attention assumed of the local heads."""

    def first(kv, groups):
        return kv[:, :1].repeat(1, kv.shape[1] * groups, 1, 1)

    p.attention(keys=first, values=first)


@bug(
    "attention",
    accepted=("softmax",),
    words="axis|dim|quer|column|keys|sum",
    taps=("attn.probs",),
    layers=(1,),
    model="qwen3",
)
def softmax_along_the_queries(p: Patched) -> None:
    p.attention((1,), softmax=lambda s: s.softmax(-2))


@bug(
    "attention",
    accepted=("scores", "attention", "heads"),
    words="transpos|order|swap|exchang|quer.*key|key.*quer|K Q|k q",
    taps=("attn.scores",),
    model="qwen3-bias",
)
def operands_of_the_scores_exchanged(p: Patched) -> None:
    """k q^T in place of q k^T: the prefill is square, so nothing fails."""

    def product(q, k):
        s = q @ k.transpose(2, 3)
        return s.transpose(2, 3).contiguous() if q.shape[2] == k.shape[2] else s

    p.attention(product=product)


@bug(
    "attention",
    accepted=("context", "attention", "cache"),
    words="value|key|row|split|block|part|left out|missing|lost|context",
    taps=("attn.context",),
    step=1,
    model="llama-long",
)
def last_split_of_the_keys_never_joined(p: Patched) -> None:
    """Decode over splits of 128 keys: what the last, unfilled one has computed is left out."""

    def context(probs, v):
        return probs[..., :256] @ v[:, :, :256] if p.decode else probs @ v

    p.attention(context=context)
