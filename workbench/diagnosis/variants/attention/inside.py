"""Attention opened: guesses of what ran inside of one kernel, held against the context that came out.

Of a fused attention (or of probabilities straight from queries and keys) only the ends were recorded. A guess gives the
probabilities and the values that may have met inside; a few wrong rows say whether it is worth computing whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.blocks import by_head, products
from lockstep.workbench.diagnosis.hypotheses.trial import evenly
from lockstep.workbench.diagnosis.hypotheses.variant import PARTLY, Variant
from lockstep.workbench.diagnosis.operations.attention import expand, probabilities, weighed
from lockstep.workbench.diagnosis.operations.deviation import Mask, distance
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.attention.softmax import softmax

#: Parts, and rows of each, by which a guess is tried before it is computed whole.
PARTS, ROWS = 4, 6
#: What a number that is not finite where another is counts as an error.
_GROSS = 1e30
#: Steps of a search for a number.
_STEPS = 60

Rows = NDArray[np.intp]
#: Of a part's rows (by index) probabilities [heads, rows, K] and values [K, kv_heads, D] (None of probabilities alone).
Guess = Callable[[int, Rows], tuple[Array, Array | None] | None]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Some wrong rows of a part: what came out there, which of it is to be explained, and the square of the error."""

    part: int
    rows: Rows
    seen: Array
    cells: Mask
    error: float


@dataclass(frozen=True, eq=False)
class Inside:
    """What should be inside of a wrong site, and guesses of what was."""

    site: Site

    @property
    def scale(self) -> float:
        return self.site.facts.model.scale

    @cached_property
    def raw(self) -> list[Array]:
        """Of each part the scaled products [heads, T, K], not masked."""
        return [self.products(part.inputs["q"], part.inputs["k"]) for part in self.site.parts]

    @cached_property
    def allowed(self) -> list[NDArray[np.bool_]]:
        """Of each part the cells [heads, T, K] that the mask lets see."""
        return [np.isfinite(part.inputs["scores"]) for part in self.site.parts]

    def products(self, q: Array, k: Array) -> Array:
        return products(q, k) * self.scale

    def masked(self, i: int, rows: Rows, scores: Array) -> Array:
        """Scores [heads, rows, K] of some rows of a part under the right mask."""
        return np.where(self.allowed[i][:, rows], scores, -np.inf)

    def probs(self, i: int) -> Array:
        """Of a part the right probabilities [heads, T, K]."""
        return self.site.parts[i].inputs.get("probs", self.site.parts[i].expected)

    def values(self, i: int) -> Array | None:
        return self.site.parts[i].inputs.get("v")

    def of_scores(
        self, scores: Callable[[int, Rows], Array | None], values: Callable[[int], Array | None]
    ) -> Guess:
        """The guess of masked scores [heads, rows, K], and of values."""

        def guess(i: int, rows: Rows) -> tuple[Array, Array | None] | None:
            found = scores(i, rows)
            if found is None:
                return None
            hidden = (found == -np.inf).all(-1, keepdims=True)
            sinks = self.site.parts[i].inputs.get("sinks")
            made = softmax(found) if sinks is None else probabilities(found, sinks)
            return np.where(hidden, self._of_hidden(i, rows), made), values(i)

        return guess

    def _of_hidden(self, i: int, rows: Rows) -> Array:
        """What a query gives each key where it may see none, [heads, rows, 1], by what came out: NaN (0 / 0), nothing
        where an engine guards against that, the same to all where the mask is a finite number."""
        seen = by_head(self.site, _of_rows(self.site, self.site.parts[i].seen, rows))
        same = 1 / self.raw[i].shape[2]
        whole = np.where((seen == 0).all(-1, keepdims=True), 0.0, same)
        return np.where(np.isnan(seen).any(-1, keepdims=True), np.nan, whole)

    def wanted(self, name: str) -> bool:
        """Whether a variant is worth trying: all are, where no others are known."""
        return not self.site.only or name in self.site.only

    def variant(
        self,
        name: str,
        kind: str,
        text: str,
        guess: Guess,
        fitted: Mapping[str, object] | None = None,
        parameters: int = 0,
        tolerance: float = 0.0,
        grown: float = 1.0,
    ) -> Variant:
        """What the guess gives, as far as a few rows speak for it; `grown`: how many times larger its scores are."""
        parts, fitted = self.site.parts, fitted or {}
        if not (self.wanted(name) and self._promising(guess)):
            return Variant(name, kind, text, fitted, [part.expected for part in parts], parameters)
        made = [self._whole(i, guess, grown) for i in range(len(parts))]
        guesses, noises = [each[0] for each in made], [each[1] for each in made]
        return Variant(name, kind, text, fitted, guesses, parameters, tolerance, noises)

    def left(self, guess: Guess) -> float:
        """The norm of what a guess leaves in the sample, over that of the error."""
        left = 0.0
        for sample in self.sample:
            out = self._output(sample.part, guess, sample.rows)
            largest = self.site.parts[sample.part].largest
            left += (
                sample.error if out is None else _square(distance(sample.seen, out, largest)[sample.cells])
            )
        error = sum(sample.error for sample in self.sample)
        return math.sqrt(left / error) if error > 0 else 1.0

    def search(self, of: Callable[[float], Guess], grid: Iterable[float]) -> float:
        """The number whose guess leaves least: of the grid, then between its neighbours (golden section)."""
        values = sorted(grid)
        best = min(range(len(values)), key=lambda n: self.left(of(values[n])))
        low, high = values[max(best - 1, 0)], values[min(best + 1, len(values) - 1)]
        ratio = (math.sqrt(5) - 1) / 2
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        fa, fb = self.left(of(a)), self.left(of(b))
        for _ in range(_STEPS):
            if fa < fb:
                high, b, fb = b, a, fa
                a = high - ratio * (high - low)
                fa = self.left(of(a))
            else:
                low, a, fa = a, b, fb
                b = low + ratio * (high - low)
                fb = self.left(of(b))
        return (low + high) / 2

    @cached_property
    def sample(self) -> list[Sample]:
        """Some wrong rows of the largest wrong parts."""
        found, axis = [], self.site.token_axis
        for i in sorted(self.wrong_parts, key=lambda i: self.site.parts[i].seen.size)[-PARTS:]:
            part, scope = self.site.parts[i], self.scopes[i]
            wrong = np.flatnonzero(np.moveaxis(scope, axis, 0).reshape(scope.shape[axis], -1).any(1))
            rows = evenly(wrong, ROWS)
            seen, right, cells = (_of_rows(self.site, x, rows) for x in (part.seen, part.expected, scope))
            error = _square(distance(seen, right, part.largest)[cells])
            found.append(Sample(i, rows, seen, cells, error))
        return found

    @property
    def scopes(self) -> tuple[Mask, ...]:
        assert self.site.deviation is not None, "banks are asked where something is wrong"
        return self.site.deviation.scopes

    @property
    def wrong_parts(self) -> list[int]:
        return [i for i, scope in enumerate(self.scopes) if scope.any()]

    def _rows(self, i: int) -> Rows:
        return np.arange(self.site.parts[i].seen.shape[self.site.token_axis])

    def _promising(self, guess: Guess) -> bool:
        return self.left(guess) <= PARTLY

    def _output(self, i: int, guess: Guess, rows: Rows) -> Array | None:
        """What the guess gives for some rows of a part; None where it does not fit."""
        with np.errstate(all="ignore"):
            found = _fitting(guess(i, rows))
            if found is None:
                return None
            probs, values = found
            if values is None:
                return probs
            out = np.einsum("htk,khd->thd", probs, expand(values, len(probs)), optimize=True)
            return np.asarray(out.reshape(len(out), -1))

    def _whole(self, i: int, guess: Guess, grown: float) -> tuple[Array, Array]:
        part, facts = self.site.parts[i], self.site.facts
        with np.errstate(all="ignore"):
            found = _fitting(guess(i, self._rows(i)))
            if found is None:
                return part.expected, part.noise
            probs, values = found
            noise = part.inputs.get(
                "score_noise", np.zeros(probs.shape)
            )  # none where probabilities were recorded
            moved = grown * noise.max(-1, keepdims=True) + facts.unit + 8 * facts.sum_unit
            out, noise = weighed(facts, probs, np.broadcast_to(moved, probs.shape), values)
            return (
                (out, np.nan_to_num(noise)) if out.shape == part.seen.shape else (part.expected, part.noise)
            )


def _fitting(found: tuple[Array, Array | None] | None) -> tuple[Array, Array | None] | None:
    """The guess, if its values are of as many keys and fit the heads."""
    if found is None or found[1] is None:
        return found
    (probs, _), values = found, found[1]
    fits = values.ndim == 3 and len(values) == probs.shape[2] and not len(probs) % values.shape[1]
    return found if fits else None


def _of_rows(site: Site, x: NDArray[Any], rows: Rows) -> NDArray[Any]:
    return np.take(x, rows, axis=site.token_axis)


def _square(error: Array) -> float:
    return float(np.square(np.minimum(error, _GROSS)).sum())
