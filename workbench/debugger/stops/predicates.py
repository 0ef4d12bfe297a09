"""Conditions over a whole step at once: the trees of `engine.taps.predicate`, on recorded arrays.

The same tree gives the same answer here, from a session's statistics, as beside the tap while it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.debugger.errors import CommandError

Value = NDArray[np.float64] | float

_COMPARE: dict[str, Callable[[Value, Value], Any]] = {
    "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
    "==": np.equal, "!=": np.not_equal, "+": np.add, "-": np.subtract, "*": np.multiply,
}  # fmt: skip


def evaluate(tree: Any, names: Mapping[str, Value]) -> Value:
    """The condition's value for every tap and rank; true is 1."""
    if isinstance(tree, int | float):
        return float(tree)
    head, *rest = tree
    if head == "name":
        if rest[0] not in names:
            raise CommandError(f"{rest[0]!r} is unknown at a tap: use {', '.join(sorted(names))}")
        return names[rest[0]]
    values = [evaluate(one, names) for one in rest]
    with np.errstate(all="ignore"):
        if head == "not":
            return np.asarray(np.equal(values[0], 0), dtype=np.float64)
        if head == "-" and len(values) == 1:
            return -values[0]
        if head == "/":
            return np.where(np.equal(values[1], 0), np.nan, np.divide(values[0], values[1]))
        if head in ("and", "or"):
            both = np.logical_and if head == "and" else np.logical_or
            return np.asarray(both(values[0], values[1]), dtype=np.float64)
        return np.asarray(_COMPARE[head](values[0], values[1]), dtype=np.float64)


def holds(tree: Any, names: Mapping[str, Value], taps: int, ranks: int) -> NDArray[np.bool_]:
    """Where the condition holds, [taps, ranks]; None holds everywhere."""
    if tree is None:
        return np.ones((taps, ranks), dtype=bool)
    return np.broadcast_to(np.not_equal(evaluate(tree, names), 0), (taps, ranks))


def cached(kv_lens: Sequence[Sequence[int]], layers: Sequence[int | None], ranks: int) -> NDArray[np.float64]:
    """What `kv_len` stands for, by tap and rank: rows that the layer of the tap has cached after the pass, outside
    the layers those of the one with the fewest. `layers` are the taps' own. [taps, ranks], or [1, ranks] where the
    recording gives one length for all layers; NaN where it gives none."""
    if not kv_lens:
        return np.full((1, ranks), np.nan)
    by_layer = np.array(kv_lens, dtype=np.float64).T  # [layers, ranks]
    if len(by_layer) == 1:
        return by_layer
    fewest = len(by_layer)
    chosen = [fewest if layer is None else min(layer, fewest) for layer in layers]
    found: NDArray[np.float64] = np.vstack([by_layer, by_layer.min(axis=0)])[chosen]
    return found
