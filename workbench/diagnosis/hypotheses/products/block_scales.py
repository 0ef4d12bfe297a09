"""Where the wrong scale of a quantised weight's block comes from: other blocks' scales, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.products.matrices import cut
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: How far the scale of a block may be from its largest weight, relative, and of how many blocks that must hold.
NEAR, MOST = 0.02, 0.9


def whose_scales(
    site: Site, factors: Array, out_features: NDArray[np.intp], rows: int, columns: int, starts: Sequence[int]
) -> str:
    """Whose scales they are, as a clause; "" where no known ones are. `factors` are those of `out_features` by blocks
    of in features, the blocks of `rows` x `columns` (`starts`: where a rank's blocks of in features begin). Scales are
    taken to be proportional to the largest weight of their block."""
    powers = np.log2(np.maximum(np.abs(factors), 1e-30))
    if np.abs(powers - powers.round()).max() < 1e-3 and np.abs(powers).max() > 0.5:
        return ": powers of two, as of exponents that are read wrongly"
    whole = site.facts.weight(site.weights["weight"])
    own = None if whole is None else cut(site, whole)
    if whole is None or own is None or not columns:
        return ""
    right = _table(own, rows, starts, site.first_out)
    taken = right[out_features] * factors
    moved = np.abs(factors - 1) > NEAR
    if not moved.any():
        return ""
    for words, table in _others(site, whole, right, rows, columns, starts):
        if table.shape != right.shape:
            continue
        near = np.abs(table[out_features] - taken) <= NEAR * np.abs(taken)
        if near[moved].mean() >= MOST:
            return f": {words}"
    return ""


def _table(weight: NDArray[np.floating], rows: int, starts: Sequence[int], first: int = 0) -> Array:
    """The largest weight of the block that each out feature is in, [out, blocks of in features]."""
    found = np.maximum.reduceat(np.abs(weight.astype(np.float64)), list(starts), axis=1)
    if rows != 1:
        block = (np.arange(len(found)) + first) // (rows or len(found) + first)
        for number in np.unique(block):
            found[block == number] = found[block == number].max(0)
    return found


def _others(
    site: Site,
    whole: NDArray[np.floating],
    right: Array,
    rows: int,
    columns: int,
    starts: Sequence[int],
) -> Iterator[tuple[str, Array]]:
    """Scales of other blocks."""
    for by in (1, -1):
        yield "the scales are those of the neighbouring block", np.roll(right, by, 1)
        yield "the scales are those of the neighbouring row of blocks", np.roll(right, by * max(rows, 1), 0)
    if site.columns is not None and site.rank:
        size = site.columns.stop - site.columns.start
        for other in range(whole.shape[1] // size):
            part = whole[:, other * size : (other + 1) * size]
            if other * size != site.columns.start:
                yield f"the scales are those of rank {other}'s part", _table(part, rows, starts)
    if site.span is not None and site.rank:
        size = site.span.stop - site.span.start
        for other in range(len(whole) // size):
            if other * size != site.span.start:
                part = whole[other * size : (other + 1) * size]
                yield f"the scales are those of rank {other}'s part", _table(part, rows, starts)
    blocks = right[:: rows or 1]
    if rows > 1 and blocks.shape[0] == blocks.shape[1]:
        yield "the table of scales is read transposed", blocks.T.repeat(rows, 0)[: len(right)]
    flat = blocks.T.reshape(blocks.shape)
    yield "the table of scales is read by columns instead of by rows", flat.repeat(rows or 1, 0)[: len(right)]
    flat = blocks.reshape(blocks.shape[::-1]).T
    yield "the table of scales is read by columns instead of by rows", flat.repeat(rows or 1, 0)[: len(right)]
    yield "the scales are in reverse order", right[:, ::-1]
    yield "the first block's scale is used for all blocks", np.broadcast_to(right[:, :1], right.shape)
    yield "the first row's scales are used for all rows", np.broadcast_to(right[:1], right.shape)
    yield "one scale is used for all blocks", np.full(right.shape, right.max())
