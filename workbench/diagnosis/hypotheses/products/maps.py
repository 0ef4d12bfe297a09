"""Maps of a product, a sum over the ranks, or rows of a table: what no edit of the formula gives.

One routine for all: factors along an axis, one row added to all, rows or columns that are nothing, rows and columns of
others. Each is charged by the numbers that it takes to fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.formula import product
from lockstep.workbench.diagnosis.hypotheses.fits import factor, resolution, wrong_rows
from lockstep.workbench.diagnosis.hypotheses.maps import Mapped, rows_added
from lockstep.workbench.diagnosis.hypotheses.passes import parts_of_ranks, whose_largest
from lockstep.workbench.diagnosis.hypotheses.products.matrices import own_part
from lockstep.workbench.diagnosis.hypotheses.products.wrong import Wrong, mapped
from lockstep.workbench.diagnosis.hypotheses.roundings import integers
from lockstep.workbench.diagnosis.nearest import nearest_columns
from lockstep.workbench.diagnosis.operations.site import Site

Indices = NDArray[np.intp]
#: Rows by which a fit along the columns is distinguished from chance; columns up to which an order of them is fitted.
_ROWS, _ORDERED = 4, 8192


def moved_maps(site: Site) -> Iterator[Mapped]:
    """Rows of other tokens, or added to the right ones; columns that are zero."""
    wrong = Wrong.of(site)
    if wrong is not None:
        yield from _zeros(wrong)
        yield from _rows_of_tokens(wrong)
        yield from rows_added(site, wrong_rows(site))


def scaled_maps(site: Site) -> Iterator[Mapped]:
    """Another number, or a number of its own, for each column or row."""
    wrong = Wrong.of(site)
    if wrong is not None:
        yield from _bias_moved(wrong)
        yield from _columns_scaled(wrong)
        yield from _row_added(wrong)
        yield from _rows_scaled(wrong)


def _zeros(wrong: Wrong) -> Iterator[Mapped]:
    """Columns are nothing, or the bias alone."""
    if wrong.whole_rows:
        return
    for bias in (wrong.rest, np.zeros_like(wrong.rest)):
        found = np.broadcast_to(bias[wrong.columns], (len(wrong.rows), len(wrong.columns)))
        name = "columns_zero" if bias is wrong.rest else "bias_zero"
        edit = mapped(name, at=(float(len(wrong.columns)), float(wrong.columns[0])))
        yield edit, wrong.put(found), 0
        if "bias" not in wrong.site.weights:
            return


def _rows_of_tokens(wrong: Wrong) -> Iterator[Mapped]:
    """Rows show what belongs to another token or step."""
    rows, part = wrong.site.rows, wrong.right[:, wrong.columns]
    nearest = np.array(nearest_columns(wrong.seen[wrong.inside].T, part.T), dtype=np.intp)
    if (nearest == wrong.rows).all():
        return
    order = parts_of_ranks(wrong.site, wrong.rows, nearest)
    if order is not None:
        of = np.arange(len(rows))
        of[wrong.rows] = nearest
        yield mapped("token_parts", ", ".join(map(str, order))), wrong.right[of], 0
    pairs = [(rows[i], rows[j]) for i, j in zip(wrong.rows.tolist(), nearest.tolist(), strict=True) if i != j]
    shifts = Counter(of.position - at.position for at, of in pairs if of.seq == at.seq)
    shift, many = shifts.most_common(1)[0] if shifts else (0, 0)
    at, of_token = next((pair for pair in pairs if pair[1].position - pair[0].position == shift), pairs[0])
    edit = mapped("token_rows", at=tuple(map(float, (at.position, at.seq, of_token.position, of_token.seq))))
    if many > len(pairs) // 2:
        edit = mapped("token_rows_by", "before" if shift < 0 else "after", float(abs(shift)))
    yield edit, wrong.put(part[nearest]), len(pairs) - many


def _bias_moved(wrong: Wrong) -> Iterator[Mapped]:
    """The numbers of the bias in another order: as the weight's rows were permuted and the bias was not, or the other
    way."""
    if not wrong.rest.any() or len(wrong.rest) > _ORDERED:
        return
    added = (wrong.seen - wrong.base)[wrong.rows].mean(0)
    order = np.abs(added[:, None] - wrong.rest[None, :]).argmin(1)
    moved = np.flatnonzero(order != np.arange(len(order)))
    if len(moved) and len(set(order.tolist())) == len(order):
        edit = mapped("bias_permuted", at=(float(moved[0]), float(order[moved[0]])))
        yield edit, wrong.base + wrong.rest[order], 0


def _columns_scaled(wrong: Wrong) -> Iterator[Mapped]:
    """Each column by a factor of its own: a scale per channel not applied, or twice."""
    if len(wrong.rows) < _ROWS:
        return
    by = factor(wrong.seen[wrong.inside] - wrong.rest[wrong.columns], wrong.base[wrong.inside], 0)[0]
    few = len(np.unique(np.round(by, 4)))
    if few == 1 and len(by) == wrong.right.shape[1]:
        return  # one number for all, which the formula has a place for
    edit = mapped("columns_scaled", at=(float(len(by)), float(by.min()), float(by.max())))
    found = wrong.base[wrong.inside] * by + wrong.rest[wrong.columns]
    yield edit, wrong.put(found), few if few <= 8 else len(by)


def _row_added(wrong: Wrong) -> Iterator[Mapped]:
    """One row is added to all, as a bias is."""
    if len(wrong.rows) >= (2 if wrong.site.operation == "linear" else _ROWS):
        row = (wrong.seen - wrong.right)[wrong.inside].mean(0)
        edit = mapped("row_added", at=(float(np.linalg.norm(row)),))
        yield edit, wrong.put(wrong.right[wrong.inside] + row), len(row)


def _rows_scaled(wrong: Wrong) -> Iterator[Mapped]:
    """Each row by a factor of its own, as if its input were restored by another token's scale; as it is, or in eight
    bits."""
    site, base = wrong.site, wrong.base
    x, weight = (
        site.inputs.get("x"),
        own_part(site, site.weights["weight"]) if "weight" in site.weights else None,
    )
    made = {"": base}
    if x is not None and weight is not None and x.any():
        made[" in eight bits"] = product(integers(x, 8, None).astype(np.float64), weight)
    for words, own in made.items():
        by = factor(wrong.seen - wrong.rest, own, 1)[:, 0]
        if np.abs(by[wrong.rows] - 1).max() < 4 * resolution(site):
            continue
        if len(wrong.rows) > 1 and np.ptp(by[wrong.rows]) <= resolution(site) * np.abs(by[wrong.rows]).max():
            continue  # one number for all, which the formula has a place for
        whose = "" if x is None or not x.size else whose_largest(site, x, wrong.rows, by)
        found = (own * by[:, None] + wrong.rest)[wrong.inside]
        each = by[wrong.rows]
        figures = (float(each[0]), float(each.min()), float(each.max()))
        edit = mapped("rows_scaled_by" if whose else "rows_scaled", words, whose, at=figures)
        yield edit, wrong.put(found), 0 if whose else len(wrong.rows)
