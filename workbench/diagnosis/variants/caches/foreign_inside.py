"""Rows that nobody in the recording has written, inside of a fused attention: keys and values that are solved for.

A few rows are far fewer numbers than all contexts that are made of them. Where some keys and values in the place of
those that were written give every wrong context of a sequence, within rounding, other rows were read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.attention.tree import AttentionTree, Change, Given, softmax
from lockstep.workbench.diagnosis.hypotheses.attention.trials import judged, variant_of, worded
from lockstep.workbench.diagnosis.hypotheses.blocks import by_head
from lockstep.workbench.diagnosis.hypotheses.setting import Wording
from lockstep.workbench.diagnosis.hypotheses.variant import ELEMENTS_A_PARAMETER, Variant
from lockstep.workbench.diagnosis.operations.deviation import WRONG, Mask
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.caches.caches import first_rows
from lockstep.workbench.diagnosis.variants.caches.foreign_rows import foreign_words

#: How many first rows are tried, and pages of how many rows.
_FIRST, _PAGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), (4, 8, 16, 32)
#: Steps of the solution; numbers that are solved for at most.
_STEPS, _MOST = 60, 1024
#: Share of the contexts that see such rows that are wrong at the least.
_SHOWN = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class _Contexts:
    """What the queries that read one KV head gave, all wrong passes of a sequence one below the other: queries [N, D],
    what they see [N, K], whether they are `wrong` [N], `seen` and `noise` [N, D]; `keys` and `values` [K, D] as they
    were written."""

    queries: Array
    allowed: Mask
    wrong: Mask
    seen: Array
    noise: Array
    keys: Array
    values: Array


def foreign_inside(site: Site) -> Iterator[Variant]:
    """The first rows, or a page, of each wrong sequence hold other keys and values than were written."""
    if not judged(site) or site.facts.model.score_cap or site.operation != "attention":
        return
    tree = AttentionTree.of(site)
    if any(one.sinks is not None or not np.isfinite(one.seen).all() for one in tree.given):
        return
    found: dict[int, tuple[range, Array, Array]] = {}
    for seq in sorted({site.taps.passes[site.passes[i]].seq for i in tree.wrong}):
        solved = _of_sequence(tree, seq)
        if solved is None:
            return
        found[seq] = solved
    changes = {role: _held(site, found, at) for role, at in (("k", 1), ("v", 2))}
    made = tree.whole(changes)
    if made is None:
        return
    words = {seq: _which(rows) for seq, (rows, *_) in found.items()}
    text = foreign_words(
        "keys and values", "; ".join(f"{rows} of sequence {seq}" for seq, rows in words.items())
    )
    trial = worded(
        Wording("cache_foreign_prefix", "cache", text, {"sequences": words}),
        changes,
        sum(k.size + v.size for _, k, v in found.values()),
    )
    yield variant_of(site, trial, *made)


def _which(rows: range) -> str:
    if not rows.start:
        return first_rows(len(rows))
    return f"the rows {rows.start}–{rows.stop - 1}"


def _held(site: Site, found: dict[int, tuple[range, Array, Array]], at: int) -> Change:
    """Keys or values with what was found in the place of some of them."""

    def change(x: Array, given: Given) -> Array:
        solved = found.get(site.taps.passes[site.passes[given.part]].seq)
        if solved is None:
            return x
        x, rows = x.copy(), solved[0]
        x[rows.start : rows.stop] = (solved[1], solved[2])[at - 1][: max(0, len(x) - rows.start)]
        return x

    return change


def _of_sequence(tree: AttentionTree, seq: int) -> tuple[range, Array, Array] | None:
    """The fewest rows that may hold others, with their keys and values [n, kv_heads, D]."""
    site = tree.site
    parts = [i for i in tree.wrong if site.taps.passes[site.passes[i]].seq == seq]
    longest = max((tree.given[i] for i in parts), key=lambda one: len(one.k))
    heads = [_contexts(tree, parts, longest, head) for head in range(longest.k.shape[1])]
    for rows in (one for one in _ranges(len(longest.k)) if all(_shows(each, one) for each in heads)):
        numbers = len(rows) * (longest.k.shape[2] + longest.v.shape[2])
        if numbers > _MOST or any(one.seen.size < ELEMENTS_A_PARAMETER * numbers for one in heads):
            continue
        solved: list[tuple[Array, Array]] = []
        for one in heads:
            if (found := _solved(one, rows, tree.site.facts.model.scale)) is None:
                break
            solved.append(found)
        else:
            k, v = (np.stack([one[which] for one in solved], axis=1) for which in (0, 1))
            return rows, k, v
    return None


def _shows(of: _Contexts, rows: range) -> bool:
    """Whether what sees one of the rows is wrong, but for few, and nothing else is."""
    sees = of.allowed[:, rows.start : rows.stop].any(1)
    return not (of.wrong & ~sees).any() and bool((of.wrong & sees).sum() >= _SHOWN * sees.sum())


def _ranges(keys: int) -> Iterator[range]:
    """Rows that may be others, the fewest first."""
    every = [range(count) for count in _FIRST if count < keys]
    every += [range(start, min(start + page, keys)) for page in _PAGES for start in range(page, keys, page)]
    yield from sorted(every, key=len)


def _contexts(tree: AttentionTree, parts: list[int], longest: Given, head: int) -> _Contexts:
    group = longest.heads // longest.k.shape[1]
    own = slice(head * group, (head + 1) * group)
    columns: list[list[Array]] = [[], [], [], [], []]
    for i in parts:
        one, shown = tree.given[i], by_head(tree.site, tree.given[i].seen)[own]
        more = len(longest.k) - len(one.k)
        cells = np.pad(one.allowed[own].astype(np.float64), ((0, 0), (0, 0), (0, more)))
        noise = by_head(tree.site, tree.site.parts[i].noise)[own]
        wrong = by_head(tree.site, one.scope)[own].any(2, keepdims=True).astype(np.float64)
        for column, x in zip(
            columns, (one.q[:, own].swapaxes(0, 1), cells, wrong, shown, noise), strict=True
        ):
            column.append(x.reshape(-1, x.shape[2]))
    queries, allowed, wrong, seen, noise = map(np.concatenate, columns)
    return _Contexts(
        queries, allowed > 0, wrong[:, 0] > 0, seen, noise, longest.k[:, head], longest.v[:, head]
    )


def _solved(of: _Contexts, rows: range, scale: float) -> tuple[Array, Array] | None:
    """Keys and values of some rows that give what was seen (Levenberg and Marquardt); None where there are none."""
    chosen, noise = slice(rows.start, rows.stop), np.maximum(of.noise, 1e-12)
    at, damping = np.concatenate([of.keys[chosen], of.values[chosen]], 1), 1e-2
    rest, probs, values = _rest(of, chosen, at, scale, noise)
    for _ in range(_STEPS):
        slope = _slope(of, chosen, probs, values, scale, noise)
        if not slope.any():  # no query attends to any of the rows
            return None
        square, pull = slope.T @ slope, slope.T @ rest.ravel()
        size = np.maximum(np.diag(square), 1e-9 * np.trace(square))
        step = np.linalg.solve(square + damping * np.diag(size), pull).reshape(at.shape)
        new = _rest(of, chosen, at - step, scale, noise)
        if np.linalg.norm(new[0]) < np.linalg.norm(rest):
            gained = 1 - np.linalg.norm(new[0]) / np.linalg.norm(rest)
            at, (rest, probs, values), damping = at - step, new, max(damping / 5, 1e-12)
            if gained < 1e-4:
                break
        else:
            damping *= 5
            if damping > 1e8:
                break
    good = np.linalg.norm(rest) <= WRONG * np.sqrt(rest.size)
    return _keys_and_values(of, at) if good else None


def _keys_and_values(of: _Contexts, at: Array) -> tuple[Array, Array]:
    """The two sides of rows [n, width of keys + width of values]."""
    return at[:, : of.keys.shape[1]], at[:, of.keys.shape[1] :]


def _rest(of: _Contexts, chosen: slice, at: Array, scale: float, noise: Array) -> tuple[Array, Array, Array]:
    """What keys and values of the rows leave, in units of noise; the probabilities, and all values."""
    keys, values = of.keys.copy(), of.values.copy()
    keys[chosen], values[chosen] = _keys_and_values(of, at)
    probs = softmax(np.where(of.allowed, scale * of.queries @ keys.T, -np.inf))
    return (probs @ values - of.seen) / noise, probs, values


def _slope(of: _Contexts, chosen: slice, probs: Array, values: Array, scale: float, noise: Array) -> Array:
    """By how much each context grows with each number of the rows, [N * D, n * widths]."""
    own, context = probs[:, chosen], probs @ values
    by_key = (
        own[:, None, :, None]
        * (values[chosen].T[None] - context[:, :, None])[..., None]
        * (scale * of.queries)[:, None, None, :]
    )
    by_value = own[:, None, :, None] * np.eye(values.shape[1])[None, :, None, :]
    both = np.concatenate([by_key, by_value], axis=3) / noise[:, :, None, None]
    return np.asarray(both.reshape(of.seen.size, -1))
