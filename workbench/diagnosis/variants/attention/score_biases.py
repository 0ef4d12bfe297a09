"""What may have been added to attention scores: slopes (ALiBi), relative and other biases, constants."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.attention.scales import paper_slopes
from lockstep.workbench.diagnosis.hypotheses.blocks import all_wrong_heads, places, positions
from lockstep.workbench.diagnosis.hypotheses.fits import factor_of
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Cells that a table of fitted numbers must explain with each of them.
CELLS_EACH = 3


def score_biases(site: Site) -> Iterator[Variant]:
    """Variants in which a bias is added to the scores. Fitted head by head, over all passes."""
    if not all(part.fits for part in site.parts):
        return
    cells = {
        head: [(i, _added(site.parts[i], head)) for i, h in places(site) if h == head]
        for head in all_wrong_heads(site)
    }
    yield from _slopes(site, cells)
    tables: list[tuple[str, str, Callable[[Part], Array]]] = [
        ("scores_constant", "a constant is added to all scores, which softmax does not see",
         lambda part: 0 * _keys(part)),
        ("scores_bias_relative", "a number for each distance of query and key is added: a relative position bias",
         lambda part: positions(part)[:, None] - _keys(part)),
        ("scores_bias_of_keys", "a number for each key's position is added", _keys),
        ("scores_bias_of_queries", "a number for each query is added to all its scores, which softmax does not see",
         lambda part: positions(part)[:, None] + 0 * _keys(part)),
    ]  # fmt: skip
    for name, text, index in tables:
        yield from _table(site, cells, name, text, index)


#: Where a head's seen and expected scores are finite, [T, K], and what was added there.
_Added = tuple[Array, Array]
_Cells = dict[int, list[tuple[int, _Added]]]


def _added(part: Part, head: int) -> _Added:
    finite = np.isfinite(part.seen[head]) & np.isfinite(part.expected[head])
    return finite, part.seen[head][finite] - part.expected[head][finite]


def _keys(part: Part) -> Array:
    return np.broadcast_to(np.arange(part.expected.shape[2], dtype=np.float64), part.expected.shape[1:])


def _table(
    site: Site, cells: _Cells, name: str, text: str, index: Callable[[Part], Array]
) -> Iterator[Variant]:
    """The mean of what is added by head and by `index` of the cell, or by the index alone where the heads agree."""
    if not cells:
        return
    guesses = [part.expected.copy() for part in site.parts]
    values: dict[str, dict[str, float]] = {}
    total = parameters = 0
    for head, parts in cells.items():
        where = np.concatenate(
            [np.broadcast_to(index(site.parts[i]), finite.shape)[finite] for i, (finite, _) in parts]
        )
        added = np.concatenate([numbers for _, (_, numbers) in parts])
        if not len(added):
            return
        keys, inverse = np.unique(where, return_inverse=True)
        means = np.bincount(inverse, added) / np.bincount(inverse)
        values[str(head)] = {f"{key:g}": mean for key, mean in zip(keys, means.tolist(), strict=True)}
        total, parameters = total + len(added), parameters + len(keys)
        start = 0
        for i, (finite, numbers) in parts:
            guesses[i][head][finite] += means[inverse[start : start + len(numbers)]]
            start += len(numbers)
    tables = list(values.values())
    first = next(iter(tables[0].values()))
    alike = all(
        table.keys() == tables[0].keys()
        and np.allclose(list(table.values()), list(tables[0].values()), rtol=1e-3, atol=1e-4)
        for table in tables
    )
    parameters = len(tables[0]) if alike else parameters
    if total >= CELLS_EACH * parameters:
        fitted = {"values": {head: dict(list(table.items())[:8]) for head, table in list(values.items())[:4]}}
        reported = f": {first:.4g}" if len(tables[0]) == 1 and alike else ""
        yield Variant(name, "scores", text + reported, fitted, guesses, parameters)


def _slopes(site: Site, cells: _Cells) -> Iterator[Variant]:
    """ALiBi (Press et al. 2022, arXiv:2108.12409): a slope a head over the distance, or over the key's position, from
    which it differs by a constant a query. Slopes are those of the paper where they fit."""
    for name, over, index in (
        ("distance", "the distance of query and key", lambda part: positions(part)[:, None] - _keys(part)),
        ("key", "the key's position", _keys),
    ):
        guesses, slopes = [part.expected.copy() for part in site.parts], {}
        for head, parts in cells.items():
            x = [index(site.parts[i])[finite] for i, (finite, _) in parts]
            slope = factor_of(np.concatenate(x), np.concatenate([numbers for _, (_, numbers) in parts]))
            slopes[head] = slope
            for (i, (finite, _)), column in zip(parts, x, strict=True):
                guesses[i][head][finite] += slope * column
        if not slopes:
            return
        paper = paper_slopes(site, site.parts[0].expected.shape[0])
        known = all(
            abs(abs(slope) / paper[head] - 1) < 1e-2 for head, slope in slopes.items() if head < len(paper)
        )
        text = f"a bias linear in {over} is added to the scores (ALiBi{', with its published slopes' if known else ''})"
        yield Variant("scores_alibi", "scores", text, {"over": name, "slopes": {str(h): s for h, s in slopes.items()}},
                      guesses, len(slopes))  # fmt: skip
