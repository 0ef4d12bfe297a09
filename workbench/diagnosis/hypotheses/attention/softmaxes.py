"""Other functions of the scores in the place of the softmax over keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.attention.tree import AttentionTree, Change, Given, softmax
from lockstep.workbench.diagnosis.hypotheses.edits import Detail
from lockstep.workbench.diagnosis.operations.attention import FUSED
from lockstep.workbench.diagnosis.operations.facts import UNIT, rounded
from lockstep.workbench.diagnosis.recording import Array

Function = Callable[[Array], Array]
#: How many keys sparse attention may keep of each query.
_KEPT = (*range(2, 9), 10, 12, 16, 20, 24, 32, 48, 64, 128, 256, 512, 1024, 2048)


def powers(scores: Array, base: Function = np.exp) -> Array:
    """Of each score less the largest of its row."""
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    return np.asarray(base(scores - np.where(np.isfinite(top), top, 0.0)))


def softmax_with(scores: Array, more: float | Array) -> Array:
    """With a number more in the denominator: exp(0) · more."""
    top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), -700.0)
    weights = np.exp(scores - top)
    return np.asarray(weights / (weights.sum(-1, keepdims=True) + more * np.exp(-top)))


def shares(weights: Array, axis: int = -1) -> Array:
    """Divided by their sum; 0 where that is 0."""
    total = weights.sum(axis, keepdims=True)
    return np.asarray(np.divide(weights, total, out=np.zeros_like(weights), where=total > 0))


def _finite(change: Function) -> Function:
    """Of the scores that are not masked."""
    return lambda s: np.where(np.isfinite(s), change(np.where(np.isfinite(s), s, 0.0)), s)


def softmaxes(tree: AttentionTree) -> Iterator[tuple[Detail, Change]]:
    """Every one of a list: (detail, change)."""
    for name, form in _FORMS.items():
        change = partial(_of_scores, form)
        yield (name,), tree.of_all_queries("scores", change) if name.startswith("over_queries") else change
    if tree.site.operation in FUSED:  # probabilities that were recorded show how many there are
        for count in (one for one in _KEPT if one < max(len(given.key_at) for given in tree.given)):
            yield ("likeliest", float(count)), partial(_likeliest, count)
    yield ("before_mask",), lambda s, g: softmax(g.raw) * np.isfinite(s)
    yield ("own_key",), lambda s, g: _on_key((s.shape[2] - g.new + g.rows)[:, None], s)
    yield ("first_key",), lambda s, g: _on_key(0, s)


def _likeliest(count: int, scores: Array, given: Given) -> Array:
    """Of the keys with the highest scores alone."""
    kept = np.argsort(np.argsort(-scores, axis=-1), axis=-1) < count
    return softmax(np.where(kept, scores, -np.inf))


def _on_key(key: int | NDArray[np.intp], scores: Array) -> Array:
    """All on one key, a number or one of each query [T, 1]."""
    return np.broadcast_to((np.arange(scores.shape[2]) == key) * 1.0, scores.shape)


def coarse_softmaxes(unit: float) -> Iterator[tuple[Detail, Change, float]]:
    """The softmax rounded at one of its points to a dtype that is coarser than the engine's: (detail, change, that
    dtype's rounding where it is of the result)."""
    for dtype in (dtype for dtype in UNIT if UNIT[dtype] > unit):

        def low(x: Array, dtype: str = dtype) -> Array:
            return rounded(x, dtype).astype(np.float64)

        yield ("rounded", "scores", dtype), partial(_coarse, lambda s, low: softmax(low(s)), low), 0.0
        for point, form in _COARSE.items():
            yield ("rounded", point, dtype), partial(_coarse, form, low), UNIT[dtype]


def _of_scores(form: Function, scores: Array, given: Given) -> Array:
    return form(scores)


def _coarse(form: Callable[[Array, Function], Array], low: Function, scores: Array, given: Given) -> Array:
    return form(scores, low)


def _not_guarded(scores: Array, axis: int) -> Array:
    """NaN where all are hidden."""
    weights = np.exp(scores - scores.max(axis, keepdims=True, initial=-np.inf))
    return np.asarray(weights / weights.sum(axis, keepdims=True))


_COARSE: dict[str, Callable[[Array, Function], Array]] = {
    "both": lambda s, low: low(softmax(low(s))),
    "result": lambda s, low: low(softmax(s)),
    "powers": lambda s, low: low(shares(low(powers(low(s))))),
    "sum": lambda s, low: powers(s) / low(powers(s).sum(-1, keepdims=True)),
}


#: Forms that go by the differences of a query's scores alone.
BY_DIFFERENCES = (
    "base_2", "not_divided", "plus_one_shifted", "twice", "twice_hidden_too", "uniform", "hardest", "squared",
    "squared_alone", "logarithm", "divided_by_root", "mean", "mean_over_heads", "own_key", "first_key",
)  # fmt: skip
_FORMS: dict[str, Function] = {
    "base_2": lambda s: shares(powers(s, np.exp2)),
    "plus_one": lambda s: softmax_with(s, 1.0),
    "over_queries": lambda s: np.nan_to_num(shares(np.exp(s - s.max(1, keepdims=True, initial=-700.0)), 1)),
    "over_queries_nan": lambda s: _not_guarded(s, 1),
    "over_heads_nan": lambda s: _not_guarded(s, 0),
    "over_heads_alike": lambda s: softmax(np.where(np.isfinite(s), s, 0.0).swapaxes(0, 2)).swapaxes(0, 2),
    "over_heads": lambda s: np.nan_to_num(shares(np.exp(s - s.max(0, keepdims=True, initial=-700.0)), 0)),
    "not_divided": powers,
    "not_divided_no_maximum": np.exp,
    "sigmoid": lambda s: np.asarray(1 / (1 + np.exp(-s))),
    "sigmoid_shares": lambda s: shares(1 / (1 + np.exp(-s))),
    "of_magnitude": lambda s: softmax(_finite(np.abs)(s)),
    "of_negative": lambda s: softmax(_finite(np.negative)(s)),
    "twice": lambda s: softmax(np.where(np.isfinite(s), softmax(s), s)),
    "uniform": lambda s: softmax(_finite(np.zeros_like)(s)),
    "hardest": lambda s: (s == s.max(-1, keepdims=True)) * 1.0,
    "relu": lambda s: shares(np.where(s > 0, s, 0.0)),
    "squared": lambda s: shares(softmax(s) ** 2),
    "logarithm": lambda s: np.log(softmax(s)),
    "hidden_counted": lambda s: softmax(np.where(np.isfinite(s), s, 0.0)) * np.isfinite(s),
    "divided_by_root": lambda s: powers(s) / np.sqrt((powers(s) ** 2).sum(-1, keepdims=True)),
    "left_out": lambda s: np.where(np.isfinite(s), s, 0.0),
    "plus_one_shifted": lambda s: powers(s) / (1 + powers(s).sum(-1, keepdims=True)),
    "squared_alone": lambda s: softmax(s) ** 2,
    "twice_hidden_too": lambda s: softmax(softmax(s)),
    "mean_over_heads": lambda s: np.broadcast_to(softmax(s).mean(0), s.shape),
    "mean": lambda s: softmax(s) / np.maximum(np.isfinite(s).sum(-1, keepdims=True), 1),
}
