"""What may stand in a formula in place of what does: functions by family, and what may be done to any value.

All take and give float64. `rows` in the names of functions: they mix tokens, and so need all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.formula import FUNCTIONS as RIGHT
from lockstep.engine.graph.formula import Array, Node, clamped_within, silu, swish
from lockstep.engine.graph.routing import added_to_rows, candidates, taken, weighed_sum
from lockstep.workbench.diagnosis.hypotheses.head_orders import interleaved
from lockstep.workbench.diagnosis.hypotheses.recurrent_orders import OTHER_ORDERS
from lockstep.workbench.diagnosis.hypotheses.recurrent_rules import BY_RULES
from lockstep.workbench.diagnosis.hypotheses.roundings import (
    DAMAGED,
    REREAD,
    ROUNDINGS,
    WEIGHTS,
    Rounding,
    float8,
)
from lockstep.workbench.diagnosis.operations.facts import LARGEST, rounded


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -700, 700))))


_erf = np.vectorize(math.erf, otypes=[np.float64])
_ROOT_2, _TANH = math.sqrt(2), math.sqrt(2 / math.pi)

BINARY: Mapping[str, Callable[..., Any]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide,
}  # fmt: skip
#: Activations that models and frameworks have.
ACTIVATIONS: Mapping[str, Callable[..., Any]] = {
    "silu": silu,
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / _ROOT_2)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(_TANH * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "relu": lambda x: np.maximum(x, 0.0),
    "relu2": lambda x: np.maximum(x, 0.0) ** 2,
    "sigmoid": _sigmoid,
    "tanh": lambda x: np.tanh(x),
    "softplus": lambda x: np.logaddexp(0.0, x),
    "elu": lambda x: np.asarray(np.where(x > 0, x, np.expm1(np.minimum(x, 0.0)))),
    "leaky_relu": lambda x: np.maximum(x, 0.01 * x),
    "mish": lambda x: x * np.tanh(np.logaddexp(0.0, x)),
    "hard_silu": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "relu6": lambda x: np.clip(x, 0, 6),
    "softsign": lambda x: x / (1 + np.abs(x)),
    "silu_of_the_negated": lambda x: silu(-x),
    "identity": lambda x: x,
}  # fmt: skip
#: Functions of formulas by the name that they have here.
SAME_AS: Mapping[str, str] = {"above_zero": "relu"}
#: Of two arguments, which a function of one of them may be taken out of.
SUMMING = (*BINARY, "summed_heads")
#: The same with a number that is solved for.
SLOPED: Mapping[str, Callable[..., Any]] = {
    "swish": swish,
    "leaky": lambda x, slope: np.where(x > 0, x, slope * x),
}


def _of_parts(x: Array, parts: float) -> Array:
    """Of each of so many parts of the row its own mean, as wide as the row."""
    cut = x.reshape(*x.shape[:-1], int(parts), -1)
    return np.repeat(cut.mean(-1), cut.shape[-1], axis=-1)


def _of_part(x: Array, parts: float, which: float) -> Array:
    return np.asarray(x.reshape(*x.shape[:-1], int(parts), -1)[..., int(which), :].mean(-1, keepdims=True))


REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "mean": lambda x: x.mean(-1, keepdims=True),
    "total": lambda x: x.sum(-1, keepdims=True),
    "mean_of_n_less_1": lambda x: x.sum(-1, keepdims=True) / (x.shape[-1] - 1),
    "largest": lambda x: x.max(-1, keepdims=True),
    "mean_over_heads": lambda x: x.mean((-2, -1), keepdims=True) if x.ndim == 3 else x[..., :0],
    "mean_of_each_part": _of_parts,
    "mean_of_part": _of_part,
}
UNARY: Mapping[str, Callable[..., Any]] = {
    "root": np.sqrt,
    "square": np.square,
    "size": np.abs,
    "inverse": lambda x: 1 / np.where(x == 0, 1, x),
    "negative": np.negative,
}
#: Of another base, as kernels have for its speed; the first two terms of its series.
EXPONENTIALS: Mapping[str, Callable[..., Any]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "plus_one": lambda x: 1 + x,
}
#: Families of functions that are mistaken for each other.
FAMILIES: tuple[Mapping[str, Callable[..., Any]], ...] = (
    BINARY,
    ACTIVATIONS,
    REDUCTIONS,
    UNARY,
    EXPONENTIALS,
)

#: How a weight, or a number beside a tensor, may be meant.
CONVENTIONS: Mapping[str, Callable[..., Any]] = {
    "plus_one": EXPONENTIALS["plus_one"],
    "minus_one": lambda x: x - 1,
    "one_minus": lambda x: 1 - x,
    "squared": np.square,
    "inverted": UNARY["inverse"],
}


def _halves(x: Array) -> tuple[Array, Array]:
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


#: Orders in which the last axis may be read; those of halves and pairs where its length is even.
ORDERS: Mapping[str, Callable[..., Any]] = {
    "backwards": lambda x: x[..., ::-1],
    "pairs_as_halves": lambda x: np.concatenate([x[..., ::2], x[..., 1::2]], -1),
    "halves_as_pairs": lambda x: np.stack(_halves(x), -1).reshape(x.shape),
    "halves_exchanged": lambda x: np.concatenate(_halves(x)[::-1], -1),
    "pairs_exchanged": lambda x: x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape),
    "first_half_twice": lambda x: np.concatenate([_halves(x)[0]] * 2, -1),
    "second_half_twice": lambda x: np.concatenate([_halves(x)[1]] * 2, -1),
    "columns_moved": lambda x, by: np.roll(x, int(by), -1),
}


def _both(a: Array, b: Array, parts: float = 1.0) -> Array:
    """Two tensors side by side, in so many alternating blocks."""
    cut = [np.split(x, int(parts), axis=-1) for x in (a, b)]
    return np.concatenate([one for pair in zip(*cut, strict=True) for one in pair], axis=-1)


def _woven(a: Array, b: Array) -> Array:
    return np.stack([a, b], axis=-1).reshape(*a.shape[:-1], -1)


#: How what two tensors are side by side may be split in two, where it was made otherwise.
SPLITS: Mapping[str, Callable[..., Any]] = {
    "even_columns": lambda a, b: _both(a, b)[..., ::2],
    "odd_columns": lambda a, b: _both(a, b)[..., 1::2],
    "first_half_woven": lambda a, b: _halves(_woven(a, b))[0],
    "second_half_woven": lambda a, b: _halves(_woven(a, b))[1],
    "first_half_of_blocks": lambda a, b, parts: _halves(_both(a, b, parts))[0],
    "second_half_of_blocks": lambda a, b, parts: _halves(_both(a, b, parts))[1],
}


def _rounded(dtype: str, x: Any) -> Array:
    return rounded(np.asarray(x), dtype).astype(np.float64)


def _overflowing(x: Array, dtype: str) -> Array:
    return np.where(np.abs(x) > LARGEST[dtype], np.inf, x)


def _centred(x: Array) -> Array:
    return np.asarray(x - x.mean(-1, keepdims=True))


def _kept(x: Array, count: float) -> Array:
    order = np.argsort(np.argsort(-np.abs(x), axis=-1), axis=-1)
    return np.where(order < count, x, 0.0)


def _chosen_in_turn(scores: Array, top_k: float, groups: float, *grouping: float) -> Array:
    """The best experts where these are dealt to the groups in turn, not one group's after the other's."""
    count = scores.shape[1]
    order = interleaved(count, count // int(groups))
    dealt = np.empty_like(scores)
    dealt[:, order] = candidates(scores[:, order], groups, *grouping)
    best = np.argsort(-dealt, -1, kind="stable")[:, : int(top_k)]
    return np.sort(best, -1).astype(np.float64)


def _chosen_in_groups_before(
    choice: Array, top_k: float, groups: float, top: float, best: float, added: Array
) -> Array:
    """The best experts of the groups that were the best before something was added."""
    kept = np.isfinite(candidates(choice - added, groups, top, best))
    order = np.argsort(-np.where(kept, choice, -np.inf), -1, kind="stable")[:, : int(top_k)]
    return np.sort(order, -1).astype(np.float64)


def _chosen_overwriting(
    choice: Array, top_k: float, groups: float, top_groups: float, best: float, logits: Array
) -> Array:
    """One after the other the expert with the largest logit, which is 0 from then on and may be the largest again."""
    left, found = logits.copy(), []
    for _ in range(int(top_k)):
        found.append(left.argmax(-1))
        np.put_along_axis(left, found[-1][:, None], 0.0, -1)
    return np.sort(np.stack(found, -1), -1).astype(np.float64)


def _least_dropped(x: Array) -> Array:
    """Rows whose least number is 0."""
    found = x.copy()
    np.put_along_axis(found, x.argmin(-1)[:, None], 0.0, -1)
    return found


def _within(dtype: str, function: str, x: Array) -> Array:
    """A function of what is rounded, and rounded again."""
    return _rounded(dtype, RIGHT[function](_rounded(dtype, x)))


def _mixed_beside(logits: Array, ids: Array, jitter: float) -> Array:
    """SparseMixer's weights of each chosen expert as if it were the only one: none is taken out before it."""
    alone = [RIGHT["mixed"](logits, ids[:, slot : slot + 1], jitter) for slot in range(ids.shape[1])]
    return np.concatenate(alone, axis=1)


def _softmax_within_groups(logits: Array, *grouping: float) -> Array:
    """Scores that are shares among the experts of the groups that are left, zero of others."""
    scores = RIGHT["softmax"](logits)
    kept = np.where(np.isfinite(candidates(scores, *grouping)), scores, 0.0)
    return np.asarray(kept / kept.sum(-1, keepdims=True))


def _shares_of_corrected(x: Array, *rest: Array) -> Array:
    """Each over the sum of its row where the chosen experts' corrections count as well."""
    correction, ids = rest[-2:]
    return np.asarray(x / (x + correction[ids.astype(np.int64)]).sum(-1, keepdims=True))


def _columns_within(x: Array, low: float, high: float) -> Array:
    """Minus infinity in all columns but those."""
    columns = np.arange(x.shape[-1])
    return np.where((columns >= low) & (columns <= high), x, -np.inf)


def _shares_within(x: Array, *rest: Array) -> Array:
    """Each over the sum of those of its row whose experts are `held`; of a row that has none over that of all."""
    *eps, ids, held = rest
    own = np.where(np.isin(ids, held), x, 0.0).sum(-1, keepdims=True)
    return np.asarray(x / (np.where(own > 0, own, x.sum(-1, keepdims=True)) + sum(eps)))


def _slots_kept(x: Array, kept: NDArray[np.bool_]) -> Array:
    """What a token's slots, the second axis, have: nothing in those that are not kept."""
    if kept.all() or not kept.any():
        raise IndexError("it has no so many slots")
    return np.where(kept.reshape(-1, *(1,) * (x.ndim - 2)), x, 0.0)


def _codes(x: Array, largest: float) -> Array:
    """Numbers as the codes of each row, by its own largest number: without the scale that they are to be read with."""
    most = np.abs(x).max(-1, keepdims=True)
    return np.asarray(x / np.where(most > 0, most, 1.0) * largest)


def last_seen(allowed: NDArray[Any]) -> NDArray[np.intp]:
    """How many keys behind each one the last key is that the query of a mask [..., K] sees."""
    keys = np.arange(allowed.shape[-1])
    return np.asarray(np.where(allowed, keys, -1).max(-1, keepdims=True) - keys)


#: What a mask may show instead.
MASKS: Mapping[str, Callable[..., Any]] = {
    "own_hidden": lambda allowed: (allowed > 0) & (last_seen(allowed) != 0),
    "newest_seen": lambda allowed, count: (allowed > 0) & (last_seen(allowed) < count),
    "later_seen": lambda allowed, count: last_seen(allowed) >= -count,
}
#: What may be done to any value: with the numbers that it takes.
CHANGES: Mapping[str, Callable[..., Any]] = {
    **{dtype: partial(_rounded, dtype) for dtype in ("bfloat16", "float16", "float32")},
    "overflowing": lambda x: _overflowing(x, "float16"),
    "minus_exp": lambda x: -np.exp(x),
    "centred": lambda x: _centred(x),
    "scaled": lambda x, by: x * by,
    "clamped": lambda x, low, high: np.clip(x, low, high),
    "clamped_above": np.minimum,
    "clamped_below": np.maximum,
    "clamped_within": clamped_within,
    "dropped_below": lambda x, limit: np.where(np.abs(x) < limit, 0.0, x),
    "largest_kept": _kept,
    "plus": lambda x, other, by: x + by * other,
    "unweighted_sum": lambda x, weights: x.sum(1),
    "codes": _codes,
    "bias_behind_weights": lambda x, weights, bias: weighed_sum(x - bias, weights) + bias.sum(1),
    "bias_left_out": lambda x, weights, bias: weighed_sum(x - bias, weights),
    "bias_twice": lambda x, weights, bias: weighed_sum(x + bias, weights),
    "first_slots": lambda x, count: _slots_kept(x, np.arange(x.shape[1]) < count),
    "slots_behind": lambda x, count: _slots_kept(x, np.arange(x.shape[1]) >= count),
    "falling": lambda x: -np.sort(-x, axis=-1),
    "chosen_in_turn": _chosen_in_turn,
    "chosen_in_groups_before": _chosen_in_groups_before,
    "chosen_overwriting": _chosen_overwriting,
    "least_dropped": _least_dropped,
    "first_of_row": lambda x: np.broadcast_to(x[..., :1], x.shape),
    "by_bits": lambda x: np.ascontiguousarray(x, np.float32).view(np.int32).astype(np.float64),
    "shares_of_all": lambda x, *rest: x / _sigmoid(rest[-1]).sum(-1, keepdims=True),
    **{
        f"{function}_in_{dtype}": partial(_within, dtype, function)
        for function in ("softmax", "sigmoid")
        for dtype in ("bfloat16", "float16")
    },
    "times_of_slots": lambda x, scale, ids: x * scale[: ids.shape[1]],
    "shares_within": _shares_within,
    "shares_of_corrected": _shares_of_corrected,
    "softmax_of_chosen": lambda x, ids, logits: RIGHT["softmax"](taken(logits, ids)),
    "softmax_within_groups": _softmax_within_groups,
    "columns_within": _columns_within,
    "shares_and_more": lambda x, *rest: RIGHT["shares"](x, sum(rest)),
    "gated_together": lambda x, gated, gate: _sigmoid(gate) * x + gated,
    "mixed_beside": _mixed_beside,
    "softmax_taken": lambda logits, ids, jitter: taken(RIGHT["softmax"](logits), ids),
    "repeatedly_to_rows": lambda x, bias, ids, times: x + times * added_to_rows(0 * x, bias, ids),
    "unweighed_to_rows": lambda x, bias, ids, weights: x + added_to_rows(0 * x, bias, ids) / weights[..., None],
    "unweighed": lambda x, weights: x[:, None] * np.ones_like(weights)[..., None],
}  # fmt: skip
#: Of these the results have rounding of the size of their arguments, not of their own.
CANCELLING = (
    "gelu",
    "gelu_tanh",
    "centred",
    "add",
    "subtract",
    "plus",
    "elu",
    "one_minus",
    "minus_one",
    "scaled",
)
#: What numbers may have been rounded to beside the 16-bit dtypes, by name; weights alone; and as what they are misread.
COARSE: Mapping[str, Rounding] = {to: change for to, change in ROUNDINGS.items() if to not in CHANGES}
MISREAD: Mapping[str, Rounding] = {**REREAD, **DAMAGED}


def _tabled(change: Rounding, x: NDArray[Any]) -> NDArray[Any]:
    found = change(np.asarray(x))
    if found is None:
        raise IndexError("it changes nothing here")
    return np.asarray(found)


def _reshaped(x: Array, group: float, rows: float, together: float = 1) -> Array:
    """Each group of columns, taken for so many rows of columns of which so many stay together, transposed."""
    cut = x.reshape(*x.shape[:-1], -1, int(rows), int(group) // int(rows * together), int(together))
    return cut.swapaxes(-2, -3).reshape(x.shape)


#: Other orders of the columns that are multiplied: by groups of so many.
GROUPED: Mapping[str, Callable[..., Any]] = {
    "reshaped": _reshaped,
    "groups_backwards": lambda x, group: x.reshape(*x.shape[:-1], -1, int(group))[..., ::-1].reshape(x.shape),
    "groups_reversed": lambda x, group: x.reshape(*x.shape[:-1], -1, int(group))[..., ::-1, :].reshape(
        x.shape
    ),
}


def _saturated(x: Array, limit: Array) -> Array:
    """Cut off, and in eight bits up to that limit."""
    step = np.abs(limit) / 127
    return np.asarray(np.rint(np.clip(x, -np.abs(limit), np.abs(limit)) / step) * step)


def _saturated_float8(x: Array, limit: Array) -> Array:
    """The same in eight-bit floating point (e4m3), whose largest number is 448."""
    step = np.abs(limit) / 448
    return float8(np.asarray(x / step), 3, -6, 448.0, scaled=False) * step


#: How rows may be brought to one size.
NORMS: Mapping[str, Callable[..., Any]] = {
    "layer_normed": lambda x, eps: (
        _centred(x) / np.sqrt(np.square(_centred(x)).mean(-1, keepdims=True) + eps)
    ),
    "unit_length": lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True),
}


def _with_rows(x: Array, rows: slice, value: float) -> Array:
    found = x.copy()
    found[rows] = value
    return found


def _with_axes_exchanged(state: Array) -> Array:
    """What a state [H, A, B] is where its memory is taken for [H, B, A]."""
    heads, rows, columns = state.shape
    return state.reshape(heads, columns, rows).swapaxes(1, 2)


#: Other pairs of key heads with value heads; a state that first tokens of chunks keep whole; what a convolution may
#: have kept of its rows [W - 1, C]; decay, update and reading in another order.
RECURRENT: Mapping[str, Callable[..., Any]] = {
    "paired_in_turn": lambda keys, beta: np.tile(keys, (1, beta.shape[1] // keys.shape[1], 1)),
    "paired_as": lambda keys, beta, *heads: np.concatenate([keys, 0 * keys[:, :1]], 1)[
        :, np.array(heads, int)
    ],
    "kept_at_chunks": lambda share, size: _with_rows(share, slice(int(size), None, int(size)), 1.0),
    "axes_exchanged": _with_axes_exchanged,
    "oldest_row_lost": lambda rows: np.concatenate([0 * rows[:1], rows[1:]]),
    "newest_row_lost": lambda rows: np.concatenate([0 * rows[:1], rows[:-1]]),
    **OTHER_ORDERS,
    **BY_RULES,
}
#: What is done to logits as well.
HEADS: Mapping[str, Callable[..., Any]] = {
    "capped": lambda x, cap: cap * np.tanh(x / cap),
    "log_softmax": lambda x: x - np.logaddexp.reduce(x, -1, keepdims=True),
    "probabilities": lambda x: np.exp(x - np.logaddexp.reduce(x, -1, keepdims=True)),
}
ROUNDED: Mapping[str, Callable[..., Any]] = {
    to: partial(_tabled, change) for to, change in {**COARSE, **WEIGHTS, **MISREAD}.items()
}
#: Functions of which a number depends on other rows, or other columns.
WHOLE, MIXING = frozenset(ROUNDED), frozenset({"log_softmax", "probabilities"})
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **RIGHT, **BINARY, **ACTIVATIONS, **SLOPED, **REDUCTIONS, **UNARY, **EXPONENTIALS, **CONVENTIONS, **ORDERS,
    **SPLITS, **CHANGES, **MASKS, **GROUPED, **RECURRENT, **NORMS, **HEADS, **ROUNDED, "saturated": _saturated,
    "saturated_float8": _saturated_float8,
}  # fmt: skip


def edited_value(formula: Node, given: Mapping[str, Any]) -> Any:
    """The value of an edited formula; `given` has those of its leaves, but for numbers."""
    if not formula.args:
        return given[formula.name] if formula.name in given else float(formula.name)
    return FUNCTIONS[formula.name](*(edited_value(one, given) for one in formula.args))
