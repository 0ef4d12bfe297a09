"""By how much queries and keys turn: each token's frequencies, as the model's configuration states them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.config import ModelConfig, rope_frequencies
from lockstep.engine.config.rope_scaling import RopeScaling
from lockstep.workbench.diagnosis.operations.recorded import Row
from lockstep.workbench.diagnosis.recording import Array

#: How long each token's sequence is in its pass, [N].
Lengths = NDArray[np.int64]


def lengths_of(rows: Sequence[Row]) -> Lengths:
    return np.array([row.length for row in rows], dtype=np.int64)


def frequencies(
    model: ModelConfig, lengths: Lengths, theta: float | None = None, scaling: RopeScaling | None = None
) -> Array:
    """Angle per position of each pair, [N, 1, head_dim / 2], or [1, 1, head_dim / 2] where the sequence's length does
    not matter; `theta` and `scaling` are the model's by default."""
    model = model if scaling is None else replace(model, rope_scaling=scaling)
    theta = model.rope_theta if theta is None else theta
    if not model.rope_scaling.by_length:
        return _of_length(model, theta, 0)[None, None]
    known = {length: _of_length(model, theta, length) for length in {int(each) for each in lengths}}
    found = [known[int(length)] for length in lengths]
    return np.stack(found)[:, None] if found else np.zeros((0, 1, model.head_dim // 2))


def angles_of(model: ModelConfig, rows: Sequence[Row]) -> Array:
    """By how much each token's pairs turn where it stands: position times frequency, [N, 1, head_dim / 2]."""
    positions = np.array([row.position for row in rows], dtype=np.float64)
    return positions[:, None, None] * frequencies(model, lengths_of(rows))


def magnitude(model: ModelConfig, scaling: RopeScaling | None = None) -> float:
    """The factor on cosine and sine: 1 but for YaRN and LongRoPE."""
    model = model if scaling is None else replace(model, rope_scaling=scaling)
    return rope_frequencies.frequencies(model, model.rope_theta, 0, _array)[1]


def _of_length(model: ModelConfig, theta: float, length: int) -> Array:
    return rope_frequencies.frequencies(model, theta, length, _array)[0]


def _array(values: Sequence[float]) -> Array:
    return np.array(values, dtype=np.float64)
