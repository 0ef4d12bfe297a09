"""Maps: what any result may have gone through that no edit of its formula gives. One routine for all row-wise
operations.

Each is fitted to what was seen, and is charged by the numbers that this takes: a factor of each row, or column; one row
added to all; rows of other tokens, in place of the right ones or added to them; columns, or an operand's columns, in
another order; all but the largest numbers dropped; cut off on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.formula import evaluate, numbers_of
from lockstep.workbench.diagnosis.hypotheses.edits import Detail, Edit, leaves
from lockstep.workbench.diagnosis.hypotheses.fits import factor, nearest_rows, simple, wrong_rows
from lockstep.workbench.diagnosis.hypotheses.formula_text import formula_text
from lockstep.workbench.diagnosis.hypotheses.operands import formula_at, of_any_width
from lockstep.workbench.diagnosis.hypotheses.passes import others_of_pass
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: A map: its edit, what it gives, how many numbers it took to fit.
Mapped = tuple[Edit, Array, int]
#: Columns that are looked for at once; rows that distinguish a column from others; columns of which factors are fitted
#: by themselves, as a share of all.
_CHUNK, _ROWS, _FEW = 512, 4, 0.25
#: Columns of a buffer that hold what it had before: whose, from where on, and from which column of that on.
NOT_WRITTEN = "columns from {1:g} on are not written: they hold {0}, from its column {2:g} on"
#: How far what stands in a buffer may be from what was recorded of it, relative.
_NEAR = 1e-2


def maps_of(site: Site) -> Iterator[Mapped]:
    """Those of few numbers."""
    if site.seen.shape == site.expected.shape and np.isfinite(site.seen).all():
        wrong = wrong_rows(site)
        yield from _rows_moved(site, wrong)
        yield from rows_added(site, wrong)
        yield from _cut_off(site)
        yield from _largest_kept(site, wrong)
        yield from columns_of_another(site)


def free_maps_of(site: Site) -> Iterator[Mapped]:
    """Those that fit a number to each row or column."""
    if site.seen.shape != site.expected.shape or not np.isfinite(site.seen).all():
        return
    wrong = wrong_rows(site)
    yield from _columns_scaled(site, wrong)
    yield from _row_added(site, wrong)
    yield from _rows_scaled(site, wrong)


def _map(name: str, *detail: str | float) -> Edit:
    return Edit((), "map", (name, *detail))


def _rows_moved(site: Site, wrong: NDArray[np.bool_]) -> Iterator[Mapped]:
    """Each wrong row is that of another token; by one distance, if they are."""
    nearest = nearest_rows(site.seen, site.expected)
    by = (nearest - np.arange(len(nearest)))[wrong]
    if not len(by) or not by.all():
        return
    shifts = set(by.tolist())
    if len(shifts) > 1:
        shifts = {move - len(nearest) if move > 0 else move for move in shifts}
    detail = (float(shifts.pop()),) if len(shifts) == 1 else ()
    yield _map("rows_moved", *detail), site.expected[nearest], 1


def rows_added(site: Site, wrong: NDArray[np.bool_]) -> Iterator[Mapped]:
    """To each wrong row that of another token is added, one number times: of the result, or of a term of that sum."""
    own, error = np.flatnonzero(wrong), (site.seen - site.expected)[wrong]
    for what, term in _summands(site) if len(own) else ():
        size = np.linalg.norm(term.reshape(len(term), -1), axis=1)
        size = size.reshape(-1, *(1,) * (term.ndim - 1))
        nearest = nearest_rows(error, term / np.maximum(size, 1e-300))  # by their directions
        if (nearest == own).any():
            continue
        by = simple(float(factor(error, term[nearest])))
        others = others_of_pass(site, size.ravel())
        whose = next((words for words, one in others if (one[wrong] == nearest).all()), "another token")
        found = site.expected.copy()
        found[wrong] += by * term[nearest]
        yield _map("rows_added", f"{whose}{what}", by), found, 1 if by == 1 else 2


def _summands(site: Site) -> Iterator[tuple[str, Array]]:
    """The result, and the terms of it that are made of what the operation reads, each with its words."""
    yield "", site.expected
    formula, given = formula_at(site), {**numbers_of(site.facts.model), **site.inputs}
    for term in formula.args if formula.name == "add" else ():
        if not set(leaves(term)) <= set(given):
            continue
        found = np.asarray(evaluate(term, given))
        if found.shape == site.expected.shape:
            yield f" ({formula_text(term)} of it)", found


def _cut_off(site: Site) -> Iterator[Mapped]:
    """Cut off on both sides, where the outermost numbers that are left show it."""
    low, high = float(site.seen.min()), float(site.seen.max())
    if low > site.expected.min() and high < site.expected.max() and low != -high:
        yield _map("clamped", low, high), np.clip(site.expected, low, high), 2


def _largest_kept(site: Site, wrong: NDArray[np.bool_]) -> Iterator[Mapped]:
    """Of each row only so many numbers are kept, the largest."""
    counts = set((site.seen != 0).sum(-1)[wrong].ravel().tolist())
    if len(counts) == 1 and (count := counts.pop()) < site.seen.shape[-1]:
        order = np.argsort(np.argsort(-np.abs(site.expected), axis=-1), axis=-1)
        yield _map("largest_kept", float(count)), np.where(order < count, site.expected, 0.0), 1


def columns_of_another(site: Site) -> Iterator[Mapped]:
    """The last columns, and these alone, hold what stands side by side in another tensor: they are not written, and the
    buffer has what it had before."""
    if site.deviation is None or site.seen.ndim != 2:
        return
    scope = site.deviation.scopes[0]
    rows, columns = np.flatnonzero(scope.any(1)), np.flatnonzero(scope.any(0))
    first, width = int(columns[0]), site.seen.shape[1]
    if first == 0 or len(rows) < _ROWS or width - first < _ROWS:
        return
    seen = site.seen[:, first:]
    for name, other in of_any_width(site):
        if other.shape[1] < width - first:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(other[rows[0]], width - first)
        at = int(np.square(windows - seen[rows[0]]).sum(1).argmin())
        taken = other[:, at : at + width - first]
        if np.linalg.norm((taken - seen)[rows]) <= _NEAR * np.linalg.norm(seen[rows]):
            found = np.concatenate([site.expected[:, :first], taken], 1)
            yield _map("columns_of_another", name, float(first), float(at)), found, 1


def _columns_scaled(site: Site, wrong: NDArray[np.bool_]) -> Iterator[Mapped]:
    """Each column by a factor of its own: of those that are wrong, if these are few, else of all."""
    if site.deviation is None:
        return
    right, scope = site.expected, site.deviation.scopes[0]
    axes = tuple(range(right.ndim - 1))
    by = factor(site.seen[wrong], right[wrong], axes).reshape(-1)
    columns = np.flatnonzero(scope.any(axes))
    if len(columns) > max(1, _FEW * len(by)):
        if wrong.sum() >= _ROWS:
            yield _map("columns_scaled", float(by.min()), float(by.max())), right * by, len(by)
        return
    few = np.ones(len(by))
    few[columns] = by[columns]
    reported = [one for column in columns.tolist() for one in (float(column), float(by[column]))]
    yield _map("single_columns_scaled", *reported), right * few, len(columns)


def _row_added(site: Site, wrong: NDArray[np.bool_]) -> Iterator[Mapped]:
    """One row is added to all, as a bias is."""
    if wrong.sum() >= _ROWS:
        row = (site.seen - site.expected)[wrong].mean(tuple(range(site.seen.ndim - 1)))
        yield _map("row_added", float(np.linalg.norm(row))), site.expected + row, row.size


def _rows_scaled(site: Site, wrong: NDArray[np.bool_]) -> Iterator[Mapped]:
    """Each row by a factor of its own."""
    if site.expected.shape[-1] >= 2 * _ROWS:
        by = factor(site.seen, site.expected, -1)
        yield (
            _map("rows_scaled", float(by[wrong].min()), float(by[wrong].max())),
            site.expected * by,
            by[wrong].size,
        )


def rows_of_terms(site: Site, terms: Mapping[str, Array]) -> Iterator[Mapped]:
    """Of a sum of two terms, by leaf: one is that of another token."""
    wrong = wrong_rows(site)
    for one, moved, kept in _terms(site, terms):
        nearest = nearest_rows(site.seen - kept, moved)
        if wrong.any() and (nearest != np.arange(len(nearest)))[wrong].all():
            yield _map("leaf_rows_moved", one), kept + moved[nearest], 1


def factors_of_terms(site: Site, terms: Mapping[str, Array]) -> Iterator[Mapped]:
    """One of two terms is multiplied in each row by another number."""
    wrong = wrong_rows(site)
    for one, moved, kept in _terms(site, terms):
        by = factor(site.seen - kept, moved, -1)
        if (
            moved.shape[-1] >= 2 * _ROWS
            and wrong.any()
            and np.ptp(by[wrong]) > 1e-3 * float(np.abs(by[wrong]).max())
        ):
            detail = (one, float(by[wrong].min()), float(by[wrong].max()))
            yield _map("leaf_rows_scaled", *detail), kept + by * moved, int(wrong.sum())


def _terms(site: Site, terms: Mapping[str, Array]) -> Iterator[tuple[str, Array, Array]]:
    """Each term by its leaf, with the other."""
    if len(terms) == 2 and np.isfinite(site.seen).all():
        (one, x), (other, y) = terms.items()
        yield from ((other, y, x), (one, x, y))


def columns_paired(site: Site, kept: Array, pool: Array, what: Detail) -> Iterator[Mapped]:
    """`kept` times columns of `pool` in the order that comes nearest to what was seen. `what` names the pool."""
    wrong = wrong_rows(site)
    # Of experts a token has a row for each that was chosen.
    seen, s, p = (x[wrong].reshape(-1, x.shape[-1]) for x in (site.seen, kept, pool))
    if wrong.sum() < _ROWS or not (np.isfinite(seen).all() and np.isfinite(p).all()):
        return
    order = np.empty(seen.shape[1], dtype=np.intp)
    for i in range(0, len(order), _CHUNK):
        cut = slice(i, i + _CHUNK)
        left = (s[:, cut] ** 2).T @ p**2 - 2 * (seen[:, cut] * s[:, cut]).T @ p
        order[cut] = left.argmin(1)
    by = (order - np.arange(len(order))) % pool.shape[-1]
    moved = np.flatnonzero(by)
    if not len(moved):
        return
    shifts = set(by[moved].tolist())
    first = int(moved[0])
    detail = (
        float(first),
        float(order[first]),
        float(len(moved)),
        *map(float, shifts if len(shifts) == 1 else ()),
    )
    edit = Edit((), "map", ("columns_paired", *what, *detail))
    yield edit, kept * pool[..., order], 1 if len(shifts) == 1 else len(moved)
