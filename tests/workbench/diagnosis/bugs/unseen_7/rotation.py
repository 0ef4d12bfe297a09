"""Rotary positions: the base, its scaling, pairs, counts."""

from __future__ import annotations

import math

import torch

from tests.workbench.diagnosis.bugs.bug import ROTATED, bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "rope",
    accepted=("rope",),
    words="theta|base|frequenc",
    taps=ROTATED,
    model="qwen3-kv4",
    dtype="bfloat16",
)
def theta_looked_for_outside_the_rope_parameters(p: Patched) -> None:
    """sglang#14745: the key has moved, and the default is 10 000."""
    p.frequencies(lambda inverse: 1 / 1e4 ** (torch.arange(0, 16, 2).float() / 16))


@bug(
    "rope",
    accepted=("rope",),
    words="interleav|neighbour|adjacent|pairs|halves",
    taps=("attn.q_rope",),
    model="llama",
    dtype="bfloat16",
)
def queries_alone_turn_neighbours_as_pairs(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        c, s = (table[:, None, :, : q.shape[-1] // 2] for table in (cos, sin))
        even, odd = q[..., ::2], q[..., 1::2]
        turned = torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)
        return turned, apply(q, k, cos, sin)[1]

    p.rotate(rotate)


@bug(
    "rope",
    accepted=("positions", "rope"),
    words="position|offset|prompt|restart",
    taps=ROTATED,
    step=1,
    model="qwen2-untied",
)
def positions_of_decode_count_the_generated_tokens_alone(p: Patched) -> None:
    p.positions(lambda at: at * 0 + p.step - 1 if p.decode else at)


@bug(
    "rope",
    accepted=("positions", "rope"),
    words="position|offset|padd",
    taps=ROTATED,
    step=1,
    model="llama-mha",
)
def padding_of_the_shorter_prompt_counted_in_decode(p: Patched) -> None:
    """Seven tokens on its left; the prefill went by the mask, decode goes by the width of the batch."""
    p.positions(lambda at: at + 7 if p.decode and p.seq == 1 else at)


@bug(
    "rope",
    accepted=("rope",),
    words="scal|llama3|frequenc|factor|length|context|band",
    taps=ROTATED,
    model="llama-llama3",
)
def llama3_bands_measured_by_the_extended_context(p: Patched) -> None:
    """256 positions in place of the 32 of the first training."""

    def change(_):
        plain = 1 / 5e5 ** (torch.arange(0, 8, 2).float() / 8)
        ratio = 256 * plain / (2 * math.pi)
        smooth = ((ratio - 1) / 3).clamp(0, 1)
        return (1 - smooth) * plain / 8 + smooth * plain

    p.frequencies(change)


@bug(
    "rope",
    accepted=("rope",),
    words="scal|yarn|frequenc|interpol|factor|linear",
    taps=ROTATED,
    model="llama-yarn",
)
def yarn_taken_for_linear_interpolation(p: Patched) -> None:
    """Only `factor` is read."""
    p.frequencies(lambda _: 1 / 1e4 ** (torch.arange(0, 8, 2).float() / 8) / 8, factor=1.0)


@bug(
    "rope",
    accepted=("rope", "positions"),
    words="scal|factor|twice|linear|frequenc|position",
    taps=ROTATED,
    model="llama-linear",
    dtype="bfloat16",
)
def linear_factor_divides_positions_and_frequencies(p: Patched) -> None:
    p.frequencies(lambda inverse: inverse / 4)


@bug(
    "rope",
    accepted=("norm", "rope"),
    words="norm|order|before|after",
    taps=("attn.q_norm", "attn.k_norm", *ROTATED),
    model="qwen3",
)
def heads_normed_after_their_rotation(p: Patched) -> None:
    for i, _ in p.layers():
        attn = p.attn(i)
        norms = {"q": attn.q_norm.forward, "k": attn.k_norm.forward}
        attn.q_norm.forward = attn.k_norm.forward = lambda x: x

        def rotate(apply, q, k, cos, sin, norms=norms):
            q, k = apply(q, k, cos, sin)
            return norms["q"](q), norms["k"](k)

        p.rotate(rotate, (i,))


@bug(
    "rope",
    accepted=("rope", "heads", "positions"),
    words="not rotated|never|without|skip|unrotated|missing|identity|not applied|head|position",
    taps=("attn.k_rope",),
    layers=(2,),
    heads=(3,),
    model="mistral-full",
    dtype="bfloat16",
)
def last_key_head_never_rotated_in_the_last_layer(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        turned, keys = apply(q, k, cos, sin)
        return turned, torch.cat([keys[:, :3], k[:, 3:]], 1)

    p.rotate(rotate, (2,))
