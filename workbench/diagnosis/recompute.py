"""What an operation should have given on the engine's own inputs: its *injected* error, apart from the inherited.

In float64, from the engine's recorded inputs; what an operation needs besides (norm weights, rotation, scale,
mask) is taken from the golden tensors on both sides of it. Linear layers need weights and are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.taps.names import layer_of, local_name
from workbench.diagnosis.dataflow import inputs_of, is_known
from workbench.diagnosis.recording import Array, Recording

_TINY = float(np.finfo(np.float64).tiny)


class _Missing(Exception):
    """An input was not recorded."""


@dataclass(frozen=True, slots=True)
class _Here:
    """One operation at one place, with what went into it on both sides."""

    engine: Recording
    golden: Recording
    tap: str
    step: int
    seq: int

    @property
    def inputs(self) -> list[str]:
        """The inputs that the session knows, nearest first."""
        layers = self.golden.session.meta.model.num_layers or 0
        return [name for name in inputs_of(self.tap, layers) if self.golden.has_tap(name)]

    def near(self, kind: str) -> str:
        return f"layers.{layer_of(self.tap)}.{kind}"

    def seen(self, tap: str) -> Array:
        return self._read(self.engine, tap)

    def right(self, tap: str) -> Array:
        return self._read(self.golden, tap)

    def _read(self, side: Recording, tap: str) -> Array:
        found = side.whole_or_none(tap, self.step, self.seq)
        if found is None:
            raise _Missing(tap)
        return found


def recompute(engine: Recording, golden: Recording, tap: str, step: int, seq: int) -> Array | None:
    """The tensor of `tap` computed from the engine's inputs; None for a linear layer, and where inputs lack or
    do not fit together."""
    operation = _OPERATIONS.get(local_name(tap)) if is_known(tap) else None
    if operation is None:
        return None
    try:
        with np.errstate(all="ignore"):  # what overflows in an engine may overflow here
            return operation(_Here(engine, golden, tap, step, seq))
    except (_Missing, ValueError):  # ValueError: shapes that do not fit together
        return None


def _norm(here: _Here) -> Array:
    """RMSNorm over the last axis; its weight is read off the golden tensors."""
    eps = here.golden.session.meta.model.rms_eps or 1e-6
    source, right = here.inputs[0], here.right(here.tap)

    def normed(x: Array) -> Array:
        x = x.reshape(right.shape)
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + eps))

    known, axes = normed(here.right(source)), tuple(range(right.ndim - 1))
    weight = (right * known).sum(axes) / np.maximum((known**2).sum(axes), _TINY)
    return np.asarray(normed(here.seen(source)) * weight)


def _rotate(here: _Here) -> Array:
    """The golden rotation, applied to the engine's input."""
    source, right = here.inputs[0], here.right(here.tap)
    turned = complex_pairs(here.seen(source).reshape(right.shape)) * rotation(
        here.right(source).reshape(right.shape), right
    )
    return np.concatenate([turned.real, turned.imag], axis=-1)


def complex_pairs(x: Array) -> NDArray[np.complex128]:
    """[…, D] -> […, D/2]: the pair (i, i + D/2) that half-split RoPE rotates, as one number."""
    half = x.shape[-1] // 2
    return np.asarray(x[..., :half] + 1j * x[..., half:])


def rotation(before: Array, after: Array) -> NDArray[np.complex128]:
    """The factor [T, 1, D/2] that turns `before` [T, heads, D] into `after`, fitted over the heads."""
    z, w = complex_pairs(before), complex_pairs(after)
    fitted = (w * z.conj()).sum(1, keepdims=True) / np.maximum((np.abs(z) ** 2).sum(1, keepdims=True), _TINY)
    return np.asarray(fitted)


def _products(q: Array, k: Array) -> Array:
    """[T, heads, D], [K, kv_heads, D] -> [heads, T, K]."""
    return np.asarray(np.einsum("thd,khd->htk", q, k.repeat(q.shape[1] // k.shape[1], axis=1)))


def _scores(here: _Here) -> Array:
    q, k, right = here.near("attn.q_rope"), here.near("attn.k_cache"), here.right(here.tap)
    allowed = np.isfinite(right)
    known = _products(here.right(q), here.right(k))[allowed]
    scale = float(known @ right[allowed] / max(float(known @ known), _TINY))
    return np.where(allowed, _products(here.seen(q), here.seen(k)) * scale, -np.inf)


def _probs(here: _Here) -> Array:
    scores = here.seen(here.near("attn.scores"))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def _context(here: _Here) -> Array:
    probs, values = here.seen(here.near("attn.probs")), here.seen(here.near("attn.v_cache"))
    values = values.repeat(probs.shape[0] // values.shape[1], axis=1)
    return np.asarray(np.einsum("htk,khd->thd", probs, values).reshape(probs.shape[1], -1))


def _add(here: _Here) -> Array:
    first, second = here.inputs[:2]
    return here.seen(first) + here.seen(second)


def _silu_mul(here: _Here) -> Array:
    gate = here.seen(here.near("mlp.gate"))
    return np.asarray(gate / (1 + np.exp(-gate)) * here.seen(here.near("mlp.up")))


_OPERATIONS: Mapping[str, Callable[[_Here], Array]] = {
    **dict.fromkeys(("attn_norm", "mlp_norm", "final_norm", "attn.q_norm", "attn.k_norm"), _norm),
    **dict.fromkeys(("attn.q_rope", "attn.k_rope"), _rotate),
    **dict.fromkeys(("attn_residual", "mlp_residual"), _add),
    "attn.scores": _scores,
    "attn.probs": _probs,
    "attn.context": _context,
    "mlp.act": _silu_mul,
}
