"""What the banks of variants fit with: factors, simple numbers, and how far two tensors are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

Mask = NDArray[np.bool_]

_TINY = float(np.finfo(np.float64).tiny)


def wrong_rows(site: Site) -> Mask:
    """Which rows of a row-wise operation are wrong, [N]."""
    return _wrong(site, 0)


def wrong_heads(site: Site) -> Mask:
    """Which heads of [N, heads, D] are wrong."""
    return _wrong(site, 1)


def _wrong(site: Site, axis: int) -> Mask:
    if site.deviation is None:
        return np.zeros(site.expected.shape[axis], dtype=bool)
    scope = site.deviation.scopes[0]
    return np.asarray(scope.any(tuple(i for i in range(scope.ndim) if i != axis)))


def differing_replica(site: Site) -> str:
    """That this rank's copy of what all ranks compute alike differs from the others', in words; empty where it does
    not, or where what it reads differs already."""
    others = [rank for rank in site.taps.ranks if rank not in site.ranks]
    copies = [site.rows_of(site.tap, rank) for rank in others]
    right = [
        copy is not None
        and copy.shape == site.seen.shape == site.expected.shape
        and bool((np.abs(copy - site.expected) <= 8 * site.parts[0].noise).all())
        for copy in copies
    ]
    if not others or not all(right):
        return ""
    return f"; on the other ranks it is right: the copy of rank {site.rank} differs from theirs"


def apart(seen: Array, predicted: Array) -> float:
    """Relative L2 distance; infinite where shapes or finiteness differ."""
    if seen.shape != predicted.shape or not np.isfinite(predicted).all() or not np.isfinite(seen).all():
        return math.inf
    return float(np.linalg.norm(seen - predicted) / max(float(np.linalg.norm(seen)), _TINY))


def factor(seen: Array, base: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """By which number `base` comes nearest to `seen`; along `axis` each a number of its own (dimensions are kept)."""
    found = (seen * base).sum(axis, keepdims=axis is not None)
    return np.asarray(found / np.maximum((base * base).sum(axis, keepdims=axis is not None), _TINY))


def factor_of(x: Array, y: Array) -> float:
    """The number that x is to be multiplied with to come nearest to y."""
    return float(factor(y, x))


def resolution(site: Site) -> float:
    """How far a fitted factor may be from the one that it stands for, relative."""
    return max(1e-4, 4 * site.facts.unit)


def known_number(
    value: float, known: Iterable[tuple[float, str]], tolerance: float
) -> tuple[float, str] | None:
    """The first of the known numbers that a fitted one may be, with its words."""
    return next((one for one in known if math.isclose(value, one[0], rel_tol=tolerance)), None)


def finite(array: Array) -> Array:
    """The array. LinAlgError where a number is none: given NaN or infinities, LAPACK's iterations may never end."""
    if not np.isfinite(array).all():
        raise np.linalg.LinAlgError("NaN or infinities have no decomposition")
    return array


def least_squares(columns: Array, seen: Array) -> Array:
    """What the columns [rows, n] are to be multiplied with, so that their sum comes nearest to `seen` [rows] or
    [rows, m]. LinAlgError where a number is not finite."""
    return np.asarray(np.linalg.lstsq(finite(columns), finite(seen), rcond=None)[0])


def coefficients(seen: Array, terms: Sequence[Array]) -> list[float]:
    """The sum of multiples of `terms` that comes nearest to `seen`: the multiples."""
    columns = np.stack([term.ravel() for term in terms], axis=1)
    return [float(x) for x in least_squares(columns, seen.ravel())]


#: Numbers that engines multiply by, with their names.
_SIMPLE = {
    **{float(n): f"{n}" for n in range(-4, 9)},
    **{1.0 / n: f"1/{n}" for n in range(2, 17)},
    **{math.sqrt(n): f"sqrt({n})" for n in (2, 3, 5)},
    **{1 / math.sqrt(n): f"1/sqrt({n})" for n in (2, 3, 5)},
    16.0: "16",
    32.0: "32",
}  # fmt: skip


def simple(value: float, within: float = 1e-3) -> float:
    """The simple number that `value` is to `within` (relative; absolute for 0), else `value`."""
    near = min(_SIMPLE, key=lambda known: abs(known - value))
    return near if abs(near - value) <= within * max(abs(near), 0.1) else value


def named(value: float) -> str:
    """A factor in words."""
    return _SIMPLE.get(value, f"{value:.5g}" if abs(value - 1) > 1e-3 else f"{value:.8g}")


#: How far the same numbers are apart: relative, and of such as are near zero.
_SAME, _SAME_NEAR_ZERO = 1e-7, 1e-12


class GivenBefore:
    """The numbers that hypotheses have given."""

    def __init__(self) -> None:
        self._known: list[tuple[Array, float, float]] = []

    def __call__(self, predicted: Sequence[Array]) -> bool:
        """Whether a hypothesis before has given the same numbers; else these are known from now on."""
        flat = np.concatenate([np.nan_to_num(one).ravel() for one in predicted])
        # Weighted sums are no farther apart than the numbers are in sum: nearly all others are told by theirs.
        with np.errstate(all="ignore"):
            total = float(flat @ _unlike(flat.size))
            most = float(_SAME * np.abs(flat).sum() + _SAME_NEAR_ZERO * flat.size) * 1.001
        for other, sum_of_other, most_of_other in self._known:
            if not abs(total - sum_of_other) > most_of_other and _same(flat, other):
                return True
        self._known.append((flat, total, most))
        return False


@lru_cache(8)
def _unlike(count: int) -> Array:
    """So many numbers of -1 to 1 that do not repeat."""
    return np.cos(np.arange(count))


def _same(some: Array, other: Array) -> bool:
    if some.shape != other.shape:
        return False
    with np.errstate(all="ignore"):
        return bool((np.abs(some - other) <= _SAME_NEAR_ZERO + _SAME * np.abs(other)).all())


def nearest_rows(seen: Array, among: Array) -> NDArray[np.int64]:
    """For each row of `seen` [M, …] the index of the nearest of `among` [N, …]."""
    a, b = seen.reshape(len(seen), -1), among.reshape(len(among), -1)
    return np.asarray(np.argmin((b**2).sum(1)[None, :] - 2 * a @ b.T, axis=1))


def narrower(dtype: str) -> Iterator[str]:
    """The 16-bit dtypes that round where `dtype` does not."""
    yield from ("bfloat16", "float16") if dtype in ("float32", "float64") else ()
