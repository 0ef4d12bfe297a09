"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

Frequencies depend on the model, theta and at most the sequence's length; cosines and sines are made once a step for all
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from lockstep.engine.config import ModelConfig, rope_frequencies
from lockstep.engine.rows import vectors
from lockstep.engine.rules.self_test import agrees


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
    if x.is_cuda and _fits(x, cos) and _fits(x, sin) and _in_one_kernel(x.device, x.dtype):
        return _by_kernel(x, cos, sin)
    if not x.is_cuda and (few := vectors.rotate(x, cos, sin)) is not None:
        return few
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _fits(x: Tensor, of_angles: Tensor) -> bool:
    """Whether cosines or sines are those of x [T, heads, D], and nothing is to be broadcast or converted."""
    shape = (len(x), 1, x.shape[-1] // 2)
    return (
        x.dim() == 3 and of_angles.shape == shape and of_angles.dtype == x.dtype and of_angles.stride(-1) == 1
    )


def _by_kernel(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same bits by one launch instead of seven, which take longer than the work."""
    from lockstep.engine.rules import kernels

    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, heads, width = x.shape
    out = torch.empty((tokens, heads, width), dtype=x.dtype, device=x.device)
    kernels.rotate[(tokens, heads)](
        x, cos, sin, out, heads, width // 2, x.stride(0), x.stride(1), cos.stride(0), sin.stride(0),
        HALF=1 << (width // 2 - 1).bit_length(), enable_fp_fusion=False,
    )  # fmt: skip
    return out


@cache
def _in_one_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton is there, compiles, and gives the bits that torch's own kernels give."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    random = torch.Generator().manual_seed(0)
    x, cos, sin = (
        torch.randn(5, heads, width, generator=random).to(device, dtype)
        for heads, width in ((3, 48), (1, 24), (1, 24))
    )
    first, second = x.chunk(2, dim=-1)
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return agrees(lambda: _by_kernel(x, cos, sin), expected, 0.0)


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


def in_first_channels(rotate: Rotate, *, neighbours: bool) -> Rotate:
    """The same for heads of which as many first channels are rotated as there are angles for."""
    return partial(_first_channels, partial(_neighbours, rotate) if neighbours else rotate)


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
