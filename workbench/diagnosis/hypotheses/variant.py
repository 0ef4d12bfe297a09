"""Variants of an operation: what it might have been instead, replayed on the same recorded inputs.

A variant explains a deviation if it gives what was recorded, within rounding, wherever the operation is wrong. Where
it is right nothing is fitted: an error within the noise is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.edits import Edit
from lockstep.workbench.diagnosis.operations.deviation import (
    WRONG,
    WRONG_SINGLE,
    Deviation,
    Mask,
    Part,
    distance,
)
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Share of the error's norm that a variant may leave where that is more than the noise's own.
UNEXPLAINED = 0.1
#: Share of the error's norm from which on a variant that leaves less has explained a part.
PARTLY = 0.7
#: What a fit leaves over the noise from which on that is more than rounding.
_ROUNDING = 2.0
#: Elements for each fitted number that a variant must reproduce.
ELEMENTS_A_PARAMETER = 4
#: Operations of which a small result has small rounding; in a sum of products it is the terms that count.
ELEMENTWISE = ("norm", "rope", "residual", "activation")


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """An operation that might have run instead.

    `name` is its stable id, `kind` the class of bug (bias, weight, input, sharding, reduce, norm, rope, positions,
    scores, mask, heads, softmax, cache, activation, residual, embedding, head, precision, overflow, sampling), `text`
    one sentence. `predicted` has the shape of what was seen (a list of one for each part where there are several).
    `parameters` counts the numbers that were fitted to what was seen: 0 of a fixed list, or from the checkpoint.
    `tolerance` is the share of the prediction's size that it may be off by, beside rounding. `noise` (like `predicted`)
    is what rounding may leave of a variant that sums other terms than the right operation, or puts them elsewhere.
    `edits` is what it is by its structure, where it was generated from the operation's formula.
    """

    name: str
    kind: str
    text: str
    fitted: Mapping[str, object]
    predicted: Array | Sequence[Array]
    parameters: int = 0
    tolerance: float = 0.0
    noise: Array | Sequence[Array] | None = None
    edits: tuple[Edit, ...] = ()


#: Gives the variants of an operation that are worth trying at a site that is wrong (`site.deviation` shows where).
Bank = Callable[[Site], Iterable[Variant]]


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """A variant held against what was seen, in the wrong rows, heads and columns alone.

    `residual` is the share of the error's norm that it leaves, `ratio` what it leaves over the noise. `accepted`: it
    reproduces what was seen; otherwise it explains a part. `everywhere`: it fits where the operation is right too.
    """

    variant: Variant
    residual: float
    ratio: float
    accepted: bool
    everywhere: bool


def where_wrong(site: Site, predicted: Sequence[Array]) -> list[Array]:
    """A prediction for every part: what should have come out where the operation is right."""
    assert site.deviation is not None, "what is right needs no prediction"
    parts = zip(site.deviation.scopes, predicted, site.parts, strict=True)
    return [np.where(scope, guess, part.expected) for scope, guess, part in parts]


def preference(one: Fit) -> tuple[bool, int, bool, float]:
    """The order of fits, best first."""
    return not one.accepted, cost(one.variant.parameters, one.ratio), not one.everywhere, one.residual


def cost(parameters: int, ratio: float) -> int:
    """What a fit is charged with: its fitted numbers, and as one more that it leaves clearly more than rounding."""
    return parameters + (ratio > _ROUNDING)


def fit(site: Site, variant: Variant) -> Fit | None:
    """The variant held against the site's deviation; None where it explains next to nothing of it, or does not fit."""
    deviation = site.deviation
    predicted = [variant.predicted] if isinstance(variant.predicted, np.ndarray) else list(variant.predicted)
    if deviation is None or len(predicted) != len(site.parts):
        return None
    if all(p is part.expected for p, part in zip(predicted, site.parts, strict=True)):
        return None  # nothing is guessed
    if any(p.shape != part.seen.shape for p, part in zip(predicted, site.parts, strict=True)):
        return None
    noises: list[Array | None] = [None] * len(predicted)
    if variant.noise is not None:
        noises = [variant.noise] if isinstance(variant.noise, np.ndarray) else list(variant.noise)
    guesses = [
        _Guess(part, p, noise, variant.tolerance, site.facts.unit, site.operation in ELEMENTWISE)
        for part, p, noise in zip(site.parts, predicted, noises, strict=True)
    ]
    rest = _Rest.join([_Rest.of(*each) for each in zip(guesses, _scopes(site.parts, deviation), strict=True)])
    if not rest.error > 0:
        return None
    residual = rest.left / rest.error if np.isfinite(rest.error) else (0.0 if np.isfinite(rest.left) else 1.0)
    ratio = rest.left / rest.noise if rest.noise > 0 else (0.0 if rest.left == 0 else np.inf)
    enough = rest.elements >= ELEMENTS_A_PARAMETER * variant.parameters
    within = ratio <= WRONG and rest.single <= WRONG_SINGLE
    accepted = enough and within and residual <= _may_leave(variant, ratio)
    if not accepted and not residual <= PARTLY:
        return None
    every = _Rest.join([_Rest.of(guess, np.ones(guess.predicted.shape, bool)) for guess in guesses])
    everywhere = every.left <= WRONG * every.noise and every.single <= WRONG_SINGLE
    return Fit(variant, residual, ratio, accepted, accepted and everywhere)


def _may_leave(variant: Variant, ratio: float) -> float:
    """The share of the error that may be left: more where all of that is rounding."""
    if variant.tolerance:
        return 0.25
    return UNEXPLAINED if ratio > 1 else 0.5


def _scopes(parts: Sequence[Part], deviation: Deviation) -> Iterator[Mask]:
    """What is to be explained of each part: all of one that has another shape than it should."""
    for part, scope in zip(parts, deviation.scopes, strict=True):
        yield scope if part.fits else np.ones(part.seen.shape, dtype=bool)


@dataclass(frozen=True, slots=True, eq=False)
class _Guess:
    """A variant's prediction of one part, and what it may be off by."""

    part: Part
    predicted: Array
    noise: Array | None
    tolerance: float
    unit: float
    elementwise: bool


@dataclass(frozen=True, slots=True)
class _Rest:
    """Norms of the error, of what a prediction leaves of it, and of the noise; the worst element left over its own."""

    error: float
    left: float
    noise: float
    single: float
    elements: int

    @classmethod
    def of(cls, guessed: _Guess, scope: Mask) -> _Rest:
        part, predicted = guessed.part, guessed.predicted
        left = distance(part.seen, predicted, part.largest)[scope]
        if part.fits:
            error, noise, right = part.error()[scope], part.noise[scope], np.abs(part.expected[scope])
        else:  # another shape: the prediction has it, or has it not
            error, right = np.abs(part.seen[scope]) + 1e-300, np.abs(predicted[scope])
            known = part.noise[~np.isnan(part.noise)]
            noise = np.full(left.shape, float(np.median(known)) if known.size else 0.0)
        guess = np.where(np.isfinite(predicted[scope]), np.abs(predicted[scope]), 0.0)
        right = np.where(np.isfinite(right), right, 0.0)
        scale = float(np.linalg.norm(guess)) / max(float(np.linalg.norm(right)), 1e-300)
        scale = scale if guessed.elementwise else max(1.0, scale)
        noise = np.where(np.isfinite(noise), noise, 0.0) * scale + guessed.tolerance * guess
        # The roundings of a result that is larger than it should be.
        noise = np.maximum(noise, 3 * guessed.unit * guess)
        noise = noise if guessed.noise is None else np.maximum(noise, guessed.noise[scope])
        over = np.where(left > 0, left / np.maximum(noise, 1e-320), 0.0)
        norm = np.linalg.norm
        return cls(
            float(norm(error)), float(norm(left)), float(norm(noise)), float(over.max(initial=0.0)), left.size
        )

    @classmethod
    def join(cls, rests: Sequence[_Rest]) -> _Rest:
        error, left, noise = (
            float(np.linalg.norm([getattr(rest, name) for rest in rests]))
            for name in ("error", "left", "noise")
        )
        worst, elements = max(rest.single for rest in rests), sum(rest.elements for rest in rests)
        return cls(error, left, noise, worst, elements)
