"""Variants of a linear layer whose in features are in another order: the columns of its weight, or its input."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.nearest import nearest_columns
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.variants.replay import Linear

#: Tokens below which in features cannot be told apart by their values.
FEW_TOKENS = 3
#: In features up to which an order is fitted: it takes the inverse of the weight.
LARGEST_FITTED = 2048

Order = NDArray[np.intp]


def features_permuted(site: Site) -> Iterator[Variant]:
    """An order that loaders are known to leave, or one that is fitted: as many out features as in features say which
    input each column of the weight must have met."""
    linear = Linear.of(site)
    if linear is None or len(linear.rows) < FEW_TOKENS:
        return
    for order, words in _known_orders(site, linear.x.shape[1]):
        predicted = linear.replay(x=linear.x[:, order])
        if predicted is not None:
            yield _variant(site, order, words, predicted)
    fitted = _fitted(linear)
    predicted = None if fitted is None else linear.replay(x=linear.x[:, fitted])
    if fitted is not None and predicted is not None:
        yield _variant(site, fitted, "", predicted, parameters=1)


def _variant(
    site: Site, order: Order, words: str, predicted: NDArray[np.float64], parameters: int = 0
) -> Variant:
    start = site.first_in
    first = int(np.flatnonzero(order != np.arange(len(order)))[0])
    text = (
        f"columns of {site.weights['weight']}, or its in features, are in another order{words}: column {first + start} "
        f"meets in feature {int(order[first]) + start}"
    )
    fitted = {"order": words.strip(" ()"), "column": first + start, "is": int(order[first]) + start}
    return Variant("columns_permuted", "weight", text, fitted, predicted, parameters)


def _known_orders(site: Site, width: int) -> Iterator[tuple[Order, str]]:
    """Those of reshaping and transposing, whole or by head, and of counting from the other end."""
    every, tried = np.arange(width), set[bytes]()
    head_dim = site.facts.model.head_dim
    groups = (width, head_dim) if width % head_dim == 0 else (width,)
    for group in groups:
        where = "" if group == width else "of each head "
        inside = np.arange(group)
        for rows in (n for n in range(2, group) if group % n == 0):
            columns = group // rows
            words = f" ({where}as {rows} × {columns}, transposed"
            words += ": halves interleaved)" if rows == 2 else ": pairs taken apart)" if columns == 2 else ")"
            yield from _new(_in_groups(inside.reshape(rows, columns).T.ravel(), every), words, tried)
        yield from _new(_in_groups(inside[::-1], every), f" ({where}reversed)", tried)
    for by in (1, -1, width // 2):
        yield from _new(np.roll(every, by), f" (shifted by {by})", tried)


def _new(order: Order, words: str, tried: set[bytes]) -> Iterator[tuple[Order, str]]:
    if order.tobytes() not in tried:
        tried.add(order.tobytes())
        yield order, words


def _in_groups(inside: Order, every: Order) -> Order:
    """The order of one group, in each of the groups."""
    groups = every.reshape(-1, len(inside))
    return np.ascontiguousarray(groups[:, inside]).ravel()


def _fitted(linear: Linear) -> Order | None:
    """The in feature that each column meets; None where the out features do not determine it."""
    width = linear.x.shape[1]
    if len(linear.columns) < width or width > LARGEST_FITTED:
        return None
    weight = linear.weight[linear.columns].astype(np.float64)
    seen = (linear.seen - linear.bias)[np.ix_(linear.rows, linear.columns)]
    try:
        met = np.linalg.solve(weight.T @ weight, weight.T @ seen.T)
    except np.linalg.LinAlgError:
        return None
    order = np.array(nearest_columns(np.asarray(met.T), linear.x[linear.rows]), dtype=np.intp)
    moved = order != np.arange(width)
    return order if moved.any() and len(set(order.tolist())) == width else None
