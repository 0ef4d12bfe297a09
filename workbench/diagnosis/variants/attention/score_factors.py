"""Scores scaled by a factor that is not one number: of the head, of the query's position, of the key's, of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.blocks import key_positions, places, positions
from lockstep.workbench.diagnosis.hypotheses.fits import resolution
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site

_Numbers = NDArray[np.int64]

#: Cells that a table of fitted factors must explain with each of them.
CELLS_EACH = 3

#: Factor by index, such as a query's position.
_Table = Mapping[int, float]


def score_factors(site: Site) -> Iterator[Variant]:
    """Variants whose factors are fitted over all wrong heads and passes together."""
    if not all(part.fits for part in site.parts):
        return
    shapes = [part.expected.shape for part in site.parts]
    steps = [site.taps.passes[i].step for i in site.passes]
    queries = [
        np.broadcast_to(positions(part)[:, None], s) for part, s in zip(site.parts, shapes, strict=True)
    ]
    keys = [np.broadcast_to(key_positions(part), s) for part, s in zip(site.parts, shapes, strict=True)]
    passes = [np.full(s, step, dtype=np.int64) for s, step in zip(shapes, steps, strict=True)]
    heads = [np.broadcast_to(np.arange(s[0])[:, None, None], s) for s in shapes]
    for name, what, index in (
        ("heads", "each head's scores are scaled by a factor of its own", heads),
        ("queries", "each query's scores are scaled by a factor of its position", queries),
        ("keys", "the scores of each key are scaled by a factor of its position", keys),
        ("steps", "each step's scores are scaled by a factor of its own", passes),
    ):
        table, cells = _fitted(site, index)
        spread = [abs(value - 1) for value in table.values()]
        if len(table) < 2 or max(spread) < resolution(site):
            continue
        for text, function, parameters in _functions(table) if name == "queries" else ():
            known = {at: function(at) for at in table}
            yield _variant(site, name, f"scores are scaled by {text}", index, known, parameters)
        if cells >= CELLS_EACH * len(table):
            some = list(table)[:: max(1, len(table) // 4)][:4]
            reported = ", ".join(f"at {at} by {table[at]:.4g}" for at in some)
            yield _variant(site, name, f"{what}: {reported}", index, table, len(table))


def _fitted(site: Site, index: Sequence[_Numbers]) -> tuple[_Table, int]:
    """By index the factor that brings the right scores nearest to those that were seen, and of how many cells."""
    at, x, y = [], [], []
    for i, head in places(site):
        seen, right = site.parts[i].seen[head], site.parts[i].expected[head]
        cells = np.isfinite(seen) & np.isfinite(right)
        at.append(index[i][head][cells])
        x.append(right[cells])
        y.append(seen[cells])
    if not at:
        return {}, 0
    found, inverse = np.unique(np.concatenate(at), return_inverse=True)
    right, seen = np.concatenate(x), np.concatenate(y)
    size = np.bincount(inverse, right * right)
    factors = np.bincount(inverse, right * seen) / np.maximum(size, np.finfo(float).tiny)
    return dict(zip(found.tolist(), factors.tolist(), strict=True)), len(right)


def _variant(
    site: Site, name: str, text: str, index: Sequence[_Numbers], table: _Table, parameters: int
) -> Variant:
    guesses = []
    for part, at in zip(site.parts, index, strict=True):
        by = np.vectorize(lambda key: table.get(int(key), 1.0), otypes=[float])(at)
        guesses.append(np.where(np.isfinite(part.expected), part.expected * by, part.expected))
    fitted = {"factors": {str(at): value for at, value in list(table.items())[:16]}}
    return Variant(f"scores_scale_of_{name}", "scores", text, fitted, guesses, parameters)


def _functions(table: _Table) -> Iterator[tuple[str, Callable[[int], float], int]]:
    """What factors by position may be: (words, the function, how many numbers were fitted). n counts the keys that the
    query sees."""
    n = np.array(list(table)) + 1.0
    f = np.array(list(table.values()))
    grown = (f > 1 + 1e-3) & (n > 1)
    if grown.any():
        length = float(np.exp(np.median(np.log(n[grown]) / f[grown])))
        if length > 1:
            plain = f"log(n) / log({length:.4g}), n being the query's position + 1"
            yield plain, lambda at: math.log(at + 1) / math.log(length), 1
            words = f"max(1, log(n) / log({length:.4g})), n being the query's position + 1"
            yield words, lambda at: max(1.0, math.log(at + 1) / math.log(length)), 1
    if (f > 0).all():
        power, offset = np.polyfit(np.log(n), np.log(f), 1)
        factor = float(np.exp(offset))
        known = {-1.0: "1/n", -0.5: "1/sqrt(n)", 0.5: "sqrt(n)", 1.0: "n"}
        near = min(known, key=lambda one: abs(one - power))
        if abs(near - power) < 1e-2:
            words = f"{factor:.4g} * {known[near]}, n being the query's position + 1"
            yield words, lambda at: factor * (at + 1.0) ** near, 1
