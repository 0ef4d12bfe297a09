"""What may have been multiplied, or added, in place of a product's own weight and bias.

Each is named by the checkpoint's tensor, and by what of it that is: `NAME`, `NAME @ rank 1`, `NAME from 32`,
`NAME transposed`, `NAME strided`, `NAME misread: HOW: WORDS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph import MULTIPLIED
from lockstep.engine.parallel import shards
from lockstep.workbench.diagnosis.hypotheses.operands import operand_name
from lockstep.workbench.diagnosis.hypotheses.trial import Load
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

Matrix = NDArray[np.floating]
#: The share of their size that sums of the right start of a shard may be off by, at most.
_NEAR = 0.05


def own_part(site: Site, name: str) -> Matrix | None:
    """The part of a weight or bias of the checkpoint that the site's rank holds; None where it lacks or is smaller."""
    found = site.facts.weight(name)
    return None if found is None else cut(site, found)


def cut(site: Site, whole: Matrix) -> Matrix | None:
    """The part of a whole matrix or vector that the site's rank should hold."""
    if site.span is not None:
        if len(whole) < site.span.stop:
            return None
        whole = whole[site.span]
    if site.columns is not None and whole.ndim == 2:
        if whole.shape[1] < site.columns.stop:
            return None
        whole = whole[:, site.columns]
    return whole


def weights_instead(site: Site) -> Iterator[tuple[str, Load]]:
    """Matrices of the rank's shape by name: this one read otherwise, and other parts of it."""
    name = site.weights["weight"]
    whole, own = site.facts.weight(name), own_part(site, name)
    if whole is None or own is None:
        return
    for (how, words), read in site.facts.misread(name):
        yield f"{name} misread: {how}: {words}", partial(cut, site, read)
    readings = (whole.reshape(whole.shape[::-1]).T, np.ascontiguousarray(whole.T).reshape(whole.shape))
    for i, one in enumerate((*(cut(site, x) for x in readings), own.reshape(own.shape[::-1]).T)):
        if one is not None and one.shape == own.shape and not np.array_equal(one, own):
            yield f"{name} transposed{i}", partial(np.asarray, one)
    if site.operation == "linear":
        yield from _parts(site, name, whole)


def _parts(site: Site, name: str, whole: Matrix) -> Iterator[tuple[str, Load]]:
    """Columns of other ranks (rows of other ranks are found among all)."""
    ranks = len(site.taps.ranks)
    if (
        site.columns is None or ranks < 2 or site.kind in MULTIPLIED
    ):  # of a sum over ranks its missing terms are reported
        return
    width = site.columns.stop - site.columns.start
    for other in range(whole.shape[1] // width):
        if other * width != site.columns.start:
            part = slice(other * width, (other + 1) * width)
            yield operand_name(name, other), partial(np.asarray, whole[:, part])
    yield f"{name} strided", partial(np.asarray, whole[:, site.rank :: ranks])


def other_weights(site: Site) -> Iterator[tuple[str, Load]]:
    """Weights that may be loaded in its place, the same layer's first: of the head the embedding, and the other way."""
    own, held = site.weights["weight"], shards.parameters(site.facts.model)
    ends = site.operation != "linear"
    layer = f"model.layers.{site.layer}."
    for name in sorted(held, key=lambda one: not one.startswith(layer)):
        matrix = len(held[name]) == 2 and ("layers." not in name) == ends
        if matrix and name != own and (ends or held[name] == held[own]):
            yield name, partial(own_part, site, name)


def biases_instead(site: Site, width: int) -> Iterator[tuple[str, Load]]:
    """Vectors of the rank's width by name: this one misread, other ranks' parts of it, other modules'."""
    own, model = site.weights.get("bias", ""), site.facts.model
    for (how, words), read in site.facts.misread(own) if own else ():
        yield f"{own} misread: {how}: {words}", partial(_vector, site, read)
    whole = site.facts.vector(own) if own else None
    if whole is not None and site.span is not None and width:
        copies = max(1, len(site.taps.ranks) * width // len(whole))
        for part in range(len(whole) // width):
            if part * width != site.span.start:
                vector = whole[part * width : (part + 1) * width]
                yield operand_name(own, part * copies), partial(np.asarray, vector)
    biased = model.qkv_bias or model.o_bias or model.mlp_bias
    for name, shape in shards.parameters(model).items() if biased else ():
        if name.endswith("_proj.bias") and name != own and len(shape) == 1:
            yield name, partial(_vector, site, None, name)


def _vector(site: Site, read: Matrix | None, name: str = "") -> Array | None:
    found = own_part(site, name) if read is None else cut(site, read)
    return None if found is None else found.astype(np.float64)


# --- shards that begin elsewhere -----------------------------------------------------------------------------------


def shards_elsewhere(
    site: Site, rows: NDArray[np.intp], columns: NDArray[np.intp]
) -> Iterator[tuple[str, Load]]:
    """The shard that begins at another row (out features split) or column (in features split) of the whole weight, by
    where that gives what was seen; beyond the weight's end are zeros. `rows` and `columns` are wrong. Of rows the bias
    may be cut at the same place: it goes by the same name, under the bias's."""
    name, split = site.weights["weight"], site.columns or site.span
    whole, own = site.facts.weight(name), own_part(site, name)
    if whole is None or own is None or split is None or len(site.taps.ranks) < 2:
        return
    biased = site.weights.get("bias", "")
    vector, own_bias = (site.facts.vector(biased), _vector(site, None, biased)) if biased else (None, None)
    size, axis = split.stop - split.start, int(site.columns is not None)
    with_bias = axis == 0 and vector is not None
    for bias in (None, vector) if with_bias else (None,):
        added = np.zeros(1) if own_bias is None else own_bias
        start = (
            _column_start(site, whole, rows, columns, added)
            if axis
            else _row_start(site, whole, rows, columns, added if bias is None else bias)
        )
        inside = start is not None and 0 <= start <= whole.shape[axis] - size
        # Another rank's shard, and rows of the same weight, are found as such.
        if start is None or start == split.start or (inside and (axis == 0 or start % size == 0)):
            continue
        yield f"{name} from {start}", partial(_window, whole, start, size, axis)
        if bias is not None:
            yield f"{biased} from {start}", partial(_window, bias, start, size, 0)


def _window(whole: Matrix, start: int, size: int, axis: int) -> Matrix:
    """`size` rows or columns from `start` on; zeros where there are none."""
    places = np.arange(start, start + size)
    there = (places >= 0) & (places < whole.shape[axis])
    found = np.take(whole, np.where(there, places, 0), axis)
    return np.asarray(found * np.expand_dims(there, 1 - axis) if whole.ndim == 2 else found * there)


def _column_start(
    site: Site, whole: Matrix, rows: NDArray[np.intp], columns: NDArray[np.intp], bias: Array
) -> int | None:
    """Where the in features begin that give what was seen: every start is tried at a few of the sums."""
    x = site.inputs["x"]
    rows = rows[np.linspace(0, len(rows) - 1, min(2, len(rows))).astype(int)]
    columns = columns[np.linspace(0, len(columns) - 1, min(3, len(columns))).astype(int)]
    seen = (site.seen - bias)[np.ix_(rows, columns)]
    left = sum(
        (np.correlate(whole[column].astype(np.float64), x[row], "full") - seen[i, j]) ** 2
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    )
    return _best(np.asarray(left), float((seen**2).sum()), x.shape[1])


def _row_start(
    site: Site, whole: Matrix, rows: NDArray[np.intp], columns: NDArray[np.intp], bias: Array
) -> int | None:
    """Where the out features begin that give what was seen in a token, by their order. `bias` is that of the whole
    weight where it is cut at the same place."""
    row = int(rows[np.abs(site.seen - site.expected)[rows].max(1).argmax()])
    seen, given = site.seen[row], site.inputs["x"][row] @ whole.astype(np.float64).T
    if len(columns) < len(seen):
        return None
    if np.shape(bias) == given.shape:
        given = given + bias
    else:
        seen = seen - bias
    padded = np.pad(given, len(seen) - 1)
    windows = np.convolve(padded**2, np.ones(len(seen)), "valid")
    left = windows - 2 * np.correlate(given, seen, "full") + float(seen @ seen)
    return _best(left, float(seen @ seen), len(seen))


def _best(left: Array, power: float, size: int) -> int | None:
    """The start that leaves least, if that is little; `left[0]` is of the start `1 - size`."""
    best = int(left.argmin())
    return best - size + 1 if left[best] <= _NEAR**2 * power else None
