"""Embedding, head and vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched

IDS = r"\bids?\b|token|row|embed|zero"


@bug("vocabulary", accepted=("embedding", "weight"), words=IDS, taps=("embed",), model="llama")
def row_of_the_padding_id_zeroed(p: Patched) -> None:
    """An Embedding was made with padding_idx=3, for a tokenizer that uses 3 as a word."""

    def zero(weight: Tensor) -> Tensor:
        weight[3] = 0
        return weight

    p.weight(p.decoder.embed_tokens, zero)


@bug("vocabulary", accepted=("embedding", "weight"), words=IDS, taps=("embed",), model="qwen2-untied")
def added_tokens_drawn_anew_by_a_resize(p: Patched) -> None:
    def resize(weight: Tensor) -> Tensor:
        weight[128:] = 0.02 * torch.randn(3, weight.shape[1])
        return weight

    p.weight(p.decoder.embed_tokens, resize)


@bug("vocabulary", accepted=("head", "scale"), words="factor|scale|multipl", taps=("logits",), model="llama")
def logit_scale_of_another_family(p: Patched) -> None:
    p.output(p.model.lm_head, lambda logits: logits * 0.0625)


@bug("vocabulary", accepted=("head", "scale"), words="cap|tanh", taps=("logits",), model="qwen3")
def logits_capped_softly(p: Patched) -> None:
    p.output(p.model.lm_head, lambda logits: 30 * (logits / 30).tanh())


@bug(
    "vocabulary",
    accepted=("head", "input"),
    words="token|row|position|last|input",
    taps=("logits",),
    model="qwen2-tied",
)
def head_reads_the_token_before_the_last(p: Patched) -> None:
    """The index of a sequence's last row is one too small where it has several."""
    held: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        held[:] = [x]
        return x

    p.output(p.decoder.norm, keep)
    p.input(p.model.lm_head, lambda x: x if p.decode else held[0][:, -2:-1])


@bug(
    "vocabulary",
    accepted=("embedding", "sharding"),
    words=IDS + "|offset|shift|rank",
    taps=("embed",),
    model="llama",
    tp=2,
)
def ids_of_rank_1_begin_one_too_late(p: Patched) -> None:
    if p.rank == 1:
        p.decoder.embed_tokens.first += 1


@bug(
    "vocabulary",
    accepted=("embedding", "input"),
    words=IDS,
    taps=("embed",),
    step=1,
    model="qwen3",
    tp=2,
)
def rank_1_still_holds_the_ids_of_the_step_before(p: Patched) -> None:
    held: dict[int, Tensor] = {}

    def around(forward: Any, ids: Tensor) -> Tensor:
        before = held.get(p.seq)
        held[p.seq] = ids[:, -1:]
        out: Tensor = forward(ids if before is None else before)
        return out

    if p.rank == 1:
        p.wrap(p.decoder.embed_tokens, around)


@bug(
    "vocabulary",
    accepted=("head", "sharding", "weight"),
    words="row|shift|offset|rank|shard|moved|head",
    taps=("logits",),
    ranks=(1,),
    model="llama",
    tp=2,
)
def head_shards_cut_for_a_padded_vocabulary(p: Patched) -> None:
    """134 / 2 = 67 rows a rank, where the embedding has 66."""
    if p.rank == 1:
        rows = torch.nn.functional.pad(p.full.lm_head.weight[67:], (0, 0, 0, 1))
        p.weight(p.model.lm_head, lambda _: rows)


@bug(
    "vocabulary",
    accepted=("weight", "precision", "head"),
    words="weight|precision|quant|round",
    taps=("logits",),
    model="mistral-full",
)
def head_quantised_to_four_bits_unasked(p: Patched) -> None:
    def rounded(weight: Tensor) -> Tensor:
        scale = weight.abs().amax(-1, keepdim=True) / 7
        return (weight / scale).round() * scale

    p.weight(p.model.lm_head, rounded)
