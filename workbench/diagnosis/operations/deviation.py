"""Where an operation is wrong by more than rounding: which tokens, heads and columns.

Calibration (correct engines and transformers, tiny models of all families, float64 to float16, TP 1 to 4, prefill and
decode): the error's norm over that of the noise stays below 0.8, the worst element below 5 times its noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.operations.recorded import Row
from lockstep.workbench.diagnosis.recording import Array

Mask = NDArray[np.bool_]

#: Error over noise above which an operation is wrong: of the whole tensor or a row of it, and of a single element.
WRONG, WRONG_SINGLE = 2.5, 12.0


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What went in (by role), what came out, and what should have come out in float64.

    `noise` is the rounding that each element of `expected` may have at the engine's dtype. `seen` may be of another
    shape than `expected`: that is an error in itself. `rows` are the tokens of the operation's token axis (of a
    cache: of its keys). `largest` is the largest finite number of the dtype.
    """

    rows: tuple[Row, ...]
    inputs: Mapping[str, Array]
    seen: Array
    expected: Array
    noise: Array
    largest: float

    @property
    def fits(self) -> bool:
        """Whether what came out has the shape that it should have."""
        return self.seen.shape == self.expected.shape

    def error(self) -> Array:
        """|seen - expected|; infinite where one of them is not finite and the dtype does not make them equal."""
        return distance(self.seen, self.expected, self.largest)


def distance(seen: Array, right: Array, largest: float) -> Array:
    """|seen - right| of one shape: 0 where both are NaN, or alike infinite, or `right` is beyond `largest` and `seen`
    infinite; infinite where else one of the two is not finite."""
    with np.errstate(all="ignore"):
        apart = np.abs(seen - right)
        if np.isfinite(apart).all():
            return np.asarray(apart)
        same = (seen == right) | (np.isnan(seen) & np.isnan(right))
        same |= np.isinf(seen) & (np.abs(right) >= largest * 0.998) & (np.sign(seen) == np.sign(right))
    apart[np.isnan(apart)] = np.inf
    apart[same] = 0.0
    return np.asarray(apart)


@dataclass(frozen=True, slots=True, eq=False)
class Deviation:
    """An operation that is wrong on its own inputs.

    `ratio` is the norm of the error over that of the noise, `single` the same of the worst element, `rel_l2` the norm
    of the error over that of what was expected; infinite where shapes or non-finite elements differ. `rows` are the
    wrong tokens; `heads` (this rank's own numbers) and `columns` those that are wrong, None where all are or the
    tensor has none. `scopes` state for each part which elements these are.
    """

    ratio: float
    single: float
    rel_l2: float
    rows: tuple[Row, ...]
    every_row: bool
    heads: tuple[int, ...] | None
    columns: tuple[int, ...] | None
    scopes: tuple[Mask, ...]
    shape: str = ""

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted({row.step for row in self.rows}))

    @property
    def seqs(self) -> tuple[int, ...]:
        return tuple(sorted({row.seq for row in self.rows}))


def locate(
    parts: Sequence[Part],
    token_axis: int,
    head_axis: int | None,
    head_columns: int | None,
    slots: bool = False,
) -> Deviation | None:
    """Where the parts of one operation are wrong; None where all is within noise. `head_axis` is that of heads,
    `head_columns` how many columns of the last axis make a head, None where the tensor has no such thing. `slots`: a
    token has several rows, [T, S, C], of which some may be right."""
    if any(not part.fits for part in parts):
        return _misshapen(parts)
    errors, noises = [part.error() for part in parts], [_noise(part) for part in parts]
    rows = [_wrong(*_sums([e], [n], token_axis, 1)) for e, n in zip(errors, noises, strict=True)]
    last = parts[0].expected.ndim - 1
    head_group = (head_axis, 1) if head_axis is not None else (last, head_columns) if head_columns else None
    column_group = (1, 1) if last == 1 else None
    groups = [group for group in (head_group, column_group) if group is not None]
    ratio, single = _ratio(errors, noises), max(_single(*pair) for pair in zip(errors, noises, strict=True))
    if not (
        ratio > WRONG
        or single > WRONG_SINGLE
        or any(mask.any() for mask in rows)
        or any(_wrong(*_sums(errors, noises, *group)).any() for group in groups)
    ):
        return None
    if not any(mask.any() for mask in rows):  # only together are they more than noise
        rows = [np.ones(len(mask), dtype=bool) for mask in rows]
    scopes = [_along(mask, token_axis, part.expected.shape) for mask, part in zip(rows, parts, strict=True)]
    if slots:
        scopes = [_in_slots(*one) for one in zip(errors, noises, scopes, strict=True)]
    chosen = {group: _chosen(errors, noises, scopes, *group) for group in groups}
    for group, numbers in chosen.items():
        if numbers is None:
            continue
        axis, size = group
        narrower = [s & _along(_mask(numbers, s.shape[axis], size), axis, s.shape) for s in scopes]
        if any(scope.any() for scope in narrower):
            scopes = narrower
        else:  # columns that are wrong in other heads than those that are wrong as a whole
            chosen[group] = None
    wrong_rows = {
        row: None for mask, part in zip(rows, parts, strict=True) for row, w in _paired(part, mask) if w
    }
    return Deviation(
        ratio,
        single,
        _relative(errors, parts),
        tuple(wrong_rows),
        all(mask.all() for mask in rows),
        chosen.get(head_group) if head_group else None,
        chosen.get(column_group) if column_group else None,
        tuple(scopes),
    )


def _misshapen(parts: Sequence[Part]) -> Deviation:
    """Parts of which one has another shape than it should: all of those are wrong, and infinitely so."""
    odd = [part for part in parts if not part.fits]
    rows = {row: None for part in odd for row in part.rows}
    scopes = tuple(np.full(part.expected.shape, not part.fits) for part in parts)
    text = f"shape {list(odd[0].seen.shape)} instead of {list(odd[0].expected.shape)}"
    return Deviation(np.inf, np.inf, np.inf, tuple(rows), len(odd) == len(parts), None, None, scopes, text)


def _paired(part: Part, mask: Mask) -> list[tuple[Row, bool]]:
    return list(zip(part.rows, mask.tolist(), strict=False))


def _noise(part: Part) -> Array:
    return np.where(np.isfinite(part.noise), part.noise, 0.0)


def _norm(parts: Sequence[Array]) -> float:
    with np.errstate(over="ignore"):
        return float(np.sqrt(sum(float(np.square(x).sum()) for x in parts)))


def _ratio(errors: Sequence[Array], noises: Sequence[Array]) -> float:
    error, noise = _norm(errors), _norm(noises)
    return error / noise if noise > 0 else (np.inf if error > 0 else 0.0)


def _single(error: Array, noise: Array) -> float:
    with np.errstate(all="ignore"):
        over = np.where(error > 0, error / noise, 0.0)
    return float(over.max(initial=0.0))


def _relative(errors: Sequence[Array], parts: Sequence[Part]) -> float:
    scale = _norm([np.where(np.isfinite(part.expected), part.expected, 0.0) for part in parts])
    error = _norm(errors)
    return error / scale if scale > 0 else np.inf


def _sums(
    errors: Sequence[Array], noises: Sequence[Array], axis: int, size: int
) -> tuple[Array, Array, Array, int]:
    """Of each group of `size` neighbours along `axis`: the sum of the squares of error and noise, the worst element
    over its noise, and of how many elements."""
    count = errors[0].shape[axis] // size
    square, allowed, worst, elements = np.zeros(count), np.zeros(count), np.zeros(count), 0
    for error, noise in zip(errors, noises, strict=True):
        of_each = error.size // max(count * size, 1)
        e, n = (np.moveaxis(x, axis, -1).reshape(of_each, count, size) for x in (error, noise))
        square += (e**2).sum((0, 2))
        allowed += (n**2).sum((0, 2))
        with np.errstate(all="ignore"):
            worst = np.maximum(worst, np.where(e > 0, e / n, 0.0).max((0, 2), initial=0.0))
        elements += e.shape[0] * size
    return square, allowed, worst, elements


def _wrong(square: Array, allowed: Array, worst: Array, elements: int) -> Mask:
    """Which groups are beyond noise: the fewer elements one has, the more its norm may scatter."""
    limit = max(WRONG, WRONG_SINGLE / math.sqrt(max(elements, 1)))
    with np.errstate(all="ignore"):
        over = np.where(square > 0, np.sqrt(square / allowed), 0.0)
    return np.asarray((over > limit) | (worst > WRONG_SINGLE))


def _chosen(
    errors: Sequence[Array], noises: Sequence[Array], scopes: Sequence[Mask], axis: int, size: int
) -> tuple[int, ...] | None:
    """Which groups along `axis` are beyond noise in the wrong rows; None: all of them, or, of single columns, more
    than half."""
    if len({error.shape[axis] for error in errors}) > 1:
        return None
    inside = [np.where(scope, error, 0.0) for error, scope in zip(errors, scopes, strict=True)]
    allowed = [np.where(scope, noise, 0.0) for noise, scope in zip(noises, scopes, strict=True)]
    wrong = _wrong(*_sums(inside, allowed, axis, size))
    many = wrong.all() if size > 1 or len(wrong) <= 64 else wrong.mean() > 0.5
    return None if many or not wrong.any() else tuple(int(i) for i in np.flatnonzero(wrong))


def _in_slots(error: Array, noise: Array, scope: Mask) -> Mask:
    """Of the scope [T, S, C] the rows that are beyond noise by themselves; all of it where none is."""
    e, n = (x.reshape(-1, x.shape[-1]) for x in (error, noise))
    narrower = scope & _wrong(*_sums([e], [n], 0, 1)).reshape(*error.shape[:2], 1)
    return narrower if narrower.any() else scope


def _mask(chosen: tuple[int, ...], length: int, size: int) -> Mask:
    found = np.zeros(length // size, dtype=bool)
    found[list(chosen)] = True
    return found.repeat(size)


def _along(mask: Mask, axis: int, shape: tuple[int, ...]) -> Mask:
    """The mask of one axis, for a whole tensor."""
    form = [1] * len(shape)
    form[axis] = len(mask)
    return np.broadcast_to(mask.reshape(form), shape)
