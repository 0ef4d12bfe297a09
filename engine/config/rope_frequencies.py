"""The angle per position of each pair of a head, as a configuration states it: plain rotary embedding (Su et al. 2021,
arXiv:2104.09864) and its context-stretching variants. Torch-free: the numbers are of whatever array the caller makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lockstep.engine.config.model import ModelConfig
from lockstep.engine.config.rope_scaling import RopeScaling, magnitude

#: An array with arithmetic by elements and `clip`: a torch tensor, a numpy array.
A = TypeVar("A")


def frequencies(
    model: ModelConfig, theta: float, length: int, array: Callable[[Sequence[float]], A]
) -> tuple[A, float]:
    """Angle per position of each pair, [rotary_dim / 2], and the factor on cosine and sine, in a sequence of `length`
    tokens (where that matters: `RopeScaling.by_length`). Computed in the precision of what `array` makes."""
    scaling, dim = model.rope_scaling, model.rotary_dim
    if scaling.kind == "dynamic":
        theta *= _dynamic_stretch(model, length)
    pairs: Any = array([float(i) for i in range(dim // 2)])
    plain = 1.0 / (theta ** (2 * pairs / dim))
    is_long = scaling.kind == "longrope" and length > scaling.original_max_position
    if factors := scaling.long_factors if is_long else scaling.factors:
        plain = plain / array(factors)
    if scaling.kind == "proportional":
        turning = int(scaling.share * dim // 2)
        return plain * array([float(i < turning) for i in range(dim // 2)]) / scaling.factor, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(plain, pairs, model, theta), _yarn_attention_factor(scaling)
    if scaling.kind == "longrope":
        return plain, _longrope_attention_factor(scaling)
    return plain, 1.0


def _dynamic_stretch(model: ModelConfig, length: int) -> float:
    """By how much NTK-aware scaling raises theta once a sequence outgrows the trained context (u/emozilla, "Dynamically
    Scaled RoPE", 2023; transformers' `dynamic`)."""
    factor, dim = model.rope_scaling.factor, model.rotary_dim
    beyond = max(length, model.max_position) / model.max_position
    return float((factor * beyond - (factor - 1)) ** (dim / (dim - 2)))


def _longrope_attention_factor(scaling: RopeScaling) -> float:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): by how much longer the context is than the original one."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position))


def _llama3(plain: Any, scaling: RopeScaling) -> Any:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a ramp between them."""
    wavelength = 2 * math.pi / plain
    turns = scaling.original_max_position / wavelength
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clip(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: Any, pairs: Any, model: ModelConfig, theta: float) -> Any:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): interpolate slow pairs, keep fast ones, ramp between."""
    scaling, dim = model.rope_scaling, model.rotary_dim

    def pair_with(turns: float) -> float:
        """The (fractional) pair that makes so many turns over the original context."""
        length = scaling.original_max_position
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001  # a step instead of a ramp, never a division by zero
    stretched = ((pairs - low) / width).clip(0, 1)
    return plain / scaling.factor * stretched + plain * (1 - stretched)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """How much YaRN scales cosine and sine; an explicit value in the checkpoint wins."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.factor, scaling.mscale) / magnitude(scaling.factor, scaling.mscale_all_dim)
    return magnitude(scaling.factor, 1.0)
