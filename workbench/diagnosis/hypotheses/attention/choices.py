"""Choices a slice: each head reads some KV head, each query sees by some mask.

Along an axis of the result each slice takes the nearest of several predictions. What it takes to name it is charged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.attention.masks import masks
from lockstep.workbench.diagnosis.hypotheses.attention.tree import (
    GROSS,
    AttentionTree,
    Change,
    Changes,
    Given,
)
from lockstep.workbench.diagnosis.hypotheses.blocks import by_head, from_heads
from lockstep.workbench.diagnosis.hypotheses.edits import Detail, Edit
from lockstep.workbench.diagnosis.operations.deviation import distance
from lockstep.workbench.diagnosis.recording import Array

#: A choice: its edit, what it gives, what rounding may leave of that, how many numbers it took.
Choice = tuple[Edit, list[Array], list[Array], int]
#: Heads at most of which all maps are tried, and masks of which the best are.
_HEADS, _MASKS = 32, 6


def head_choices(tree: AttentionTree) -> Iterator[Choice]:
    """Each query head reads the keys, the values, or both, of some KV head; or it is another query head's, or zero."""
    kv, heads = _kv_heads(tree.given[0]), tree.given[0].heads
    if max(kv, heads) > _HEADS:
        return
    own = np.arange(heads) // (heads // kv)
    for points in _sides(tree):
        options = [{point: _head_alone(j, point, heads) for point in points} for j in range(kv)]
        yield from _by_head(tree, "+".join(points), "kv_heads", options, own)
    for point in _EXCHANGED[tree.site.operation]:
        every: list[Changes] = [{point: _head_alone(j, point, heads)} for j in range(heads)]
        yield from _by_head(tree, point, "query_heads", every, np.arange(heads))
    if "context" in tree.points:
        yield from _by_head(
            tree, "context", "zero_heads", [{"context": lambda c, g: 0 * c}], np.full(heads, -1)
        )


def _sides(tree: AttentionTree) -> Iterator[tuple[str, ...]]:
    """Where a map of query heads to KV heads may be another: of keys and values, of keys, of values."""
    cached = tuple(point for role, point in (("k", "keys"), ("v", "values")) if role in tree.roles)
    if len(cached) > 1:
        yield cached
    yield from ((point,) for point in cached)


#: Operation -> the points at which heads may stand in each other's place.
_EXCHANGED: Mapping[str, tuple[str, ...]] = {
    "scores": ("scores", "q"),
    "softmax": ("probs",),
    "context": ("probs", "context"),
    "weights": ("q",),
    "attention": ("q",),
}


def _kv_heads(given: Given) -> int:
    """How many KV heads were recorded, of keys or else of values."""
    cached = given.v if given.v.size and not given.k.size else given.k
    return int(cached.shape[1])


def _head_alone(j: int, point: str, heads: int) -> Change:
    """One head for all: of keys and values already expanded, KV head j is that of the first query head that has it."""

    def change(x: Array, given: Given) -> Array:
        if point in ("probs", "scores"):
            return np.repeat(x[j : j + 1], heads, 0)
        first = j if point in ("q", "context") else j * (heads // _kv_heads(given))
        return np.repeat(x[:, first : first + 1], heads, 1)

    return change


def _by_head(
    tree: AttentionTree, place: str, name: str, options: Sequence[Changes], own: NDArray[np.intp]
) -> Iterator[Choice]:
    made = [tree.whole(changes) for changes in options]
    if any(one is None for one in made):
        return
    site, heads = tree.site, len(own)
    far = np.zeros((len(options) + 1, heads))
    for i in tree.wrong:
        seen, scope = by_head(site, site.parts[i].seen), by_head(site, tree.given[i].scope)
        for n, out in enumerate([site.parts[i].expected, *(one[0][i] for one in made if one is not None)]):
            apart = _apart(by_head(site, out), seen, site.parts[i].largest) * scope
            far[n] += apart.reshape(heads, -1).sum(1)
    far[0] *= 0.999
    best = far.argmin(0) - 1  # -1: the right one
    outs, noises = [part.expected for part in site.parts], [part.noise for part in site.parts]
    for i in tree.wrong:
        out, noise = by_head(site, outs[i]).copy(), by_head(site, noises[i]).copy()
        for head in np.flatnonzero(best >= 0):
            one = made[best[head]]
            assert one is not None, "all were made"
            out[head], noise[head] = by_head(site, one[0][i])[head], by_head(site, one[1][i])[head]
        outs[i], noises[i] = from_heads(site, out), from_heads(site, noise)
    used = np.where(best < 0, own, best)
    if (best >= 0).any() and (name == "zero_heads" or (used != own).any()):
        yield (
            Edit(place, "map", (name, *map(float, used))),
            outs,
            noises,
            0 if name in ("kv_heads", "zero_heads") else 1,
        )


def query_choices(tree: AttentionTree) -> Iterator[Choice]:
    """Each query sees by one of a few masks: where another holds for some queries, chunks or steps than for others."""
    keys = max(len(one.key_at) for one in tree.given)
    every: list[tuple[Detail, Changes]] = [(detail, {"allowed": change}) for detail, change in masks(keys)]
    far = np.array([_left_by_query(tree, changes) for _, changes in every])
    chosen = [int(i) for i in dict.fromkeys(far.argmin(0).tolist())][:_MASKS]
    made = [(every[i][0], whole) for i in chosen if (whole := tree.whole(every[i][1])) is not None]
    if len(made) < 1:
        return
    site, axis = tree.site, tree.site.token_axis
    outs, noises = [part.expected for part in site.parts], [part.noise for part in site.parts]
    used: dict[int, list[int]] = {}
    for i in tree.wrong:
        part, scope = site.parts[i], tree.given[i].scope
        rest = tuple(j for j in range(part.seen.ndim) if j != axis)
        options = [part.expected, *(whole[0][i] for _, whole in made)]
        apart = [(_apart(out, part.seen, part.largest) * scope).sum(rest) for out in options]
        best = np.argmin(apart, axis=0)
        shape = [1] * part.seen.ndim
        shape[axis] = -1
        pick = best.reshape(shape)
        outs[i] = np.choose(pick, options)
        noises[i] = np.choose(pick, [part.noise, *(whole[1][i] for _, whole in made)])
        for n in np.unique(best[best > 0]).tolist():
            positions = tree.given[i].at[best == n].tolist()
            used.setdefault(n, []).extend(positions)
    if not used:
        return
    detail: list[str | float | None] = []
    for n, positions in used.items():
        detail += [
            str(made[n - 1][0][0]),
            *made[n - 1][0][1:],
            float(min(positions)),
            float(max(positions)),
            ";",
        ]
    yield Edit("allowed", "map", ("by_query", *detail)), outs, noises, 2 * len(used)


def _left_by_query(tree: AttentionTree, changes: Changes) -> Array:
    """What changes leave of each query of the sample."""
    made, found = tree.sampled(changes), []
    outs = [one.right for one in tree.sample] if made is None else made[0]
    for one, out in zip(tree.sample, outs, strict=True):
        axis = tree.site.token_axis
        rest = tuple(j for j in range(out.ndim) if j != axis)
        apart = _apart(out, one.seen, tree.site.parts[one.part].largest) * one.scope
        found.append(apart.sum(rest))
    return np.concatenate(found)


def _apart(out: Array, seen: Array, largest: float) -> Array:
    """Squared distances, of what is not finite in one of them a large number."""
    return np.square(np.minimum(distance(seen, out, largest), GROSS))
