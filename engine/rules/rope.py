"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its context-stretching variants.

Frequencies depend on the model and theta only; cosines and sines are made once a step for all layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.config.rope_scaling import RopeScaling


def frequencies(model: ModelConfig, theta: float, length: int = 0) -> tuple[Tensor, float]:
    """Angle per position of each pair, [head_dim / 2] float32, and the factor on cosine and sine, in a sequence of
    `length` tokens (where that matters: `RopeScaling.by_length`)."""
    scaling = model.rope_scaling
    if scaling.kind == "dynamic":
        theta *= _dynamic_stretch(model, length)
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.int64).float() / model.head_dim
    inv_freq = 1.0 / (theta**exponents)
    is_long = scaling.kind == "longrope" and length > scaling.original_max_position
    if factors := scaling.long_factors if is_long else scaling.factors:
        inv_freq = inv_freq / torch.tensor(factors)
    if scaling.kind == "linear":
        return inv_freq / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(inv_freq, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(inv_freq, model, theta), _yarn_attention_factor(scaling)
    if scaling.kind == "longrope":
        return inv_freq, _longrope_attention_factor(scaling)
    return inv_freq, 1.0


def _dynamic_stretch(model: ModelConfig, length: int) -> float:
    """By how much NTK-aware scaling raises theta once a sequence outgrows the trained context (u/emozilla, "Dynamically
    Scaled RoPE", 2023; transformers' `dynamic`)."""
    factor, dim = model.rope_scaling.factor, model.head_dim
    beyond = max(length, model.max_position) / model.max_position
    return float((factor * beyond - (factor - 1)) ** (dim / (dim - 2)))


def _longrope_attention_factor(scaling: RopeScaling) -> float:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): by how much longer the context is than the original one."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position))


def _llama3(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a ramp between them."""
    wavelength = 2 * math.pi / inv_freq
    turns = scaling.original_max_position / wavelength
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - ramp) * inv_freq / scaling.factor + ramp * inv_freq
    stretched = torch.where(turns < scaling.low_freq_factor, inv_freq / scaling.factor, inv_freq)
    between = (turns >= scaling.low_freq_factor) & (turns <= scaling.high_freq_factor)
    return torch.where(between, blended, stretched)


def _yarn(inv_freq: Tensor, model: ModelConfig, theta: float) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): interpolate slow pairs, keep fast ones, ramp between."""
    scaling, dim = model.rope_scaling, model.head_dim

    def pair_with(turns: float) -> float:
        """The (fractional) pair that makes so many turns over the original context."""
        length = scaling.original_max_position
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001  # a step instead of a ramp, never a division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inv_freq / scaling.factor * ramp + inv_freq * (1 - ramp)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """How much YaRN scales cosine and sine; an explicit value in the checkpoint wins."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


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
