"""Variants of a linear layer whose input was cut off at a range, or brought back by another token's scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.formula import product
from lockstep.workbench.diagnosis.hypotheses.fits import factor, resolution
from lockstep.workbench.diagnosis.hypotheses.roundings import integers
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.replay import SAMPLE, Linear

#: Limits that are tried before the best one is narrowed down, and how often that is done.
_LIMITS, _ROUNDS = 48, 8


def clamped_input(site: Site) -> Iterator[Variant]:
    """Inputs beyond a limit count as that limit: clamped, or saturated by a scale that was calibrated on others."""
    linear = Linear.of(site)
    if linear is None or not linear.x.size or not np.isfinite(linear.x).all():
        return
    best = _limit(linear)
    for limit in dict.fromkeys((float(f"{best:.2g}"), best)):
        steps = limit / 127
        inside = np.clip(linear.x, -limit, limit)
        for words, x in (("", inside), (", in eight bits", np.rint(inside / steps) * steps)):
            predicted = linear.replay(x=x)
            if predicted is not None:
                why = "clamped, or saturated by a scale for smaller numbers"
                text = f"its input is cut off at ±{limit:.4g}{words}: {why}"
                yield Variant("input_clamped", "input", text, {"limit": limit}, predicted, int(limit == best))


def _limit(linear: Linear) -> float:
    """The limit that comes nearest to what was seen in a few columns."""
    some = linear.columns[
        np.linspace(0, len(linear.columns) - 1, min(SAMPLE, len(linear.columns))).astype(int)
    ]
    x, weight = linear.x[linear.rows], linear.weight[some].astype(np.float64)
    seen = linear.seen[np.ix_(linear.rows, some)] - linear.bias[some]
    top = float(np.abs(x).max())
    limits, width = np.linspace(top / _LIMITS, top, _LIMITS), top / _LIMITS
    best = top
    for _ in range(_ROUNDS):
        left = [float(np.linalg.norm(np.clip(x, -limit, limit) @ weight.T - seen)) for limit in limits]
        best = float(limits[int(np.argmin(left))])
        limits, width = np.maximum(best + width * np.linspace(-1, 1, 9), top * 1e-6), width / 4
    return best


def token_scales(site: Site) -> Iterator[Variant]:
    """Each token's result times a number of its own, as if its input were restored by another token's scale; as it is,
    or in eight bits."""
    linear = Linear.of(site)
    if linear is None or not linear.x.any() or not np.isfinite(linear.x).all():
        return
    for words, x in (("", linear.x), (" in eight bits", integers(linear.x, 8, None).astype(np.float64))):
        made = product(x, linear.weight)
        by = factor(linear.seen - linear.bias, made, 1)[:, 0]
        if np.abs(by[linear.rows] - 1).max() < 4 * resolution(site):
            continue
        whose = _whose(linear, by)
        predicted = linear.expected.copy()
        predicted[linear.rows] = (made * by[:, None] + linear.bias)[linear.rows]
        text = f"each token's input{words} has a factor of its own ({by[linear.rows[0]]:.4g} for the first wrong one)"
        text += f": the scale of {whose}" if whose else ""
        fitted = {"scale": whose, "bits": words}
        yield Variant(
            "input_token_scales", "input", text, fitted, predicted, 0 if whose else len(linear.rows)
        )


def _whose(linear: Linear, by: Array) -> str:
    """Whose largest input over its own gives each wrong token's factor."""
    largest = np.maximum(np.abs(linear.x).max(1), 1e-300)
    passes: dict[tuple[int, int], list[int]] = {}
    for i, row in enumerate(linear.site.rows):
        passes.setdefault((row.step, row.seq), []).append(i)
    for words, pick in _OTHERS.items():
        other = np.empty(len(largest), dtype=np.intp)
        for rows in passes.values():
            other[rows] = np.array(rows)[pick(largest[rows])]
        right = largest[other] / largest
        if np.abs(by / right - 1)[linear.rows].max() < max(5e-3, 4 * linear.site.facts.unit):
            return words
    return ""


#: Of the largest inputs of a pass's tokens: the index of the one whose scale each takes.
_OTHERS: dict[str, Callable[[Array], NDArray[np.intp]]] = {
    "the token before": lambda x: np.maximum(np.arange(len(x)) - 1, 0),
    "the token after": lambda x: np.minimum(np.arange(len(x)) + 1, len(x) - 1),
    "the first token": lambda x: np.zeros(len(x), dtype=np.intp),
    "the last token": lambda x: np.full(len(x), len(x) - 1),
    "the largest token": lambda x: np.full(len(x), int(x.argmax())),
    "the smallest token": lambda x: np.full(len(x), int(x.argmin())),
}
