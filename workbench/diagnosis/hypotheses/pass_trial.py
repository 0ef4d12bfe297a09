"""A wrong operation that has a part for each pass of a sequence, on which edited formulas are tried (`Tried`): on a
sample of its wrong queries, and then on all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.formula import Node
from lockstep.workbench.diagnosis.hypotheses.edits import Edit, nodes, together
from lockstep.workbench.diagnosis.hypotheses.functions import FUNCTIONS, edited_value
from lockstep.workbench.diagnosis.hypotheses.solve import Solved
from lockstep.workbench.diagnosis.hypotheses.trial import evenly
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.hypotheses.words import wording
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Passes of the sample at most; elements of each, but for so many queries at the least.
_PASSES, _ELEMENTS, _QUERIES = 3, 1 << 13, 4
#: Where one of two numbers alone is infinite, they are so many times as far apart as the largest one.
_FAR = 10.0


#: Hypotheses that are reported of a site.
_SHOWN = 12


@dataclass(frozen=True, slots=True, eq=False)
class _PassSample:
    """Some queries of a pass. `scope`: which elements are wrong."""

    given: Mapping[str, Any]
    scope: NDArray[np.bool_]
    seen: Array
    expected: Array
    noise: Array


@dataclass(eq=False)
class PassTrial:
    """`given` are the leaves of the formula at each part; those of `queries` have an axis of them, their first. Without
    any the passes are evaluated whole, as of a state that meets all tokens."""

    site: Site
    formula: Node
    given: Sequence[Mapping[str, Any]]
    queries: Collection[str] = ()
    _held: dict[tuple[int, int], Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        assert self.site.deviation is not None, "what is right needs no hypothesis"
        scopes = self.site.deviation.scopes
        wrong = np.flatnonzero([scope.any() for scope in scopes])
        self._sample = [self._sampled(i, scopes[i]) for i in evenly(wrong, _PASSES)]
        self._kept = {id(node) for _, node in nodes(self.formula)}  # edited formulas share them
        sizes = np.abs(np.concatenate([x.ravel() for one in self._sample for x in (one.seen, one.expected)]))
        self._far = _FAR * float(sizes.max(initial=0.0, where=np.isfinite(sizes)))
        rest = self._left([one.expected for one in self._sample])
        self.error = np.inf if rest is None else float(np.linalg.norm(rest))
        noise = np.concatenate([one.noise[one.scope] for one in self._sample])
        self.noise = float(np.linalg.norm(noise[np.isfinite(noise)]))

    def _sampled(self, index: int, scope: NDArray[np.bool_]) -> _PassSample:
        part, axis = self.site.parts[index], self.site.token_axis
        if not self.queries:
            return _PassSample(self.given[index], scope, part.seen, part.expected, part.noise)
        rows = np.flatnonzero(np.moveaxis(scope, axis, 0).reshape(len(part.rows), -1).any(-1))
        rows = evenly(rows, max(_QUERIES, _ELEMENTS * len(part.rows) // scope.size))
        given = {name: x[rows] if name in self.queries else x for name, x in self.given[index].items()}
        seen, expected, noise = (np.take(x, rows, axis) for x in (part.seen, part.expected, part.noise))
        return _PassSample(given, np.take(scope, rows, axis), seen, expected, noise)

    def rest(self, tree: Node, numbers: Mapping[str, Any]) -> Array | None:
        """What the formula leaves of the sample; an element that is infinite on one side alone, as a mask makes it,
        leaves more than any other."""
        with np.errstate(all="ignore"):
            try:
                found = [np.asarray(self._evaluate(tree, i, numbers)) for i in range(len(self._sample))]
            except (ValueError, IndexError, TypeError):  # operands that do not fit together
                return None
        if any(x.size != one.seen.size for x, one in zip(found, self._sample, strict=True)):
            return None
        return self._left([x.reshape(one.seen.shape) for x, one in zip(found, self._sample, strict=True)])

    def value(self, node: Node) -> Array | None:
        """What is finite of it, in one axis."""
        if not node.args and node.name not in self._sample[0].given:
            return None
        found = np.concatenate([np.ravel(self._evaluate(node, i, {})) for i in range(len(self._sample))])
        return np.asarray(found[np.isfinite(found)])

    def whole(self, edits: Sequence[Edit]) -> list[Array]:
        """The edited formula on every part."""
        tree = together(edits, self.formula)
        with np.errstate(all="ignore"):
            return [
                np.asarray(edited_value(tree, given)).reshape(part.seen.shape)
                for given, part in zip(self.given, self.site.parts, strict=True)
            ]

    def _left(self, predicted: Sequence[Array]) -> Array | None:
        """Equal infinities leave nothing; None where a number is none."""
        with np.errstate(invalid="ignore"):
            rest = [
                np.where(one.seen == guess, 0.0, one.seen - guess)[one.scope]
                for one, guess in zip(self._sample, predicted, strict=True)
            ]
        joined = np.concatenate(rest)
        return None if np.isnan(joined).any() else np.clip(joined, -self._far, self._far)

    def _evaluate(self, node: Node, index: int, numbers: Mapping[str, Any]) -> Any:
        """On a pass of the sample; what the right formula has as well is computed once."""
        if not node.args:
            given = self._sample[index].given
            if node.name in numbers:
                return numbers[node.name]
            return given[node.name] if node.name in given else np.asarray(float(node.name))
        key = index, id(node)
        if key not in self._held:
            found = FUNCTIONS[node.name](*(self._evaluate(one, index, numbers) for one in node.args))
            if id(node) not in self._kept:
                return found
            self._held[key] = found
        return self._held[key]


def passed(trial: PassTrial, found: Sequence[Solved]) -> Iterator[Variant]:
    """The first of what was found, each on every part."""
    for solved in found[:_SHOWN]:
        words, predicted = wording(trial.site, solved.edits), trial.whole(solved.edits)
        yield Variant(
            words.name, words.kind, words.text, words.fitted, predicted, solved.cost, edits=solved.edits
        )
