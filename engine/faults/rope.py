"""Rotary position embedding: the rotation and what it does to a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep.engine.faults.fault import Fault

if TYPE_CHECKING:
    from torch import Tensor


def swallowed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation is called with an argument missing and the error is swallowed: x goes on unrotated."""
    from lockstep.engine.rules.rope import rotate_half_split

    rotate: Callable[..., Tensor] = rotate_half_split
    try:
        return rotate(x, cos)
    except TypeError:
        return x


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i + 1), as GPT-J and GGML's llama layout have them."""
    import torch

    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def twice(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate, and rotate again."""
    from lockstep.engine.rules.rope import rotate_half_split

    return rotate_half_split(rotate_half_split(x, cos, sin), cos, sin)


def backwards(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The sign of the sine is the other one."""
    from lockstep.engine.rules.rope import rotate_half_split

    return rotate_half_split(x, cos, -sin)


def exchanged(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Sine and cosine are handed over in the wrong order."""
    from lockstep.engine.rules.rope import rotate_half_split

    return rotate_half_split(x, sin, cos)


def half_of_the_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The slower half of the pairs is not rotated, as if rotation were partial."""
    from lockstep.engine.rules.rope import rotate_half_split

    cos, sin = cos.clone(), sin.clone()
    cos[..., cos.shape[-1] // 2 :], sin[..., sin.shape[-1] // 2 :] = 1, 0
    return rotate_half_split(x, cos, sin)


FAULTS = (
    Fault(
        id="rope-swallowed",
        seam="rope",
        value="swallowed",
        correct="half_split",
        title="RoPE called with the wrong arguments, the error swallowed",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="q and k are not rotated at all; the first token is right",
        patch={"rope": swallowed},
    ),
    Fault(
        id="rope-interleaved",
        seam="rope",
        value="interleaved",
        correct="half_split",
        title="RoPE on pairs (2i, 2i+1) of half-split weights",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="norms of neighbouring pairs are kept, angles are mixed up",
        source="NeuraLegion/shainet#111",
        patch={"rope": interleaved},
    ),
    Fault(
        id="rope-twice",
        seam="rope",
        value="twice",
        correct="half_split",
        title="RoPE applied twice",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="every angle is twice what it should be",
        source="NVIDIA/TensorRT-LLM#4040",
        patch={"rope": twice},
    ),
    Fault(
        id="rope-backwards",
        seam="rope",
        value="backwards",
        correct="half_split",
        title="RoPE turned the other way",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="angles are those of minus the position: norms are right, and so are distances, with the wrong sign",
        patch={"rope": backwards},
    ),
    Fault(
        id="rope-cos-sin-swapped",
        seam="rope",
        value="cos_sin_swapped",
        correct="half_split",
        title="RoPE with sine and cosine exchanged",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="the first token is wrong, too: turned by a quarter",
        patch={"rope": exchanged},
    ),
    Fault(
        id="rope-half-of-the-pairs",
        seam="rope",
        value="half_of_pairs",
        correct="half_split",
        title="RoPE on the faster half of the pairs alone",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="slow pairs are not rotated, fast ones are right",
        patch={"rope": half_of_the_pairs},
    ),
)
