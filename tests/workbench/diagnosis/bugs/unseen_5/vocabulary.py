"""Tokens, embedding and head."""

from __future__ import annotations

import math

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "embedding",
    accepted=("embedding", "input"),
    words="token|id|row|embed",
    taps=("embed",),
    step=1,
    model="mistral-window",
)
def second_sequence_reads_the_decoded_token_of_the_first(p: Patched) -> None:
    held = {}

    def around(forward, ids):
        if p.seq == 0:
            held["ids"] = ids
        return forward(held["ids"] if p.decode else ids)

    p.wrap(p.decoder.embed_tokens, around)


@bug(
    "embedding",
    accepted=("embedding", "input"),
    words="token|id|row|embed",
    taps=("embed",),
    step=2,
    model="qwen2-tied",
    dtype="bfloat16",
)
def placeholder_is_read_for_a_token_not_yet_sampled(p: Patched) -> None:
    """From the second decode step on the next step is prepared before the last has ended."""
    p.wrap(p.decoder.embed_tokens, lambda forward, ids: forward(0 * ids if p.step > 1 else ids))


@bug(
    "head",
    accepted=("head", "mask"),
    words="inf|mask|suppress|forbid|logit|id",
    taps=("logits",),
    step=1,
    model="llama",
)
def bitmask_of_another_grammar_on_the_second_sequence(p: Patched) -> None:
    """Every other word of 32 ids is forbidden."""

    def change(logits):
        if p.seq == 1 and p.decode:
            forbidden = torch.arange(logits.shape[-1]) // 32 % 2 == 1
            logits = logits.masked_fill(forbidden, -math.inf)
        return logits

    p.output(p.model.lm_head, change)


@bug(
    "head",
    accepted=("head", "input"),
    words="token|mean|average|input|reads|row",
    taps=("logits",),
    model="qwen3",
    tp=2,
)
def head_reads_the_mean_of_the_prompt(p: Patched) -> None:
    """The pooler of an embedding model."""
    held = {}
    p.wrap(p.decoder.norm, lambda forward, x: held.update(y=forward(x)) or held["y"])
    p.wrap(p.model.lm_head, lambda forward, x: forward(held["y"].mean(1, keepdim=True)))


@bug(
    "head",
    accepted=("head", "input"),
    words="sequence|logit|row|input|reads|head",
    taps=("logits",),
    step=1,
    model="mistral-full",
    dtype="bfloat16",
)
def second_sequence_is_answered_with_the_logits_of_the_first(p: Patched) -> None:
    held = {}

    def around(forward, x):
        logits = forward(x)
        if p.seq == 0:
            held["logits"] = logits
        return held["logits"].clone() if p.decode else logits

    p.wrap(p.model.lm_head, around)
