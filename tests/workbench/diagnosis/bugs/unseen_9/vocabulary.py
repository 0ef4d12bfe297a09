"""Tokens, the embedding, the head, the logits."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "embedding",
    accepted=("embedding", "input", "positions"),
    words="order|sort|permut|token|row|id|other|position",
    taps=("embed",),
    model="llama-three",
)
def unique_ids_looked_up_and_never_put_back_in_order(p: Patched) -> None:
    """Rows come in the order of their ids."""
    p.wrap(p.decoder.embed_tokens, lambda forward, ids: forward(ids.sort(-1).values))


@bug(
    "embedding",
    accepted=("embedding", "scale", "norm", "weight"),
    words="scale|factor|row|length|magnitude|norm|clip|weight",
    taps=("embed",),
    model="mistral-full",
)
def rows_of_the_embedding_longer_than_one_are_cut_to_one(p: Patched) -> None:
    """The layer was made with `max_norm=1`; shorter rows stay as they are."""
    p.weight(p.decoder.embed_tokens, lambda w: w / w.norm(dim=1, keepdim=True).clamp(min=1))


@bug(
    "head",
    accepted=("head", "sharding", "weight"),
    words="rank|shard|row|id|offset|shift|late|one",
    taps=("logits",),
    ranks=(2,),
    model="qwen3",
    tp=4,
)
def rank_2_begins_a_row_late_in_the_head(p: Patched) -> None:
    if p.rank == 2:
        p.weight(p.model.lm_head, lambda w: p.full.lm_head.weight.detach()[67:100].clone())


@bug(
    "head",
    accepted=("head", "bias", "scale"),
    words="bias|id|added|constant|logit|column|row|token|penalt|offset",
    taps=("logits",),
    step=1,
    model="llama-mha",
)
def presence_penalty_taken_off_the_raw_logits_of_one_sequence(p: Patched) -> None:
    """From the tokens of its prompt, once there was one that it has generated."""
    read = {}

    def around(forward, ids):
        if not p.decode:
            read[p.seq] = ids[0]
        return forward(ids)

    def change(logits):
        if p.decode and p.seq == 1:
            logits = logits.clone()
            logits[..., read[1]] -= 1.5
        return logits

    p.wrap(p.decoder.embed_tokens, around)
    p.output(p.model.lm_head, change)


@bug(
    "head",
    accepted=("head", "input"),
    words="step|before|stale|input|hidden|other|token|previous|final_norm",
    taps=("logits",),
    step=1,
    model="qwen2-three",
    dtype="bfloat16",
)
def head_reads_the_hidden_state_of_the_step_before(p: Patched) -> None:
    """It runs beside the next step, and nobody tells it that its buffer is filled."""
    held = {}

    def around(forward, x):
        before = held.get(p.seq, x) if p.decode else x
        held[p.seq] = x
        return forward(before)

    p.wrap(p.model.lm_head, around)


@bug(
    "head",
    accepted=("head", "weight"),
    words="order|permut|row|id|chunk|block|other|exchang|shift|moved",
    taps=("logits",),
    model="qwen2-untied",
)
def chunks_of_the_head_joined_in_the_order_of_their_names(p: Patched) -> None:
    """Twelve rows each: 0, 1, 10, 2 and so on."""

    def change(w):
        chunks = w.split(12)
        return torch.cat([chunks[i] for i in sorted(range(len(chunks)), key=str)])

    p.weight(p.model.lm_head, change)
