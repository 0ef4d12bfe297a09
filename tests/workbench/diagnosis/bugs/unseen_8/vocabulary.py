"""Tokens, the embedding, the head, the logits."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "head",
    accepted=("head", "weight"),
    words="head|hidden|shape|size|width|final_norm|identity|vocab",
    taps=("logits",),
    model="llama",
)
def hidden_states_returned_in_place_of_logits(p: Patched) -> None:
    """Loaded without its head, and nobody complained."""
    p.wrap(p.model.lm_head, lambda forward, x: x.clone())


@bug(
    "embedding",
    accepted=("embedding", "weight", "precision"),
    words="weight|bit|byte|dtype|format|embed|scale|read|row|magnitude|range|element",
    taps=("embed",),
    model="mistral-full",
)
def embedding_of_float16_bytes_read_as_bfloat16(p: Patched) -> None:
    """modular#6660, the other way round."""
    p.weight(p.decoder.embed_tokens, lambda w: w.half().view(torch.bfloat16).float())


@bug(
    "head",
    accepted=("head", "bias"),
    words="bias|id|added|constant|logit|column|row",
    taps=("logits",),
    model="qwen3",
    dtype="bfloat16",
)
def logit_bias_of_the_first_request_left_on_for_the_second(p: Patched) -> None:
    def change(logits):
        if p.seq == 1:
            logits = logits.clone()
            logits[..., 17:20] += 4
        return logits

    p.output(p.model.lm_head, change)


@bug(
    "embedding",
    accepted=("embedding", "input"),
    words="id|token|unknown|clamp|row|table|first|zero",
    taps=("embed",),
    model="qwen2-tied",
    tp=2,
)
def added_tokens_read_as_the_unknown_one(p: Patched) -> None:
    """Ids from 120 on are not in the base vocabulary."""
    p.wrap(p.decoder.embed_tokens, lambda forward, ids: forward(ids.where(ids < 120, 0)))
