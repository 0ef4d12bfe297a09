"""Hypotheses about experts that run in one kernel: those of each operation within it, tried at its end.

What an operation would have given in another form goes through all that comes behind it, as that should be; what comes
out is held against what was recorded. So they are the hypotheses, and the words, of the single operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph import Operation
from lockstep.engine.graph.formula import Node, formula_of, numbers_of
from lockstep.workbench.diagnosis.hypotheses.edits import Edit, nodes, together
from lockstep.workbench.diagnosis.hypotheses.functions import FUNCTIONS
from lockstep.workbench.diagnosis.hypotheses.generate import Choices, edits_of
from lockstep.workbench.diagnosis.hypotheses.routing import (
    OF_ROUTERS,
    ROUTED,
    inputs_elsewhere,
    routing_choices,
)
from lockstep.workbench.diagnosis.hypotheses.rowwise import CLAMP_NUMBERS
from lockstep.workbench.diagnosis.hypotheses.search import distinct, single
from lockstep.workbench.diagnosis.hypotheses.solve import Solved
from lockstep.workbench.diagnosis.hypotheses.trial import evenly
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.hypotheses.words import wording
from lockstep.workbench.diagnosis.operations.expected import Operands
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.mixture import OUTPUT, MixtureValues, mixture_formula
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: What the experts' outputs are multiplied by.
_WEIGHTS = "mlp.topk_weights"
#: Wrong tokens on which hypotheses are tried, and hypotheses that are reported.
ROWS, _SHOWN = 12, 12


def operands_of(site: Site) -> Operands:
    """What the operation of a site works on."""
    return Operands(site.facts, site.rows, site.inputs, site.weights, site.span, None, None, site.held)


def wrong_rows(site: Site, most: int = ROWS) -> NDArray[np.intp]:
    """So many of the wrong tokens, from first to last."""
    assert site.deviation is not None, "what is right needs no hypothesis"
    wrong = np.flatnonzero(site.deviation.scopes[0].any(-1))
    return evenly(wrong, most)


def mixture_edits(site: Site) -> Iterator[Variant]:
    """Every single edit of an operation within that explains something of what came out, the nearest first."""
    if site.deviation is None or site.seen.shape != site.expected.shape:
        return
    values, found, stages = MixtureValues(operands_of(site)), list[Solved](), dict[int, InnerOperation]()
    # Of hypotheses that give the same those of the operation nearest to the end are reported.
    for operation in reversed(list(values.operations.values())):
        stage = InnerOperation(site, values, operation)
        for one in single(stage, stage.edits()):
            found.append(one)
            stages[id(one)] = stage
    for one in distinct(next(iter(stages.values())), found)[:_SHOWN] if found else ():
        stage = stages[id(one)]
        words, tree = wording(stage.own_site, one.edits), together(one.edits, stage.formula)
        yield Variant(words.name, words.kind, words.text, words.fitted, stage.whole(tree), one.cost)


@dataclass(eq=False)
class InnerOperation:
    """One operation within, whose edited formulas are tried at the end (`Tried`)."""

    site: Site
    values: MixtureValues
    operation: Operation
    _held: dict[tuple[int, bool], Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        assert self.site.deviation is not None, "what is right needs no hypothesis"
        self.rows = wrong_rows(self.site)
        self._scope = self.site.deviation.scopes[0][self.rows]
        rest = self._left(self.site.expected[self.rows])
        self.error = np.inf if rest is None else float(np.linalg.norm(rest))
        self.noise = float(np.linalg.norm(self.site.parts[0].noise[self.rows][self._scope]))

    @cached_property
    def formula(self) -> Node:
        """What the operation should have computed, of its inputs by role."""
        found = formula_of(self.operation, self._facts.model)
        biased = self.operation.bias and getattr(self._facts.model, self.operation.bias)
        return found.args[0] if self.operation.kind == "linear" and not biased else found

    @cached_property
    def behind(self) -> Node:
        """All that comes after it, its result as a leaf; a leaf alone where nothing does."""
        given = {*self.values.operands.inputs, self.operation.tap}
        last = list(self.values.operations)[-1] == self.operation.tap
        return Node(self.operation.tap) if last else mixture_formula(self._facts.model, given)

    @property
    def _facts(self) -> Facts:
        return self.site.facts

    @cached_property
    def inputs(self) -> Mapping[str, Array]:
        """Of the operation, by role."""
        return {role: self.values.results[tap][0] for role, tap in self.operation.inputs.items()}

    @cached_property
    def own_site(self) -> Site:
        """The operation by itself, as words need it: right."""
        value, noise = self.values.results[self.operation.tap]
        part = replace(
            self.site.parts[0], inputs=self.inputs, seen=value, expected=value,
            noise=np.broadcast_to(noise, value.shape),
        )  # fmt: skip
        tap, start = self.site.near(self.operation.tap), f"{self.operation.tap}."
        own = {one.removeprefix(start): name for one, name in self.site.weights.items() if start in one}
        return replace(self.site, tap=tap, operation=self.operation.kind, parts=(part,), weights=own)

    def edits(self) -> Iterator[Edit]:
        """Those of the operation by itself."""
        match self.operation.kind:
            case kind if kind in ROUTED and kind != "experts":
                operands = {role: list(found) for role, found in self._terms.items()}
                every = routing_choices(self.formula, self._others, operands, self._facts.dtype)
                yield from (one for one in every if not (kind == "choice" and one.free))
            case "experts" if self.formula.name == "added_to_rows":
                yield Edit((), "left_out", (0.0,))
                if self.operation.tap == OUTPUT:
                    yield Edit((), "function", ("unweighed_to_rows", _WEIGHTS))
                    if (ranks := len(self.site.taps.ranks)) > 1:
                        yield Edit((), "function", ("repeatedly_to_rows", float(ranks)))
            case "activation":
                numbers = CLAMP_NUMBERS if self._facts.model.clamp is not None else {}
                yield from edits_of(self.formula, Choices(numbers=numbers))

    @cached_property
    def _terms(self) -> dict[str, dict[str, Callable[[], Array]]]:
        """What may have been read in place of its inputs."""
        recorded = {
            role: x for role, x in self.inputs.items() if self.operation.inputs[role] in self.site.inputs
        }
        return inputs_elsewhere(self.site, self.operation, recorded)

    @cached_property
    def _others(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: np.asarray(x) for name, x in numbers_of(self._facts.model).items()}
        for tap, _, role in OF_ROUTERS:
            name = self.site.weights.get(f"{tap}.{role}", "")
            if (values := self._facts.vector(name) if name else None) is not None:
                found[role] = found[f"{tap}.{role}"] = values
        return found

    # --- values ------------------------------------------------------------------------------------------------

    def rest(self, tree: Node, numbers: Mapping[str, Any]) -> Array | None:
        """What the formula leaves of the sample behind all that follows."""
        try:
            with np.errstate(all="ignore"):
                found = self._at_the_end(tree, numbers, self.rows)
        except (ValueError, IndexError, KeyError, TypeError):  # operands that do not fit together
            return None
        return self._left(found) if found.shape == self._scope.shape else None

    def value(self, node: Node) -> Array | None:
        """A node of the right formula on the sample."""
        try:
            return np.asarray(self._value(node, self._leaves({}, self.rows)))
        except (ValueError, IndexError, KeyError, TypeError):
            return None

    def whole(self, tree: Node) -> Array:
        """At the end, on all rows."""
        with np.errstate(all="ignore"):
            return self._at_the_end(tree, {}, None)

    def _left(self, predicted: Array) -> Array | None:
        rest = (self.site.seen[self.rows] - predicted)[self._scope]
        return rest if np.isfinite(rest).all() else None

    def _at_the_end(self, tree: Node, numbers: Mapping[str, Any], rows: NDArray[np.intp] | None) -> Array:
        own = np.asarray(self._value(tree, self._leaves(numbers, rows)), dtype=np.float64)
        taken = {tap: x if rows is None else x[rows] for tap, x in self.values.operands.inputs.items()}
        leaves = {**self._others, **taken, self.operation.tap: own}
        return np.asarray(self._value(self.behind, leaves, rows is None))

    def _leaves(self, numbers: Mapping[str, Any], rows: NDArray[np.intp] | None) -> dict[str, Any]:
        """Of the operation's own formula."""
        weights = self.values.results.get(_WEIGHTS) if self.operation.tap == OUTPUT else None
        every = {**({} if weights is None else {_WEIGHTS: weights[0]}), **self.inputs}
        every |= {name: load() for found in self._terms.values() for name, load in found.items()}
        read = {role: x if rows is None else x[rows] for role, x in every.items()}
        return {**self._others, **read, **{name: np.asarray(x) for name, x in numbers.items()}}

    def _value(self, node: Node, leaves: Mapping[str, Any], whole: bool | None = None) -> Any:
        """`whole`: of what comes behind, whether on all rows: what the operation does not change is kept."""
        if not node.args:
            return leaves[node.name] if node.name in leaves else np.asarray(float(node.name))
        key = id(node), bool(whole)
        if whole is not None and key in self._held:
            return self._held[key]
        if node.name in ("routed", "added_to_rows", "unweighed_to_rows", "repeatedly_to_rows"):
            x, weight, ids, *others = node.args
            given, chosen = (self._value(one, leaves, whole) for one in (x, ids))
            name = weight.name if weight.name in self.site.weights else f"{self.operation.tap}.{weight.name}"
            further = [self._value(one, leaves, whole) for one in others]
            found = FUNCTIONS[node.name](given, self.values.matrices(name, chosen), chosen, *further)
        elif node.name == "product":
            x, weight = node.args
            name = weight.name if weight.name in self.site.weights else f"{self.operation.tap}.{weight.name}"
            found = FUNCTIONS["product"](
                self._value(x, leaves, whole), self._facts.weight(self.site.weights[name])
            )
        else:
            found = FUNCTIONS[node.name](*(self._value(one, leaves, whole) for one in node.args))
        if whole is not None and all(one.name != self.operation.tap for _, one in nodes(node)):
            self._held[key] = found
        return found
