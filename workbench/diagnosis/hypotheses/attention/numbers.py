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
from lockstep.workbench.diagnosis.hypotheses.attention.trials import NEAR, PARTLY, Trial, one_edit, worded
from lockstep.workbench.diagnosis.hypotheses.blocks import all_wrong_heads, by_head
from lockstep.workbench.diagnosis.hypotheses.edits import Detail, Edit
from lockstep.workbench.diagnosis.hypotheses.setting import Wording
from lockstep.workbench.diagnosis.operations.attention import FUSED, soft_capped, uncapped
from lockstep.workbench.diagnosis.recording import Array

#: Keys of a block that a sparse kernel may leave out.
_BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)


def scales(tree: AttentionTree, capped: bool = True) -> Iterator[Trial]:
    """Another factor in the place of the right one; `capped`: behind the model's soft cap, where it has one."""
    edits = () if capped else (Edit("scores", "applied", ("uncapped", tree.cap)),)
    known: dict[float, list[str]] = {}
    for value, words in meanings(tree.site, tree.site.facts.model.scale):
        same = next((one for one in known if math.isclose(one, value, rel_tol=1e-9)), value)
        known.setdefault(same, []).append(words)
    for value, every in known.items():
        edit = Edit("scale", "number", (repr(value), *every))
        yield Trial((edit, *edits), _scaled_by(tree, capped, value))
    cap = tree.cap if capped else 0.0
    value = _scale_seen(tree, cap) if tree.site.operation == "scores" else _scale_solved(tree, capped)
    yield Trial((Edit("scale", "number", (repr(value),)), *edits), _scaled_by(tree, capped, value), 1)


def _scale_solved(tree: AttentionTree, capped: bool) -> float:
    grid = [tree.site.facts.model.scale * x for x in np.geomspace(0.01, 100, 61)]
    return solved(tree, partial(_scaled_by, tree, capped), grid)


def _scale_seen(tree: AttentionTree, cap: float) -> float:
    """Read off the scores themselves, which are capped there."""
    raw, seen = [np.empty(0)], [np.empty(0)]
    for one in tree.sample:
        x, y = uncapped(one.raw, tree.cap), uncapped(one.seen, cap)
        cells = one.scope & one.allowed & np.isfinite(x) & np.isfinite(y)
        raw.append(x[cells])
        seen.append(y[cells])
    return tree.site.facts.model.scale * fits.factor_of(np.concatenate(raw), np.concatenate(seen))


def _scaled_by(tree: AttentionTree, capped: bool, value: float) -> Changes:
    """Scores by another scale."""
    by = value / tree.site.facts.model.scale

    def scaled(scores: Array, given: Given) -> Array:
        raw = uncapped(scores, tree.cap)
        return soft_capped(np.where(np.isfinite(raw), raw * by, raw), tree.cap if capped else 0.0)

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


def factors_of_caches(tree: AttentionTree) -> Iterator[Trial]:
    """Cached keys by one factor and values by another, as of caches that are read by the scales of others: the keys' is
    solved for, the values' follows from it."""

    def of_values(scale: float) -> float:
        if (found := tree.sampled(_scaled_by(tree, True, scale))) is None:
            return 1.0
        made, seen = ([x[one.scope] for x, one in zip(side, tree.sample, strict=True)]
                      for side in (found[0], [one.seen for one in tree.sample]))  # fmt: skip
        return fits.factor_of(np.concatenate(made), np.concatenate(seen))

    def scaled(scale: float) -> Changes:
        by = of_values(scale)
        return {**_scaled_by(tree, True, scale), "context": lambda c, g: c * by}

    right = tree.site.facts.model.scale
    scale = solved(tree, scaled, [right * x for x in np.geomspace(0.02, 50, 61)])
    keys, values = scale / right, of_values(scale)
    text = f"cached keys are {keys:.5g} times what was written, and cached values {values:.5g} times"
    words = Wording("cache_scaled", "cache", text, {"keys": keys, "values": values})
    yield worded(words, scaled(scale), 2)


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
    if top > 0 and tree.site.operation in FUSED:  # of recorded scores any tensor's cut is tried
        most = fits.simple(solved(tree, _cut_off, [top * x for x in np.geomspace(0.03, 1, 25)]))
        yield one_edit("scores", "number", ("cut_off", most), _cut_off(most), 1)


def _cut_off(most: float) -> Changes:
    """Scores that are clamped, those of hidden keys as they are."""
    return {"scores": lambda s, g: np.where(np.isfinite(s), np.clip(s, -most, most), s)}


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


def skipped(tree: AttentionTree) -> Iterator[Trial]:
    """Blocks of keys that are left out where their largest score is too far below the row's."""
    keys = max(len(one.key_at) for one in tree.given)
    every = [tree.given[i] for i in tree.wrong]
    for size in (size for size in _BLOCKS if size < keys):
        changes, few = partial(_without_blocks, size), _distances(tree.sample, size)
        if len(few) < 2:
            continue
        threshold = _searched(tree, changes, (few[1:] + few[:-1]) / 2)
        if tree.left(changes(threshold)) < NEAR:  # all wrong queries show more nearly where it is
            low, high = few[few <= threshold].max(), few[few >= threshold].min()
            many = _distances(every, size)
            many = many[(many >= low) & (many <= high)]
            threshold = min(
                (many[1:] + many[:-1]) / 2, key=lambda one: _left_of_all(tree, changes(float(one)))
            )
        yield one_edit("softmax", "number", ("skipped", float(size), float(threshold)), changes(threshold), 1)


def _distances(given: Sequence[Given], size: int) -> Array:
    """How far blocks of keys are below their rows', sorted."""
    below = np.concatenate([_below(one.scores, size).ravel() for one in given])
    return np.unique(below[np.isfinite(below)])


def _left_of_all(tree: AttentionTree, changes: Changes) -> float:
    """What changes leave in all wrong passes."""
    made = tree.whole(changes)
    if made is None:
        return math.inf
    parts = zip(made[0], tree.given, strict=True)
    return sum(float(np.square((out - one.seen)[one.scope]).sum()) for out, one in parts)


def _below(scores: Array, size: int) -> Array:
    """How far the largest score of each block of keys [heads, T, blocks] is below the row's."""
    highest = np.maximum.reduceat(scores, np.arange(0, scores.shape[2], size), axis=2)
    return np.asarray(scores.max(-1, keepdims=True) - highest)


def _without_blocks(size: int, threshold: float) -> Changes:
    def change(scores: Array, given: Given) -> Array:
        gone = (_below(scores, size) > threshold).repeat(size, axis=2)[:, :, : scores.shape[2]]
        return given.softmax(np.where(gone, -np.inf, scores))

    return {"softmax": change}


def _searched(tree: AttentionTree, changes: Callable[[float], Changes], numbers: Array) -> float:
    """The one of sorted numbers that leaves least, of what grows on both sides of it."""
    while True:
        some = numbers[np.unique(np.linspace(0, len(numbers) - 1, 16).astype(int))]
        best = int(np.argmin([tree.left(changes(float(one))) for one in some]))
        if len(some) == len(numbers):
            return float(some[best])
        low, high = some[max(best - 1, 0)], some[min(best + 1, len(some) - 1)]
        numbers = numbers[(numbers >= low) & (numbers <= high)]


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
