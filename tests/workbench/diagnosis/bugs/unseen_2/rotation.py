"""Rotations: positions, scaling, kernels of decode, one head turned twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import ROTATED, bug
from tests.workbench.diagnosis.bugs.patched import Patched

Pair = tuple[Tensor, Tensor]


@bug("rope", accepted=("positions",), words="position|offset", taps=ROTATED, step=1, model="llama")
def decode_turns_by_the_position_before_its_own(p: Patched) -> None:
    """The length was read before the new token was counted, and then one was taken off."""
    p.positions(lambda positions: positions - int(p.decode))


@bug(
    "rope",
    accepted=("rope",),
    words="frequenc|theta|base|scal|angle",
    taps=ROTATED,
    model="llama-linear",
)
def linear_factor_multiplies_theta(p: Patched) -> None:
    """Instead of dividing the positions."""
    p.frequencies(lambda _: 4e4 ** -(torch.arange(0, 8, 2) / 8))


@bug(
    "rope",
    accepted=("rope",),
    words="head",
    taps=("attn.q_rope",),
    layers=(1,),
    heads=(4,),
    model="llama",
)
def one_head_lies_in_two_blocks_and_is_turned_twice(p: Patched) -> None:
    def change(apply: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        q, k = apply(q, k, cos, sin)
        q = q.clone()
        q[:, 4:5] = apply(q[:, 4:5], k, cos, sin)[0]
        return q, k

    p.rotate(change, (1,))


@bug(
    "rope",
    accepted=("positions", "rope"),
    words="position|page|wrap|modulo",
    taps=("attn.k_rope",),
    model="mistral-full",
)
def keys_turned_by_their_slot_within_the_page(p: Patched) -> None:
    def change(apply: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        slots = (p.past + torch.arange(p.new)) % 8
        table = p.decoder.rotary_emb(q, slots[None])
        return apply(q, k, cos, sin)[0], apply(q, k, *table)[1]

    p.rotate(change)


@bug(
    "rope",
    accepted=("rope",),
    words="pair|interleav|neighbour|neighbor|half|halves",
    taps=ROTATED,
    step=1,
    model="qwen3",
)
def decode_kernel_pairs_neighbours(p: Patched) -> None:
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)

    def change(apply: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        if not p.decode:
            return apply(q, k, cos, sin)  # type: ignore[no-any-return]
        return turned(q, cos, sin), turned(k, cos, sin)

    p.rotate(change)
