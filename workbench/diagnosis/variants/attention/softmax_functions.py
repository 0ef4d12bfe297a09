"""Probabilities that go by their scores alone, but not by the exponential: tables, straight lines, polynomials."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from lockstep.workbench.diagnosis.hypotheses.attention.softmaxes import powers, shares
from lockstep.workbench.diagnosis.hypotheses.blocks import in_place, places, scopes
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Relative error of a probability that is read off its neighbours.
_TOLERANCE = 2e-3
#: Cells that show a function, and by how much it must differ from the exponential somewhere, relative.
_CELLS, _DIFFERS = 64, 0.01
#: Points on each side that show how much the function varies there.
_NEAR = 2


def other_functions(site: Site) -> Iterator[Variant]:
    """Each row is f(score - the row's maximum) over its sum, with one f for all rows of all heads. f is read off the
    cells: for each one from those next to it, so that a cell never reports on itself."""
    if not all(part.fits for part in site.parts):
        return
    x, ratio = _ratios(site)
    if len(x) < _CELLS:
        return
    order = np.argsort(x, kind="stable")
    x, ratio = x[order], ratio[order]
    if np.abs(ratio - 1).max() < _DIFFERS:
        return
    guesses: list[Array | None] = []
    noises = []
    for part in site.parts:
        right = powers(part.inputs["scores"])
        found, spread = _without_itself(np.log(np.maximum(right, 1e-300)), x, ratio)
        guesses.append(shares(right * found))
        noises.append(np.maximum(shares(right) * spread, part.noise))
    worst = int(np.argmax(np.abs(ratio - 1) * np.exp(x)))
    text = (
        "the probabilities go by the scores alone, but not by their exponential: "
        f"{-x[worst]:.4g} below a row's largest score counts {ratio[worst] * np.exp(x[worst]):.4g} instead of "
        f"{np.exp(x[worst]):.4g} (an approximation, a table, another function)"
    )
    fitted = {"below": float(-x[worst]), "times": float(ratio[worst])}
    yield Variant("softmax_other_function", "softmax", text, fitted, in_place(site, guesses), _CELLS // 4,
                  _TOLERANCE, noises)  # fmt: skip


def _ratios(site: Site) -> tuple[Array, Array]:
    """Of all cells of wrong heads that are seen: score - maximum, and what it counts over what its exponential does,
    both against the row's largest score."""
    xs, ratios, scope = [np.empty(0)], [np.empty(0)], scopes(site)
    for i, head in places(site):
        part = site.parts[i]
        rows = scope[i][head].any(1)
        right, seen = powers(part.inputs["scores"])[head][rows], part.seen[head][rows]
        top = np.take_along_axis(seen, right.argmax(1)[:, None], 1)
        cells = (right > 1e-12) & (right < 1) & (top > 0)
        xs.append(np.log(right[cells]))
        ratios.append((seen / np.where(top > 0, top, 1.0))[cells] / right[cells])
    return np.concatenate(xs), np.concatenate(ratios)


def _without_itself(below: Array, x: Array, ratio: Array) -> tuple[Array, Array]:
    """The ratio at `below`, on the line through the known points on both sides of it that are not the point itself (1
    at a row's largest score), and how much it varies among these and those next to them."""
    left = np.searchsorted(x, below, side="left") - 1
    right = np.searchsorted(x, below, side="right")
    low, high = np.where(left < 0, right, left), np.where(right >= len(x), left, right)
    low, high = np.clip(low, 0, len(x) - 1), np.clip(high, 0, len(x) - 1)
    span = x[high] - x[low]
    share = np.where(span > 0, (below - x[low]) / np.where(span > 0, span, 1.0), 0.0)
    between = ratio[low] + share * (ratio[high] - ratio[low])
    near = sliding_window_view(np.pad(ratio, _NEAR, mode="edge"), 2 * _NEAR + 1)
    spread = np.ptp(near, axis=1)
    top = below >= 0
    return np.where(top, 1.0, between), np.where(top, 0.0, np.maximum(spread[low], spread[high]))
