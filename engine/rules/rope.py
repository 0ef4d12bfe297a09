"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

Frequencies depend on the model, theta and at most the sequence's length; cosines and sines are made once a step for all
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lockstep.engine.config import ModelConfig, rope_frequencies


def frequencies(model: ModelConfig, theta: float, length: int = 0) -> tuple[Tensor, float]:
    """Angle per position of each pair, [rotary_dim / 2] float32, and the factor on cosine and sine, in a sequence of
    `length` tokens (where that matters: `RopeScaling.by_length`)."""
    return rope_frequencies.frequencies(model, theta, length, partial(torch.tensor, dtype=torch.float32))


def cos_sin(positions: Tensor, inv_freq: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle, each [T, 1, head_dim / 2].

    Angles are float32 and only the result is rounded: positions in bfloat16 collide beyond 256.
    """
    angles = positions.float()[:, None, None] * inv_freq
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of x [T, heads, D]: the convention of Hugging Face checkpoints."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]


def in_heads_of(model: ModelConfig, rotate: Rotate) -> Rotate:
    """`rotate`, which turns pairs (i, i + D/2) of all that it is given, for heads of which a part is rotated, or none,
    or neighbours together."""
    if model.rotary_dim == 0:
        return _unrotated
    if model.neighbours:
        rotate = partial(_neighbours, rotate)
    if model.rotary_dim == model.head_dim:
        return rotate
    return partial(_last_channels if model.rotary_last else _first_channels, rotate)


def _unrotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x


def _neighbours(rotate: Rotate, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    turned: Tensor = rotate(halves, cos, sin).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return turned


def _first_channels(rotate: Rotate, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = 2 * cos.shape[-1]
    return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), -1)


def _last_channels(rotate: Rotate, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rest = x.shape[-1] - 2 * cos.shape[-1]
    return torch.cat((x[..., :rest], rotate(x[..., rest:], cos, sin)), -1)
