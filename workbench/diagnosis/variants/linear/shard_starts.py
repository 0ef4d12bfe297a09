"""Variants of a rank's linear layer whose shard of the weight begins elsewhere than it should."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.replay import Linear

#: The share of their size that sums of the right start may be off by, at most.
NEAR = 0.05


def other_start(site: Site) -> Iterator[Variant]:
    """The shard is cut at another row (out features split) or column (in features split) of the whole weight: for a
    tensor that is padded or of another size, or for another number of ranks. Beyond the weight's end are zeros."""
    linear, whole = Linear.of(site), site.facts.weight(site.weights["weight"])
    split = site.columns or site.span
    if linear is None or whole is None or split is None or len(site.taps.ranks) < 2:
        return
    axis = 1 if site.columns is not None else 0
    size, of = split.stop - split.start, whole.shape[axis]
    vector = site.facts.vector(site.weights["bias"]) if axis == 0 and linear.has_bias else None
    for whole_bias in (None, vector) if vector is not None else (None,):
        start = _column_start(linear, whole) if axis else _row_start(linear, whole, whole_bias)
        if start is None or _is_told_elsewhere(start, split, of, axis):
            continue
        bias = linear.bias if whole_bias is None else _window(whole_bias, start, size, 0).astype(np.float64)
        predicted = linear.replay(weight=_window(whole, start, size, axis), bias=bias)
        if predicted is None:
            continue
        unit = ("rows", "columns")[axis]
        text = (
            f"rank {site.rank} computes with the {unit} of {site.weights['weight']} from {start} on, not from "
            f"{split.start}: its shard is cut at the wrong place"
        )
        text += _as_if(start, size, of, site.rank)
        fitted = {"start": start, "should_be": split.start, "axis": axis}
        yield Variant("shard_start", "sharding", text, fitted, predicted)


def _is_told_elsewhere(start: int, split: slice, of: int, axis: int) -> bool:
    """Whether it is right, or another rank's shard, or rows that `moved` finds."""
    size = split.stop - split.start
    return start == split.start or (0 <= start <= of - size and (axis == 0 or start % size == 0))


def _as_if(start: int, size: int, of: int, rank: int) -> str:
    """What would explain the start, as a clause."""
    words = f", and runs past the end of {of} into zeros" if start + size > of else ""
    if start < 0:
        words = ", and begins with zeros"
    elif rank and start % rank == 0 and start // rank != size:
        words += f"; {start} is {rank} × {start // rank}, as if each rank held {start // rank}"
    return words


def _window(whole: NDArray[np.floating], start: int, size: int, axis: int) -> NDArray[np.floating]:
    """`size` rows or columns from `start` on; zeros where there are none."""
    length = whole.shape[axis]
    inside = [slice(None)] * whole.ndim
    inside[axis] = slice(max(start, 0), max(min(start + size, length), 0))
    pad = [(0, 0)] * whole.ndim
    before = min(max(-start, 0), size)
    kept = whole[tuple(inside)]
    pad[axis] = (before, size - before - kept.shape[axis])
    return np.pad(kept, pad)


def _column_start(linear: Linear, whole: NDArray[np.floating]) -> int | None:
    """Where the in features begin that give what was seen: every start is tried at a few of the sums."""
    left = 0.0
    size = linear.x.shape[1]
    rows = linear.rows[np.linspace(0, len(linear.rows) - 1, min(2, len(linear.rows))).astype(int)]
    columns = linear.columns[np.linspace(0, len(linear.columns) - 1, min(3, len(linear.columns))).astype(int)]
    seen = (linear.seen - linear.bias)[np.ix_(rows, columns)]
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            sums = np.correlate(whole[column].astype(np.float64), linear.x[row], "full")
            left = left + (sums - seen[i, j]) ** 2
    return _best(np.asarray(left), float((seen**2).sum()), size)


def _row_start(linear: Linear, whole: NDArray[np.floating], bias: Array | None) -> int | None:
    """Where the out features begin that give what was seen in a token, by their order. `bias` is that of the whole
    weight where it is cut at the same place."""
    row = int(linear.rows[np.abs(linear.error).max(1).argmax()])
    seen = linear.seen[row] - (linear.bias if bias is None else 0.0)
    if len(linear.columns) < len(seen):
        return None
    given = linear.x[row] @ whole.astype(np.float64).T + (0.0 if bias is None else bias)
    padded = np.pad(given, len(seen) - 1)
    windows = np.convolve(padded**2, np.ones(len(seen)), "valid")
    left = windows - 2 * np.correlate(given, seen, "full") + float(seen @ seen)
    return _best(left, float(seen @ seen), len(seen))


def _best(left: Array, power: float, size: int) -> int | None:
    """The start that leaves least, if that is little and it alone does; `left[0]` is of the start `1 - size`."""
    best = int(left.argmin())
    return best - size + 1 if left[best] <= NEAR**2 * power else None
