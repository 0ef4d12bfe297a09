"""A wrong row-wise operation, on which edited formulas are tried: on a sample of its wrong rows, and then on all.

What an edit costs is the same however many rows were recorded: only those that explain something of the sample are
evaluated whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.formula import Node, product
from lockstep.workbench.diagnosis.hypotheses.edits import nodes, put
from lockstep.workbench.diagnosis.hypotheses.functions import (
    ACTIVATIONS,
    CANCELLING,
    FUNCTIONS,
    MIXING,
    WHOLE,
)
from lockstep.workbench.diagnosis.operations.recorded import Row
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Elements of the sample, at which pairs are tried as well, and rows of it at the least; columns of a product.
ELEMENTS, _ROWS, _COLUMNS = 1 << 12, 4, 16


#: Which rows, or columns; None: all.
Indices = NDArray[np.intp] | None
Load = Callable[[], Any]


class Tried(Protocol):
    """What formulas are tried on, whatever the operation: `search` and `solve` need no more."""

    @property
    def formula(self) -> Node:
        """The right one."""

    @property
    def error(self) -> float:
        """The norm of the error on the sample."""

    @property
    def noise(self) -> float:
        """The norm of the noise on the sample."""

    def rest(self, tree: Node, numbers: Mapping[str, Any]) -> Array | None:
        """What the formula leaves of the sample, seen less predicted, in one axis; None where it gives no such tensor.
        `numbers` are the values of leaves that are solved for."""

    def value(self, node: Node) -> Array | None:
        """A node of the right formula on the sample; None where it has no value by itself."""


class Lazy:
    """Tensors by name, each loaded when it is first asked for."""

    def __init__(self, load: Mapping[str, Load]) -> None:
        self._load, self._held = dict(load), dict[str, Any]()

    def __contains__(self, name: str) -> bool:
        return name in self._load

    def __iter__(self) -> Iterator[str]:
        return iter(self._load)

    def __getitem__(self, name: str) -> Any:
        if name not in self._held:
            self._held[name] = self._load[name]()
        return self._held[name]


@dataclass(eq=False)
class RowTrial:
    """`tokens` are leaves with an axis of tokens, `others` those without: weights, numbers. Of a product, of
    `matrices`, a sample of columns is evaluated, and so of the rows of its matrix."""

    site: Site
    formula: Node
    tokens: Lazy
    others: Lazy
    elements: int = ELEMENTS
    matrices: Lazy = field(default_factory=lambda: Lazy({}))
    _held: dict[tuple[int, bool, bool], Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        deviation = self.site.deviation
        assert deviation is not None, "what is right needs no hypothesis"
        self.scope = deviation.scopes[0]
        wrong = np.flatnonzero(self.scope.any(tuple(range(1, self.scope.ndim))))
        self.columns = None
        if any(node.name == "product" for _, node in nodes(self.formula)):
            self.columns = evenly(np.flatnonzero(self.scope.any(0)), _COLUMNS)
        width = max(1, self.scope[0].size if self.columns is None else len(self.columns))
        self.rows = evenly(wrong, max(_ROWS, self.elements // width))
        self._inside = self._sampled(self.scope)
        self._seen = self._sampled(self.site.seen)
        rest = self._left(self._sampled(self.site.expected))
        self.error = math.inf if rest is None else float(np.linalg.norm(rest))
        self.noise = float(np.linalg.norm(self._sampled(self.site.parts[0].noise)[self._inside]))
        self.functions = {**FUNCTIONS, **mixing(self.site.rows)}
        self._kept = {id(node) for _, node in nodes(self.formula)}  # edited formulas share them

    def _sampled(self, x: NDArray[Any]) -> NDArray[Any]:
        return x[self.rows] if self.columns is None else x[np.ix_(self.rows, self.columns)]

    def _left(self, predicted: Array) -> Array | None:
        """Infinite numbers that were seen, and are predicted, leave nothing."""
        seen, guess = self._seen[self._inside], predicted[self._inside]
        rest = np.where(seen == guess, 0.0, seen - guess)
        rest[np.isnan(seen) & np.isnan(guess)] = 0.0
        return np.asarray(rest) if np.isfinite(rest).all() else None

    def rest(self, tree: Node, numbers: Mapping[str, Any]) -> Array | None:
        with np.errstate(all="ignore"):
            try:
                found = np.asarray(self._evaluate(tree, numbers, self.rows, self.columns))
                if self.columns is not None and found.shape != self._seen.shape:
                    return None
                shaped = _shaped(found, self._seen.shape)
            except (ValueError, IndexError, TypeError):  # operands that do not fit together
                return None
            return None if shaped is None else self._left(shaped)

    def value(self, node: Node) -> Array | None:
        if not node.args and not any(node.name in held for held in (self.tokens, self.others, self.matrices)):
            return None
        multiplied = self.columns is not None and (node.name == "x" or node.name in self.matrices)
        return np.asarray(self._evaluate(node, {}, self.rows, None if multiplied else self.columns))

    def whole(self, tree: Node) -> Array:
        """The formula on all rows."""
        with np.errstate(all="ignore"):
            found = np.asarray(self._evaluate(tree, {}, None), dtype=np.float64)
        shaped = _shaped(found, self.site.expected.shape)
        assert shaped is not None, "what fits the sample fits all of it"
        return shaped

    def noise_of(self, tree: Node) -> Array | None:
        """What rounding may leave of nodes that the right formula has not: of the size of their result or, where they
        take differences, of their terms. None where there are none."""
        known, facts = {node.name for _, node in nodes(self.formula)}, self.site.facts
        sums = self.formula.name == "add"  # whose terms may be larger than it
        new = [
            (path, node)
            for path, node in nodes(tree)
            if node.args and (node.name not in known or (sums and path))
        ]
        if not new:
            return None
        right = self.whole(tree)
        noise = 3 * facts.unit * np.abs(right)
        for path, node in new:
            unit = facts.unit if len(path) < 2 and node.name not in ACTIVATIONS else facts.sum_unit
            with np.errstate(all="ignore"):
                value = np.asarray(self._evaluate(node, {}, None))
                size = np.abs(value)
                if node.name in CANCELLING:
                    terms = np.abs(np.asarray(self._evaluate(node.args[0], {}, None)))
                    size = np.maximum(
                        size, (4 if node.name in ACTIVATIONS else 1) * terms.max(-1, keepdims=True)
                    )
                moved = self._evaluate(put(tree, path, Node("?")), {"?": value + unit * size}, None)
                shaped = _shaped(np.asarray(moved), right.shape)
                noise += 0 if shaped is None else np.nan_to_num(np.abs(shaped - right), posinf=0.0)
        return noise

    def _evaluate(
        self, node: Node, numbers: Mapping[str, Any], rows: Indices, columns: Indices = None
    ) -> Any:
        """On some rows, or all, and some columns of a product: what mixes those on all of them in either case."""
        if not node.args:
            return self._leaf(node.name, numbers, rows, columns)
        key = id(node), rows is None, columns is None
        if key in self._held:
            return self._held[key]
        if node.name == "product":
            x, weight = node.args
            found = product(self._evaluate(x, numbers, rows), self._evaluate(weight, numbers, columns))
        elif node.name == "row":
            table, token = node.args
            found = FUNCTIONS["row"](
                self._evaluate(table, numbers, None), self._evaluate(token, numbers, rows)
            )
        elif node.name.startswith("rows_") or node.name in WHOLE:
            args = [self._evaluate(one, numbers, None, columns) for one in node.args]
            found = self.functions[node.name](*args)
            found = found if rows is None else found[rows]
        elif node.name in MIXING and columns is not None:
            found = self._evaluate(node, numbers, rows)[..., columns]
        else:
            args = [self._evaluate(one, numbers, rows, columns) for one in node.args]
            found = self.functions[node.name](*args)
        if id(node) in self._kept:
            self._held[key] = found
        return found

    def _leaf(self, name: str, numbers: Mapping[str, Any], rows: Indices, columns: Indices) -> Any:
        if name in numbers:
            return numbers[name]
        if name in self.matrices:
            found = self.matrices[name]
            if columns is not None or found is None:
                raise IndexError(f"{name} is no result, or not there")
            return found if rows is None else found[rows]
        if name in self.tokens:
            found = self.tokens[name] if rows is None else self.tokens[name][rows]
        else:
            # Arrays, so that what asks for rows or columns of a number is an IndexError, not an AttributeError.
            found = np.asarray(self.others[name] if name in self.others else float(name))
        if columns is None or not found.ndim:
            return found
        if found.shape[-1] != self.site.expected.shape[-1]:
            raise IndexError(f"{name} has other columns than the result")
        return found[..., columns]


def evenly(some: NDArray[np.intp], most: int) -> NDArray[np.intp]:
    """So many of them at most, from first to last."""
    return np.asarray(some[np.unique(np.linspace(0, len(some) - 1, min(len(some), most)).astype(int))])


def _shaped(found: Array, shape: tuple[int, ...]) -> Array | None:
    """Heads side by side as heads; None of another shape."""
    if found.size == int(np.prod(shape)) and found.ndim >= 2:
        return found.reshape(shape)
    return np.broadcast_to(found, shape) if found.ndim == len(shape) else None


def mixing(rows: Sequence[Row]) -> dict[str, Callable[..., Array]]:
    """Functions that mix the tokens of these rows."""
    of_sequence = [(row.step, row.seq) for row in rows]
    of_step = [(row.step, 0) for row in rows]
    own = np.arange(len(rows))
    before = np.maximum(own - 1, 0)
    after = np.minimum(own + 1, len(rows) - 1)
    steps = np.array([row.step for row in rows], dtype=np.intp)
    in_turn = own.copy()
    for step in np.unique(steps):
        in_turn[steps == step] = np.roll(own[steps == step], 1)
    begins = np.searchsorted(steps, steps)
    last: dict[int, int] = {}
    of_own = own.copy()
    for i, row in enumerate(rows):
        of_own[i], last[row.seq] = last.get(row.seq, i), i
    return {
        "rows_before": lambda x: x[before],
        "rows_before_of_sequence": lambda x: x[of_own],
        "rows_after": lambda x: x[after],
        "rows_of_first_chunk": lambda x, size: x[begins + (own - begins) % int(size)],
        "rows_before_in_turn": lambda x: x[in_turn],
        "rows_mean_of_sequence": lambda x: _over_groups(x, of_sequence),
        "rows_mean_of_step": lambda x: _over_groups(x, of_step),
        "rows_softmax_of_sequence": lambda x: _over_groups(x, of_sequence, _softmax_of_column),
        "rows_shares_of_sequence": lambda x, *eps: _over_groups(x, of_sequence, _shares_of_column),
        "rows_shares_of_step": lambda x, *eps: _over_groups(x, of_step, _shares_of_column),
        "rows_softmax_of_step": lambda x: _over_groups(x, of_step, _softmax_of_column),
    }


def _mean_of_column(x: Array) -> Array:
    return np.asarray(x.mean(0))


def _shares_of_column(x: Array) -> Array:
    """Over the sum of all tokens, of each column by itself."""
    return np.asarray(x / x.sum(0))


def _softmax_of_column(x: Array) -> Array:
    """Over the tokens, of each column by itself."""
    return np.asarray(np.exp(x - np.logaddexp.reduce(x, 0)))


def _over_groups(
    x: Array, groups: Sequence[tuple[int, int]], made: Callable[[Array], Array] = _mean_of_column
) -> Array:
    ids, found = np.array(groups), np.empty_like(x)
    for group in np.unique(ids, axis=0):
        there = (ids == group).all(1)
        found[there] = made(x[there])
    return found
