"""Variants of a sum over the ranks that runs another reduction, meets a buffer that was not cleared, or comes back with
its columns elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.nearest import nearest_columns
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.linear.moved import FEW_TOKENS

#: What the partials [R, N, H] may be reduced by instead of their sum.
_REDUCTIONS: tuple[tuple[str, Callable[[Array], Array]], ...] = (
    ("their maximum", lambda p: p.max(0)),
    ("their minimum", lambda p: p.min(0)),
    ("their product", lambda p: p.prod(0)),
    ("the one of the largest magnitude", lambda p: np.take_along_axis(p, np.abs(p).argmax(0)[None], 0)[0]),
)


def other_reductions(site: Site) -> Iterator[Variant]:
    """The maximum, say, in place of the sum; or a sum in eight bits by one rank's scale."""
    part = site.parts[0]
    partials = part.inputs["partial"]
    if not part.fits or len(partials) < 2 or not np.isfinite(partials).all():
        return
    rest = part.expected - partials.sum(0)
    for words, reduced in _REDUCTIONS:
        text = f"the ranks' partials are not summed: {words} goes on"
        yield Variant("reduced_otherwise", "reduce", text, {"by": words}, reduced(partials) + rest)
    for which, rows in (("pass", _passes(site)), ("token", [np.array([i]) for i in range(len(site.rows))])):
        steps = np.empty((len(partials), len(site.rows), 1))
        for own in rows:
            steps[:, own] = np.abs(partials[:, own]).max((1, 2), keepdims=True) / 127
        steps = np.maximum(steps, 1e-300)
        codes = np.rint(partials / steps).sum(0)
        for rank in range(len(partials)):
            text = f"the partials are summed in eight bits and all restored by the scale of rank {rank} (one a {which})"
            yield Variant("partials_by_one_scale", "reduce", text, {"rank": rank}, codes * steps[rank] + rest,
                          noise=np.broadcast_to(steps[rank], part.expected.shape))  # fmt: skip


def _passes(site: Site) -> list[NDArray[np.intp]]:
    """The rows of each pass of each sequence, in order."""
    found: dict[tuple[int, int], list[int]] = {}
    for i, row in enumerate(site.rows):
        found.setdefault((row.step, row.seq), []).append(i)
    return [np.array(rows) for rows in found.values()]


def accumulated(site: Site) -> Iterator[Variant]:
    """The result is added onto what its buffer held: that of the step before, or of another layer."""
    part = site.parts[0]
    if not part.fits or part.seen.ndim != 2 or not np.isfinite(part.seen).all():
        return
    kind = "reduce" if site.operation == "reduce" else "input"
    predicted, last = part.expected.copy(), dict[int, NDArray[np.intp]]()
    for rows in _passes(site):
        seq = site.rows[rows[0]].seq
        before = last.get(seq)
        if before is not None and len(before) == len(rows):
            predicted[rows] += part.seen[before]
        last[seq] = rows
    text = "the result is added onto that of the step before: the buffer is not cleared"
    yield Variant("added_to_former", kind, text, {}, predicted)
    for layer in range(site.facts.model.num_layers):
        other = site.rows_of(f"layers.{layer}.{site.kind}")
        if (
            layer != site.layer
            and other is not None
            and other.shape == part.seen.shape
            and np.isfinite(other).all()
        ):
            text = f"the result is added onto that of layer {layer}: the buffer is not cleared"
            yield Variant("added_to_former", kind, text, {"layer": layer}, part.expected + other)


def columns_elsewhere(site: Site) -> Iterator[Variant]:
    """Columns show what other columns should: the slices that the ranks have summed are gathered in the wrong order."""
    part, deviation = site.parts[0], site.deviation
    if deviation is None or not part.fits or part.seen.ndim != 2 or not np.isfinite(part.seen).all():
        return
    wrong = np.flatnonzero(deviation.scopes[0].any(1))
    columns = np.flatnonzero(deviation.scopes[0].any(0))
    if len(wrong) < FEW_TOKENS or len(columns) < 2:
        return
    source = np.arange(part.seen.shape[1])
    source[columns] = nearest_columns(part.seen[np.ix_(wrong, columns)], part.expected[wrong])
    if len(set(source.tolist())) < len(source) or (source == np.arange(len(source))).all():
        return
    slices, ranks = 1 + int(np.count_nonzero(np.diff(source) != 1)), len(site.taps.ranks)
    how, size = f"column {columns[0]} shows column {source[columns[0]]}", len(source) // ranks
    order = source[::size] // size
    if (
        len(source) % ranks == 0
        and (source == np.repeat(order, size) * size + np.arange(len(source)) % size).all()
    ):
        how += f": the ranks' slices are gathered in the order {', '.join(map(str, order))}"
    elif slices > len(source) // 4:
        return  # no slices, but disorder
    text = f"slices of the result's columns stand elsewhere: {how}"
    yield Variant("columns_exchanged", "reduce", text, {"slices": slices}, part.expected[:, source], slices)
