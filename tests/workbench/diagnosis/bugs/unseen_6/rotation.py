"""Rotary positions."""

from __future__ import annotations

import math

import torch

from tests.workbench.diagnosis.bugs.bug import ROTATED, bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "rope",
    accepted=("positions", "rope"),
    words="position|offset",
    taps=ROTATED,
    step=1,
    model="qwen3",
    dtype="bfloat16",
)
def decode_position_is_the_length_with_the_new_token(p: Patched) -> None:
    p.positions(lambda positions: positions + int(p.decode))


@bug(
    "rope",
    accepted=("positions", "rope"),
    words="position|offset",
    taps=ROTATED,
    model="qwen2-untied",
)
def positions_of_the_second_prompt_begin_at_one(p: Patched) -> None:
    """The running sum of its mask, of which one was not taken off; decode goes by the length."""
    p.positions(lambda positions: positions + int(p.seq == 1 and not p.decode))


@bug(
    "rope",
    accepted=("rope",),
    words="scal|llama3|frequenc|twice|factor",
    taps=ROTATED,
    model="llama-llama3",
    tp=2,
)
def llama3_scaling_applied_to_frequencies_already_scaled(p: Patched) -> None:
    p.frequencies(lambda inverse: torch.where(2 * math.pi / inverse > 32, inverse / 8, inverse))


@bug(
    "rope",
    accepted=("rope", "positions"),
    words="not rotated|never|without|position|skip|unrotated|missing|identity|not applied",
    taps=("attn.q_rope",),
    step=1,
    model="qwen2-kv8",
    tp=4,
)
def decoded_query_takes_its_index_in_the_step_for_a_position(p: Patched) -> None:
    """It is always 0."""

    def rotate(apply, q, k, cos, sin):
        turned = apply(q, k, cos, sin)
        return (q, turned[1]) if p.decode else turned

    p.rotate(rotate)


@bug(
    "rope",
    accepted=("rope",),
    words="interleav|neighbour|adjacent|pairs|halves",
    taps=ROTATED,
    ranks=(1,),
    model="mistral-full",
    tp=2,
)
def rank_1_turns_neighbours_as_pairs(p: Patched) -> None:
    """Its config is another copy."""

    def rotate(_, q, k, cos, sin):
        cos, sin = (table[:, None, :, : q.shape[-1] // 2] for table in (cos, sin))

        def turned(x):
            even, odd = x[..., ::2], x[..., 1::2]
            return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)

        return turned(q), turned(k)

    if p.rank == 1:
        p.rotate(rotate)


@bug(
    "rope",
    accepted=("positions", "rope"),
    words="position|offset",
    taps=ROTATED,
    model="llama",
)
def second_chunk_begins_a_position_late(p: Patched) -> None:
    """Chunks of eight tokens."""
    p.positions(lambda at: at if p.decode else at + (at >= 8).to(at.dtype))
