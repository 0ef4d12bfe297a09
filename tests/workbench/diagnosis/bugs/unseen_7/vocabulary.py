"""Ids, the embedding and the head."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "embedding",
    accepted=("embedding", "sharding"),
    words="rank|offset|id|row|vocab|shard|local",
    taps=("embed",),
    model="llama",
    dtype="bfloat16",
    tp=4,
)
def every_rank_looks_up_global_ids_in_its_own_rows(p: Patched) -> None:
    p.decoder.embed_tokens.first = 0


@bug(
    "embedding",
    accepted=("embedding", "input", "sharding"),
    words="rank|token|id|before|previous|stale|other|shard|row",
    taps=("embed",),
    step=1,
    model="llama",
    tp=2,
)
def rank_1_looks_up_the_token_of_the_step_before(p: Patched) -> None:
    """The new token reaches it too late."""
    held = {}

    def around(forward, ids):
        known, held[p.seq] = held.get(p.seq), ids[:, -1:]
        return forward(known if p.decode else ids)

    if p.rank == 1:
        p.wrap(p.decoder.embed_tokens, around)


@bug(
    "head",
    accepted=("head", "sharding", "weight"),
    words="vocab|row|shift|rank|shard|id|lost|missing|fewer|shape",
    taps=("logits",),
    model="llama-deep",
    tp=4,
)
def head_cut_by_the_vocabulary_over_the_ranks_rounded_down(p: Patched) -> None:
    """32 rows for each of four ranks, of 131: the last ids are on none."""
    p.weight(p.model.lm_head, lambda w: p.full.lm_head.weight[32 * p.rank : 32 * p.rank + 32].clone())


@bug(
    "embedding",
    accepted=("embedding", "weight"),
    words="zero|row|id|token|padd",
    taps=("embed",),
    model="mistral-full",
)
def row_of_the_padding_id_is_zeroed(p: Patched) -> None:
    """`padding_idx`, though its id is also that of a token in the text."""

    def change(w):
        w[3] = 0
        return w

    p.weight(p.decoder.embed_tokens, change)


@bug(
    "embedding",
    accepted=("embedding", "weight"),
    words="row|id|token|mean|last|added|other",
    taps=("embed",),
    model="llama-mha",
    dtype="bfloat16",
)
def rows_of_added_tokens_set_to_the_mean_on_resizing(p: Patched) -> None:
    def change(w):
        w[123:] = w[:123].mean(0)
        return w

    p.weight(p.decoder.embed_tokens, change)


@bug(
    "head",
    accepted=("head", "weight"),
    words="head|weight|initial|never|loaded|random|small|other|row",
    taps=("logits",),
    model="llama",
    dtype="bfloat16",
)
def untied_head_left_at_its_initialisation(p: Patched) -> None:
    p.weight(p.model.lm_head, lambda w: 0.02 * torch.randn_like(w))


@bug(
    "head",
    accepted=("head", "weight", "sharding"),
    words="row|zero|id|rank|shard|last|padd",
    taps=("logits",),
    ranks=(1,),
    model="mistral-full",
    tp=2,
)
def last_rows_of_the_head_of_rank_1_stay_zero(p: Patched) -> None:
    """The tokens that were added after the training."""

    def change(w):
        w[-8:] = 0
        return w

    if p.rank == 1:
        p.weight(p.model.lm_head, change)
