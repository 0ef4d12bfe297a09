"""Rotary embedding in float64: which channels of a head turn together (RoPE, arXiv:2104.09864; torch-free).

N tokens; angles are [N, 1 or heads, pairs].
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def rotate_part(x: Array, angles: Array, factor: float = 1.0) -> Array:
    """As `rotate`, of as many first channels as there are angles for; the rest as it is."""
    width = 2 * angles.shape[-1]
    return np.concatenate([rotate(x[..., :width], angles, factor), x[..., width:]], axis=-1)


def rotate_neighbours(x: Array, angles: Array, factor: float = 1.0) -> Array:
    """As `rotate_part`, of pairs (2i, 2i + 1)."""
    width = 2 * angles.shape[-1]
    halves = rotate(np.concatenate([x[..., :width:2], x[..., 1:width:2]], axis=-1), angles, factor)
    pairs = np.stack([halves[..., : width // 2], halves[..., width // 2 :]], axis=-1)
    return np.concatenate([pairs.reshape(*x.shape[:-1], width), x[..., width:]], axis=-1)


def rotate_last(x: Array, angles: Array, factor: float = 1.0) -> Array:
    """As `rotate`, of as many last channels as there are angles for; the rest as it is."""
    rest = x.shape[-1] - 2 * angles.shape[-1]
    return np.concatenate([x[..., :rest], rotate(x[..., rest:], angles, factor)], axis=-1)


def rotate_last_neighbours(x: Array, angles: Array, factor: float = 1.0) -> Array:
    """As `rotate_last`, of pairs (2i, 2i + 1)."""
    rest = x.shape[-1] - 2 * angles.shape[-1]
    return np.concatenate([x[..., :rest], rotate_neighbours(x[..., rest:], angles, factor)], axis=-1)


def rotate(x: Array, angles: Array, factor: float = 1.0) -> Array:
    """Pairs (i, i + D/2) of x [N, heads, D] turned by angles [N, 1 or heads, D/2] (RoPE, arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles) * factor
    return np.concatenate([turned.real, turned.imag], axis=-1)
