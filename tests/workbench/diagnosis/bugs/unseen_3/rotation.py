"""Rotation: batches packed into one, drafts that were rejected, long contexts, heads that a kernel leaves out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import ROTATED, bug
from tests.workbench.diagnosis.bugs.patched import Patched

Turned = tuple[Tensor, Tensor]


@bug(
    "rope",
    accepted=("rope",),
    words="yarn|scal|frequenc|interpolat|ramp|theta|base",
    taps=ROTATED,
    model="llama-yarn",
)
def yarn_interpolates_the_fast_pairs_and_leaves_the_slow(p: Patched) -> None:
    """beta_fast and beta_slow are mistaken for each other: the ramp runs the other way."""
    plain = 1 / 1e4 ** (torch.arange(0, 8, 2).float() / 8)
    p.frequencies(lambda right: plain + plain / 8 - right)


@bug("rope", accepted=("positions", "rope"), words="position", taps=ROTATED, model="qwen2-untied")
def packed_prompts_share_one_count_of_positions(p: Patched) -> None:
    """The second prompt goes on where the first, of 13 tokens, ended."""
    p.positions(lambda at: at + 13 if p.seq == 1 else at)


@bug("rope", accepted=("positions", "rope"), words="position", taps=ROTATED, step=3, model="llama")
def rejected_drafts_still_count_in_the_positions(p: Patched) -> None:
    p.positions(lambda at: at + 2 if p.step >= 3 else at)


@bug(
    "rope",
    accepted=("positions", "rope", "precision"),
    words="position|round|precis|bfloat16|bf16|angle",
    taps=ROTATED,
    model="llama-long",
)
def positions_held_in_bfloat16(p: Patched) -> None:
    """Exact up to 256; then every second number."""
    p.positions(lambda at: at.bfloat16().long())


@bug(
    "rope",
    accepted=("rope", "positions"),
    words="zero|table|length|beyond|past|position|from \\d+",
    taps=ROTATED,
    model="llama-long",
)
def table_of_angles_filled_up_to_256(p: Patched) -> None:
    def table(rotary: Any, x: Tensor, at: Tensor) -> Turned:
        cos, sin = rotary(x, at)
        filled = (at < 256)[..., None]
        return cos * filled, sin * filled

    p.angles(table)


@bug(
    "rope",
    accepted=("rope", "heads", "positions"),
    words="not rotated|unrotated|never|without|missing|skip|left|zero|position 0",
    taps=("attn.q_rope",),
    heads=(2, 3, 6, 7),
    model="llama",
    tp=2,
)
def rotation_launched_over_as_many_query_heads_as_there_are_keys(p: Patched) -> None:
    def rotate(apply: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Turned:
        heads = k.shape[1]
        turned, k = apply(q[:, :heads], k, cos, sin)
        return torch.cat([turned, q[:, heads:]], 1), k

    p.rotate(rotate)


@bug(
    "rope",
    accepted=("rope", "positions"),
    words="not rotated|unrotated|never|without|missing|skip|not applied|NoPE|zero|position 0",
    taps=ROTATED,
    layers=(3,),
    model="llama-deep",
    dtype="bfloat16",
)
def every_fourth_layer_goes_without_positions(p: Patched) -> None:
    """As Llama 4 and SmolLM3 do."""
    p.rotate(lambda apply, q, k, cos, sin: (q, k), (3,))
