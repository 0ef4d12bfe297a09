"""How far two tensors are apart: float64, on the tensor's own scale, aware of NaN and infinity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: About what `metrics` takes for each element: both sides and their difference in float64, masks, exponents.
METRICS_BYTES = 80
#: Bits of significand, the implicit one included.
_SIGNIFICAND = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
_SMALLEST_EXPONENT = {"float64": -1022, "float32": -126, "float16": -14, "bfloat16": -126}


@dataclass(frozen=True, slots=True)
class Metrics:
    """The difference of an engine's tensor from the golden one.

    `max_abs`        the largest absolute difference, at index `where`
    `rel_l2`         ‖engine − golden‖₂ / ‖golden‖₂
    `cosine`         of the two as vectors (1.0 when both are zero, 0.0 when one is)
    `max_ulp`        the largest difference in units in the last place of `dtype`, over the elements whose
                     golden magnitude is at least the tensor's RMS: nearer zero an ULP means nothing
    `scale`          the golden RMS over finite elements
    `nan_*`, `inf_*` how many elements are NaN, infinite
    `mismatched`     elements that are not finite on both sides and not the same NaN or infinity. If there are
                     any, `max_abs`, `rel_l2` and `max_ulp` are infinite and `cosine` is NaN
    `shapes`         (engine, golden) if they differ; then nothing else could be measured
    """

    max_abs: float
    rel_l2: float
    cosine: float
    max_ulp: float
    scale: float
    size: int
    where: tuple[int, ...] = ()
    nan_engine: int = 0
    nan_golden: int = 0
    inf_engine: int = 0
    inf_golden: int = 0
    mismatched: int = 0
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def equal(self) -> bool:
        """No element differs in value."""
        return self.shapes is None and self.max_abs == 0.0


def metrics(engine: NDArray[Any], golden: NDArray[Any], dtype: str = "float32") -> Metrics:
    """The metrics of two tensors of one shape; `dtype` is the coarser of their floating-point types.

    Elements that are the same NaN or the same infinity (a masked score) on both sides count as equal.
    """
    if engine.shape != golden.shape:
        return Metrics(
            math.inf, math.inf, math.nan, math.inf, math.nan, 0, shapes=(engine.shape, golden.shape)
        )
    a, b = (x.astype(np.float64, copy=False).reshape(-1) for x in (engine, golden))
    with np.errstate(over="ignore", invalid="ignore"):
        difference = np.abs(a - b)
    x, y, elements = a, b, a.size
    nan_a = nan_b = inf_a = inf_b = 0
    if not np.isfinite(difference).all():
        nans, infs = (np.isnan(a), np.isnan(b)), (np.isinf(a), np.isinf(b))
        nan_a, nan_b, inf_a, inf_b = (int(np.count_nonzero(mask)) for mask in (*nans, *infs))
        finite = np.isfinite(a) & np.isfinite(b)
        x, y, elements = np.where(finite, a, 0.0), np.where(finite, b, 0.0), int(np.count_nonzero(finite))
        difference = np.abs(x - y)
        odd = ~finite & (a != b) & ~(nans[0] & nans[1])
        if mismatched := int(np.count_nonzero(odd)):
            at, scale = _position(int(np.argmax(odd)), engine.shape), _rms(y, elements)
            return Metrics(
                math.inf,
                math.inf,
                math.nan,
                math.inf,
                scale,
                a.size,
                at,
                nan_a,
                nan_b,
                inf_a,
                inf_b,
                mismatched,
            )
    scale, length = _rms(y, elements), _length(y)
    worst = int(np.argmax(difference)) if a.size else 0
    return Metrics(
        float(difference[worst]) if a.size else 0.0,
        _ratio(_length(difference), length),
        _cosine(x, y, length),
        _max_ulp(difference, y, scale, dtype),
        scale,
        a.size,
        _position(worst, engine.shape) if a.size else (),
        nan_a,
        nan_b,
        inf_a,
        inf_b,
    )


def _length(x: NDArray[np.float64]) -> float:
    return math.sqrt(float(x.dot(x)))  # as `np.linalg.norm`, at half its price


def _rms(y: NDArray[np.float64], elements: int) -> float:
    return math.sqrt(float(y @ y) / max(1, elements))


def _position(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, shape))


def coarser(first: str, second: str) -> str:
    """The floating-point type with the shorter significand (float32 for what is no float)."""
    known = [dtype if dtype in _SIGNIFICAND else "float32" for dtype in (first, second)]
    return min(known, key=lambda dtype: _SIGNIFICAND[dtype])


def _ratio(numerator: float, denominator: float) -> float:
    if denominator == 0.0:
        return 0.0 if numerator == 0.0 else math.inf
    return numerator / denominator


def _cosine(x: NDArray[np.float64], y: NDArray[np.float64], length: float) -> float:
    """`length` is that of y."""
    lengths = _length(x), length
    if 0.0 in lengths:
        return 1.0 if lengths[0] == lengths[1] else 0.0
    return max(-1.0, min(1.0, float((x / lengths[0]) @ (y / lengths[1]))))


def _max_ulp(difference: NDArray[np.float64], golden: NDArray[np.float64], scale: float, dtype: str) -> float:
    kind = dtype if dtype in _SIGNIFICAND else "float32"
    weighty = np.abs(golden) >= scale * (1 - 1e-9)  # a constant tensor's elements are its RMS, up to rounding
    if not np.count_nonzero(weighty & (difference > 0)):
        return 0.0
    _, exponent = np.frexp(golden[weighty])  # golden = m * 2**exponent, 0.5 <= |m| < 1
    exponent = np.maximum(exponent - 1, _SMALLEST_EXPONENT[kind])
    return float(np.max(np.ldexp(difference[weighty], (_SIGNIFICAND[kind] - 1) - exponent)))
