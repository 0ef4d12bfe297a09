"""What layers with a state compute, in float64 (torch-free).

T tokens of one sequence, H heads of values, fewer of keys.
Heads lie side by side in rows: keys [T, key_heads * D], values [T, H * V]; `beta` and `decay` are [T, H].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def softplus(x: Array) -> Array:
    """log(1 + exp(x))."""
    return np.asarray(np.logaddexp(x, 0.0))


def convolved(before: Array, x: Array, weight: NDArray[np.floating]) -> Array:
    """A causal convolution of each channel: x [T, C], the rows before it [W - 1, C] and weights [C, W] -> [T, C]."""
    taps, rows = weight.shape[1], np.concatenate([before, x])
    return np.asarray(sum(rows[i : i + len(x)] * weight[:, i].astype(np.float64) for i in range(taps)))


def by_heads(x: Array, dim: float) -> Array:
    """[T, heads * D] -> [T, heads, D]."""
    return x.reshape(len(x), -1, int(dim))


def side_by_side(x: Array) -> Array:
    """[T, heads, D] -> [T, heads * D]."""
    return x.reshape(len(x), -1)


def paired(keys: Array, beta: Array) -> Array:
    """Keys [T, key_heads, D] for each of the H heads that `beta` [T, H] has: neighbours share one."""
    return keys.repeat(beta.shape[1] // keys.shape[1], axis=1)


def _states(before: Array, k: Array, v: Array, beta: Array, kept: Array) -> Iterator[Array]:
    """The state [H, D, V] after each token (the delta rule, arXiv:2406.06484, with a decay)."""
    state, values = before, v.reshape(len(v), beta.shape[1], -1)
    for key, value, rate, share in zip(k, values, beta, kept, strict=True):
        state = state * share[:, None, None]
        wrong = (value - np.einsum("hdv,hd->hv", state, key)) * rate[:, None]
        state = state + key[:, :, None] * wrong[:, None, :]
        yield state


def last_state(before: Array, k: Array, v: Array, beta: Array, kept: Array) -> Array:
    """The state [H, D, V] after all tokens: `before` it, keys [T, H, D], values [T, H * V], shares kept [T, H]."""
    return deque(_states(before, k, v, beta, kept), maxlen=1)[-1] if len(k) else before


def read_out(q: Array, before: Array, k: Array, v: Array, beta: Array, kept: Array) -> Array:
    """What queries [T, H, D] read from the state after their token, [T, H * V]."""
    states = _states(before, k, v, beta, kept)
    read = [np.einsum("hdv,hd->hv", state, one) for state, one in zip(states, q, strict=True)]
    return np.stack(read).reshape(len(q), -1)


def _scanned(before: Array, x: Array, b: Array, step: Array, kept: Array) -> Iterator[Array]:
    """The state [H, P, N] after each token (Mamba-2, arXiv:2405.21060)."""
    state = before
    for value, key, size, share in zip(x, b, step, kept, strict=True):
        state = state * share[:, None, None] + (value * size[:, None])[:, :, None] * key[:, None, :]
        yield state


def scanned(before: Array, x: Array, b: Array, step: Array, kept: Array) -> Array:
    """The state [H, P, N] after all tokens: `before` it, x [T, H, P], B [T, H, N], step sizes and shares kept
    [T, H]."""
    return deque(_scanned(before, x, b, step, kept), maxlen=1)[-1] if len(x) else before


def scan_read(c: Array, before: Array, x: Array, b: Array, step: Array, kept: Array) -> Array:
    """What C [T, H, N] reads from the state after its token, [T, H, P]."""
    states = _scanned(before, x, b, step, kept)
    return np.stack([np.einsum("hpn,hn->hp", state, one) for state, one in zip(states, c, strict=True)])


def mean_of_groups(x: Array, like: Array, width: float) -> Array:
    """The mean of each group of `width` columns of x [T, C], in every column of the group; where `like` has a part of
    one group alone, of which x has the whole, in its columns."""
    groups = x.reshape(len(x), -1, min(int(width), x.shape[1]))
    return np.asarray(groups.mean(-1).repeat(groups.shape[-1], axis=1)[:, : like.shape[1]])
