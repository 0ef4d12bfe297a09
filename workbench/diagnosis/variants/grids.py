"""Results of any operation, or rows of a cache, that lie on a grid: quantised, whatever the recipe of its scales.

Numbers that are integers times a common step, near the right ones, were stored in so many levels. The step is found
from the numbers themselves, in the smallest groups that suffice: a grid of a few hundred levels on which all
numbers of a group lie is no accident.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: The most levels on either side of zero, of a grid with one step for all numbers and of one with a step a group.
_LEVELS, _LEVELS_OF_A_GROUP = 1 << 12, 255
#: How far a number may lie off its level, in steps, beside the rounding of the engine's type; the chance that this
#: happens to all numbers by accident; the fewest numbers by which a step is found.
_OFF, _CHANCE, _FEWEST = 0.01, 1e-9, 4
#: How far a number may be from the right one, in steps: a rounding, or two.
_NEAR = 1.05


@dataclass(frozen=True, slots=True)
class _Grid:
    """The levels of one group: `start` plus integers times `step`, the outermost `least` and `most`."""

    step: float
    start: float
    least: float
    most: float
    chance: float  # logarithm

    def holds(self, seen: Array, right: Array, unit: float) -> NDArray[np.bool_]:
        """Whether each number is the right one on the grid, or the outermost level where the right one is beyond."""
        near = np.abs(seen - right) <= _NEAR * self.step + 8 * unit * np.abs(right)
        return near | self.clipped(seen, right)

    def clipped(self, seen: Array, right: Array) -> NDArray[np.bool_]:
        inside, beyond = 0.01 * self.step, _NEAR * self.step
        return ((seen >= self.most - inside) & (right > self.most + beyond)) | (
            (seen <= self.least + inside) & (right < self.least - beyond)
        )


def on_a_grid(site: Site) -> Iterator[Variant]:
    """Everything that is wrong lies on a grid near the right result, or is clipped to its ends."""
    deviation = site.deviation
    if deviation is None or not all(part.fits for part in site.parts):
        return
    for what, labels in _groupings(site):
        found = _gridded(site, labels, what == "")
        if found is None:
            continue
        guesses, grids, clipped = found
        text = f"the numbers are multiples of a common step{what}{_simple(grids)}: quantised to {_bits(grids)} bits"
        if clipped:
            text += (
                f", and {clipped:.1%} of them are clipped to the ends: the scale is that of smaller numbers"
            )
        fitted = {
            "bits": _bits(grids),
            "clipped": clipped > 0,
            "a step": what,
            "steps": [grid.step for grid in grids[:16]],
        }
        yield Variant("quantised", "precision", text, fitted, guesses, len(grids))
        return


def _groupings(site: Site) -> Iterator[tuple[str, list[NDArray[np.int64]]]]:
    """In words, and for each part which group an element belongs to; the widest groups first."""
    if any(len(part.rows) != part.seen.shape[site.token_axis] for part in site.parts):
        return
    last = site.parts[0].seen.ndim - 1
    wholes: list[tuple[str, ...]] = [(), ("head",), ("column",), ("head", "column")]
    if site.head_axis is None:
        wholes = [(), ("column",)]
    tokens = ("", "sequence", "pass", "token") + ("reading",) * (site.operation == "cache")
    for token in tokens:
        for others in wholes:
            if token == "token" and "column" in others:
                continue  # each number would be a group
            labels = []
            for i, part in enumerate(site.parts):
                label = _of_tokens(part, token, site.token_axis) + i * (token == "reading")
                for name, axis in (("head", site.head_axis), ("column", last)):
                    if name in others and axis is not None:
                        label = label * 65536 + _along(np.arange(part.seen.shape[axis]), axis, last + 1)
                labels.append(np.broadcast_to(label, part.seen.shape))
            names = [name for name in (token, *others) if name]
            yield f" with a step per {' and '.join(names)}" if names else "", labels
    width = site.parts[0].seen.shape[-1]
    for size in sorted({128, 64, 32, site.head_columns or 32}, reverse=True):
        if last == 1 and width % size == 0 and width > size:
            labels = [
                _of_tokens(part, "token", 0) * width + np.arange(width)[None] // size for part in site.parts
            ]
            yield f" with a step per token and {size} columns", labels


def _of_tokens(part: Part, by: str, axis: int) -> NDArray[np.int64]:
    """The group of each token, along its axis: one for all, or by sequence, pass or token."""
    number = [
        (row.seq + 1) * (by in ("sequence", "pass", "token")) * (1 << 20)
        + (row.step if by == "pass" else row.position if by == "token" else 0)
        for row in part.rows
    ]
    return _along(np.array(number, dtype=np.int64), axis, part.seen.ndim)


def _along(x: NDArray[np.int64], axis: int, axes: int) -> NDArray[np.int64]:
    return x.reshape([-1 if i == axis else 1 for i in range(axes)])


def _gridded(
    site: Site, labels: list[NDArray[np.int64]], single: bool
) -> tuple[list[Array], list[_Grid], float] | None:
    """What is on the grids of these groups, those, and the share of clipped numbers; None where one is on none, or
    there are too few numbers."""
    assert site.deviation is not None
    scopes = [
        np.asarray(scope) & np.isfinite(part.seen) & np.isfinite(part.expected)
        for part, scope in zip(site.parts, site.deviation.scopes, strict=True)
    ]
    seen = np.concatenate([part.seen[scope] for part, scope in zip(site.parts, scopes, strict=True)])
    right = np.concatenate([part.expected[scope] for part, scope in zip(site.parts, scopes, strict=True)])
    label = np.concatenate([each[scope] for each, scope in zip(labels, scopes, strict=True)])
    if not len(seen):
        return None
    order = np.argsort(label, kind="stable")
    starts = np.flatnonzero(np.diff(label[order], prepend=-1))
    grids, clipped, total = [], 0, 0.0
    for members in np.split(order, starts[1:]):
        grid = _grid(
            seen[members], right[members], site.facts.unit, _LEVELS if single else _LEVELS_OF_A_GROUP
        )
        if grid is None:
            return None
        if grid.step:
            grids.append(grid)
        total += grid.chance
        clipped += int(grid.clipped(seen[members], right[members]).sum())
    if not grids or total > math.log(_CHANCE):
        return None
    return [_snapped(*each) for each in zip(site.parts, scopes, strict=True)], grids, clipped / len(seen)


def _snapped(part: Part, scope: NDArray[np.bool_]) -> Array:
    return np.where(scope, part.seen, part.expected)


def _grid(seen: Array, right: Array, unit: float, most: int) -> _Grid | None:
    """The coarsest grid on which all numbers of a group lie, each near the right one or clipped."""
    if not seen.any():
        return _Grid(0.0, 0.0, 0.0, 0.0, 0.0) if np.abs(right).max() < 1e-6 else None
    if len(np.unique(seen)) < _FEWEST:
        return None
    for start in (0.0, float(seen.min())):
        grid = _from(seen, right, start, unit, most)
        if grid is not None:
            return grid
    return None


def _from(seen: Array, right: Array, start: float, unit: float, most: int) -> _Grid | None:
    """The same for grids through `start`."""
    above = seen - start
    size = np.abs(above)
    levels = np.arange(1, most + 1)
    steps = float(size.max()) / levels
    # A few numbers rule out nearly all steps.
    some = above[np.argsort(size)[np.linspace(0, len(size) - 1, min(len(size), 24)).astype(int)]]
    off = np.abs(some[None] / steps[:, None] - np.rint(some[None] / steps[:, None]))
    allowed = _OFF + 4 * unit * (np.abs(some)[None] + abs(start) + size.max()) / steps[:, None]
    for step in steps[(off <= allowed).all(1)]:
        allowed_here = _OFF + 4 * unit * (size + abs(start) + size.max()) / step
        count = np.rint(above / step)
        if not (np.abs(above / step - count) <= allowed_here).all():
            continue
        distinct = np.unique(count, return_index=True)[1]
        chance = float(np.log(np.minimum(2 * allowed_here[distinct], 1.0)).sum()) + math.log(most)
        if chance > 0:
            continue
        grid = _Grid(float(step), start, float(seen.min()), float(seen.max()), chance)
        if grid.holds(seen, right, unit).all():
            return grid
    return None


def _bits(grids: list[_Grid]) -> int:
    """How many it takes to count the levels from the least on."""
    levels = max(round((one.most - one.least) / one.step) + 1 for one in grids)
    return max(1, math.ceil(math.log2(levels)))


def _simple(grids: list[_Grid]) -> str:
    """A single step, and the number that it is one over, if there is one."""
    if len(grids) > 1:
        return ""
    over = round(1 / grids[0].step)
    return f" of 1/{over}" if over and abs(grids[0].step * over - 1) < 1e-5 else f" of {grids[0].step:.4g}"
