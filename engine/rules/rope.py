"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

Frequencies depend on the model, theta and at most the sequence's length; cosines and sines are made once a step for all
layers.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lockstep.engine.config import ModelConfig, rope_frequencies


def frequencies(model: ModelConfig, theta: float, length: int = 0) -> tuple[Tensor, float]:
    """Angle per position of each pair, [head_dim / 2] float32, and the factor on cosine and sine, in a sequence of
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
