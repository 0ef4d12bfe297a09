"""Numbers of attention that are solved for: scales, caps, sinks, factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from lockstep.workbench.diagnosis.hypotheses import fits
from lockstep.workbench.diagnosis.hypotheses.attention.scales import meanings
from lockstep.workbench.diagnosis.hypotheses.attention.softmaxes import softmax_with
from lockstep.workbench.diagnosis.hypotheses.attention.tensors import of_rows
from lockstep.workbench.diagnosis.hypotheses.attention.tree import AttentionTree, Changes, Given
from lockstep.workbench.diagnosis.hypotheses.attention.trials import PARTLY, Trial, one_edit
from lockstep.workbench.diagnosis.hypotheses.blocks import all_wrong_heads, by_head
from lockstep.workbench.diagnosis.hypotheses.edits import Detail
from lockstep.workbench.diagnosis.operations.attention import soft_capped, uncapped
from lockstep.workbench.diagnosis.recording import Array


def scales(tree: AttentionTree) -> Iterator[Trial]:
    """Another factor in the place of the right one."""
    known: dict[float, list[str]] = {}
    for value, words in meanings(tree.site, tree.site.facts.model.scale):
        same = next((one for one in known if math.isclose(one, value, rel_tol=1e-9)), value)
        known.setdefault(same, []).append(words)
    for value, every in known.items():
        yield one_edit("scale", "number", (repr(value), *every), _scaled_by(tree, value))
    value = _scale_seen(tree) if tree.site.operation == "scores" else _scale_solved(tree)
    yield one_edit("scale", "number", (repr(value),), _scaled_by(tree, value), 1)


def _scale_solved(tree: AttentionTree) -> float:
    grid = [tree.site.facts.model.scale * x for x in np.geomspace(0.01, 100, 61)]
    return solved(tree, partial(_scaled_by, tree), grid)


def _scale_seen(tree: AttentionTree) -> float:
    """Read off the scores themselves."""
    raw, seen = [np.empty(0)], [np.empty(0)]
    for one in tree.sample:
        x, y = uncapped(one.raw, tree.cap), uncapped(one.seen, tree.cap)
        cells = one.scope & one.allowed & np.isfinite(x) & np.isfinite(y)
        raw.append(x[cells])
        seen.append(y[cells])
    return tree.site.facts.model.scale * fits.factor_of(np.concatenate(raw), np.concatenate(seen))


def _scaled_by(tree: AttentionTree, value: float) -> Changes:
    """Scores by another scale."""
    by = value / tree.site.facts.model.scale

    def scaled(scores: Array, given: Given) -> Array:
        raw = uncapped(scores, tree.cap)
        return soft_capped(np.where(np.isfinite(raw), raw * by, raw), tree.cap)

    return {"scores": scaled}


def numbers(tree: AttentionTree) -> Iterator[Trial]:
    """Numbers that are solved for, beside scales."""

    def scaled(by: float) -> Changes:
        return {"context": lambda c, g: c * by}

    if "q" in tree.points:
        yield from _caps(tree)
    if "softmax" in tree.points:
        yield from _sinks(tree)
    if "context" in tree.points:
        by = solved(tree, scaled, list(np.geomspace(0.02, 50, 40)))
        yield one_edit("context", "number", ("scaled", by), scaled(by), 1)
        yield from _factors_of_heads(tree)


def _factors_of_heads(tree: AttentionTree) -> Iterator[Trial]:
    """A factor of its own for the context of each wrong head."""
    right, seen, scope = ([by_head(tree.site, getattr(one, name)) for one in tree.sample]
                          for name in ("right", "seen", "scope"))  # fmt: skip
    factors = np.ones(tree.given[0].heads)
    for head in all_wrong_heads(tree.site):
        cells = [each[head] & np.isfinite(x[head]) for each, x in zip(scope, seen, strict=True)]
        factors[head] = fits.factor_of(
            *(
                np.concatenate([x[head][some] for x, some in zip(side, cells, strict=True)])
                for side in (right, seen)
            )
        )
    change: Changes = {"context": lambda c, g: c * factors[:, None]}
    yield one_edit(
        "context", "number", ("scaled_heads", *factors.tolist()), change, int((factors != 1).sum())
    )


def _caps(tree: AttentionTree) -> Iterator[Trial]:
    """Scores behind another soft cap than the model's, or behind none."""
    top = max(float(np.abs(one.raw).max(initial=0.0)) for one in tree.sample)

    def capped(cap: float) -> Changes:
        return {"scores": lambda s, g: soft_capped(uncapped(s, tree.cap), cap)}

    if tree.cap:
        yield one_edit("scores", "applied", ("uncapped", tree.cap), capped(0.0))
    for cap in (5.0, 10.0, 20.0, 30.0, 50.0):
        yield one_edit("scores", "applied", ("capped", cap), capped(cap))
    if top > 0:
        cap = solved(tree, capped, [top * x for x in np.geomspace(0.03, 100, 30)])
        yield one_edit("scores", "applied", ("capped", cap), capped(cap), 1)


def _sinks(tree: AttentionTree) -> Iterator[Trial]:
    """A number of each head's own in the denominator (arXiv:2309.17453): what came out is less than it should be."""
    logs: list[list[float]] = [[] for _ in range(tree.given[0].heads)]
    for one in tree.sample:
        right, seen = (by_head(tree.site, x) for x in (one.right, one.seen))
        kept = (right * seen).sum(-1) / np.maximum((right**2).sum(-1), 1e-300)
        total = np.logaddexp.reduce(one.scores, axis=-1)
        good = (kept > 1e-6) & (kept < 1) & np.isfinite(total)
        found = total + np.log(1 / np.where(good, kept, 0.5) - 1)
        for head, values in enumerate(found):
            logs[head].extend(values[good[head]].tolist())
    if any(logs):
        more = np.array([np.exp(np.median(values)) if values else 0.0 for values in logs])
        alike = float(np.ptp(more)) <= 1e-3 * float(more.max())
        detail: Detail = ("sink", *map(float, more[:1] if alike else more))
        changes: Changes = {"softmax": lambda s, g: softmax_with(s, more[:, None, None])}
        yield one_edit("softmax", "number", detail, changes, len(detail) - 1)


def solved_rows(tree: AttentionTree, role: str, rows: str) -> Iterator[Trial]:
    """Rows of the cache with one factor, or cut off at one number."""

    def scaled(by: float) -> Changes:
        return {role: of_rows(lambda x, g: x * by, rows)}

    def cut(most: float) -> Changes:
        return {role: of_rows(lambda x, g: np.clip(x, -most, most), rows)}

    if rows != "all":  # of all, it is a factor of the scores, or of the context
        by = solved(tree, scaled, list(np.geomspace(0.03, 30, 25)))
        yield one_edit(role, "number", ("scaled", fits.simple(by), rows), scaled(fits.simple(by)), 1)
    top = max(float(np.abs(one.k if role == "k" else one.v).max(initial=0.0)) for one in tree.sample)
    if top > 0:
        most = solved(tree, cut, [top * x for x in np.geomspace(0.05, 1, 20)])
        yield one_edit(role, "number", ("cut_off", fits.simple(most), rows), cut(fits.simple(most)), 1)


def solved(tree: AttentionTree, changes: Callable[[float], Changes], grid: Sequence[float]) -> float:
    """The number whose changes leave least in the sample: of a grid that grows by one factor, then between."""
    left = [tree.left(changes(value)) for value in grid]
    best, least = float(grid[int(np.argmin(left))]), min(left)
    ratio = float(grid[1] / grid[0])
    if not least < PARTLY:
        return best
    for _ in range(24):
        ratio **= 0.6
        for value in (best / ratio, best * ratio):
            if (rest := tree.left(changes(value))) < least:
                best, least = value, rest
    return best
