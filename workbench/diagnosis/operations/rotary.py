"""The rotation of queries and keys as a checkpoint's configuration states it (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

import math

import numpy as np

from engine.config import ModelConfig
from engine.config.rope_scaling import RopeScaling
from workbench.diagnosis.recording import Array


def frequencies(model: ModelConfig, theta: float | None = None, scaling: RopeScaling | None = None) -> Array:
    """Angle per position of each pair, [head_dim / 2]; `theta` and `scaling` are the model's by default."""
    theta = model.rope_theta if theta is None else theta
    scaling = model.rope_scaling if scaling is None else scaling
    plain = np.asarray(theta ** (-np.arange(0, model.head_dim, 2) / model.head_dim), dtype=np.float64)
    if scaling.factors:
        plain = plain / np.array(scaling.factors)
    if scaling.kind == "linear":
        return np.asarray(plain / scaling.factor)
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    if scaling.kind == "yarn":
        return _yarn(plain, scaling, theta)
    return plain


def magnitude(scaling: RopeScaling) -> float:
    """The factor on cosine and sine: 1 but for YaRN."""
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def of(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    both = scaling.mscale and scaling.mscale_all_dim
    return of(scaling.mscale or 1) / of(scaling.mscale_all_dim or 1) if both else of(1.0)


def _llama3(plain: Array, scaling: RopeScaling) -> Array:
    """Wavelengths that fit the original context often enough are kept, long ones stretched, those between blended."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(plain * (kept + (1 - kept) / scaling.factor))


def _yarn(plain: Array, scaling: RopeScaling, theta: float) -> Array:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): as llama3, the ramp over the index of the pair."""
    pairs = len(plain)
    length = scaling.original_max_position

    def pair_with(turns: float) -> float:
        return pairs * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    stretched = np.clip((np.arange(pairs) - low) / (high - low if high != low else 0.001), 0, 1)
    return np.asarray(plain * (stretched / scaling.factor + 1 - stretched))
