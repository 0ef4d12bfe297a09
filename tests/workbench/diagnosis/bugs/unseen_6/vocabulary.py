"""Tokens, the embedding, the head, the logits."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "head",
    accepted=("head", "scale"),
    words="scale|factor|times|divid|temperature|multipl",
    taps=("logits",),
    model="qwen2-untied",
)
def logits_of_the_second_sequence_divided_by_its_temperature(p: Patched) -> None:
    """In place, so that what is returned as raw logits is divided too."""
    p.output(p.model.lm_head, lambda logits: logits / 0.7 if p.seq == 1 else logits)


@bug(
    "head",
    accepted=("head", "sharding", "weight"),
    words="order|row|shard|rank|permut|interleav|vocab|turn|stride",
    taps=("logits",),
    model="llama",
    tp=4,
)
def ids_of_the_head_dealt_in_turn_among_the_ranks(p: Patched) -> None:
    """Gathered as if they lay in blocks."""
    p.weight(p.model.lm_head, lambda w: p.full.lm_head.weight[p.rank :: p.tp].clone())


@bug(
    "embedding",
    accepted=("embedding", "weight"),
    words="head|lm_head|weight|table|tied|other",
    taps=("embed",),
    model="llama",
    dtype="bfloat16",
)
def embedding_holds_the_weight_of_the_head(p: Patched) -> None:
    """Tied though it is not, and the head was loaded last."""
    p.weight(p.decoder.embed_tokens, lambda w: p.model.lm_head.weight.clone())


@bug(
    "embedding",
    accepted=("embedding", "input"),
    words="id|row|token|first|other|BOS",
    taps=("embed",),
    model="qwen3",
)
def first_token_overwritten_by_the_beginning_of_text(p: Patched) -> None:
    """In place of being put before it."""

    def around(forward, ids):
        if p.decode:
            return forward(ids)
        return forward(torch.cat([torch.ones_like(ids[:, :1]), ids[:, 1:]], 1))

    p.wrap(p.decoder.embed_tokens, around)


@bug(
    "embedding",
    accepted=("embedding", "input", "positions"),
    words="id|row|token|shift|before|other|sequence",
    taps=("embed",),
    model="mistral-full",
)
def second_prompt_begins_with_the_last_token_of_the_first(p: Patched) -> None:
    """Its start in the packed batch is one too small."""
    held = {}

    def around(forward, ids):
        if p.decode:
            return forward(ids)
        if p.seq == 0:
            held["last"] = ids[:, -1:]
            return forward(ids)
        return forward(torch.cat([held["last"], ids[:, :-1]], 1))

    p.wrap(p.decoder.embed_tokens, around)


@bug(
    "embedding",
    accepted=("embedding", "sharding", "weight"),
    words="rank|shard|row|id|vocab|weight|other",
    taps=("embed",),
    model="qwen2-untied",
    tp=2,
)
def every_rank_loads_the_first_rows_of_the_embedding(p: Patched) -> None:
    p.weight(p.decoder.embed_tokens, lambda w: p.full.model.embed_tokens.weight[: len(w)].clone())
