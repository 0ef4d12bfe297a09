"""Which keys and values a fused attention may have read: other rows than were written, other heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.attention.head_maps import Reading, exchanged, kv_head_maps
from lockstep.workbench.diagnosis.variants.attention.inside import Guess, Inside, Rows
from lockstep.workbench.diagnosis.variants.attention.softmax import softmax
from lockstep.workbench.diagnosis.variants.blocks import cached
from lockstep.workbench.diagnosis.variants.caches.caches import other_rows

_Others = Sequence[Array | None]
#: Which rows are others than they should be, in words.
_ROWS = {"all": "", "earlier": ", those of earlier steps alone", "new": ", those of the step itself alone"}
_EXCHANGED = {
    "keys and values": "keys and values are exchanged",
    "keys": "what is read as keys are the values",
    "values": "what is read as values are the keys",
}
#: What of all rows is told as heads that are read otherwise, or are zero.
_TOLD_ELSEWHERE = ("cache_heads_moved", "cache_rows_zero")


#: What a cache may hold instead: what happens, and what explains the same numbers as well in a short run.
LIKELY = ("cache_of_another_layer", "cache_of_another_rank", "cache_of_another_sequence", "cache_keys_for_values",
          "cache_rows_shifted")  # fmt: skip
UNLIKELY = ("cache_rows_zero", "cache_newest_row", "cache_first_row", "cache_rows_rolled", "cache_rows_reversed",
            "cache_heads_moved", "cache_layout")  # fmt: skip


def fused_rows(inside: Inside, names: Sequence[str]) -> Iterator[Variant]:
    """Variants of the rows of the cache: of keys and values, of keys, of values; of all rows, or of earlier steps'."""
    if names is LIKELY:
        yield from _lengths(inside)
    inner = [_cache(inside.site, which) for which in "kv" if which in inside.site.parts[0].inputs]
    for of_each in zip(*(other_rows(one) for one in inner), strict=True):
        name, text, keys = of_each[0]
        if name not in names or not inside.wanted(name):
            continue
        values = of_each[1][2] if len(of_each) > 1 else None
        sides: list[tuple[str, _Others | None, _Others | None]] = [("keys", keys, None)]
        if values is not None:
            sides = [("keys and values", keys, values), *sides, ("values", None, values)]
        for who, of_keys, of_values in sides:
            told = _EXCHANGED[who] if name == "cache_keys_for_values" else f"cached {who}: {text}"
            for which, words in _ROWS.items():
                if name not in _TOLD_ELSEWHERE or which != "all":
                    guess = _guess(inside, of_keys, of_values, which)
                    yield inside.variant(name, "cache", told + words, guess)


def _cache(site: Site, which: str) -> Site:
    """The cache of keys or values as a site of its own, of which what was read is not known."""
    parts = []
    for i, part in zip(site.passes, site.parts, strict=True):
        own, rows = site.taps.passes[i], part.inputs[which]
        before = [row for one in site.taps.passes[: i + 1] if one.seq == own.seq for row in one.rows]
        parts.append(replace(part, rows=tuple(before), inputs={"written": rows}, seen=rows, expected=rows))
    return replace(site, tap=site.near(f"attn.{which}_cache"), operation="cache", parts=tuple(parts))


def _guess(inside: Inside, keys: _Others | None, values: _Others | None, which: str) -> Guess:
    """Other rows in the place of the right ones (NaN: not known): all, or those that were cached before the pass, or in
    it."""

    def put(own: Array, theirs: Array | None, new: int) -> Array | None:
        if theirs is None or theirs.shape != own.shape:
            return None
        kept = np.isnan(theirs)
        fresh = (np.arange(len(own)) >= len(own) - new)[:, None, None]
        if which != "all":
            kept = kept | (fresh if which == "earlier" else ~fresh)
        return np.where(kept, own, theirs)

    def guess(i: int, rows: Rows) -> tuple[Array, Array | None] | None:
        part, probs, v = inside.site.parts[i], None, inside.values(i)
        k = part.inputs["k"] if keys is None else put(part.inputs["k"], keys[i], len(part.rows))
        if values is not None and v is not None:
            v = put(v, values[i], len(part.rows))
        if k is None or (values is not None and v is None):
            return None
        if keys is None:
            probs = part.inputs["probs"][:, rows]
        else:
            probs = softmax(inside.masked(i, rows, inside.products(part.inputs["q"][rows], k)))
        return probs, v

    return guess


def _lengths(inside: Inside) -> Iterator[Variant]:
    """Rows that are left out, or there twice."""

    def without(i: int, rows: Rows, *, new: bool) -> Array:
        keys = inside.raw[i].shape[2]
        kept = (np.arange(keys) >= keys - len(inside.site.parts[i].rows)) == new
        return np.where(kept, inside.masked(i, rows, inside.raw[i][:, rows]), -np.inf)

    def twice(i: int, rows: Rows) -> Array:
        keys = inside.raw[i].shape[2]
        fresh = np.arange(keys) >= keys - len(inside.site.parts[i].rows)
        return inside.masked(i, rows, inside.raw[i][:, rows] + np.log(2.0) * fresh)

    text = "attention reads only this step's keys and values, not the cache"
    guess = inside.of_scores(lambda i, rows: without(i, rows, new=True), inside.values)
    yield inside.variant("cache_not_used", "cache", text, guess)
    text = "this step's rows are not in the cache yet: it is read before it is written"
    guess = inside.of_scores(lambda i, rows: without(i, rows, new=False), inside.values)
    yield inside.variant("cache_newest_missing", "cache", text, guess)
    guess = inside.of_scores(twice, inside.values)
    yield inside.variant("cache_rows_twice", "cache", "this step's rows are written twice", guess)


# --- heads -------------------------------------------------------------------------------------------------


def fused_heads(inside: Inside) -> Iterator[Variant]:
    """KV heads that query heads read, of keys and values or of keys alone, and query heads in each other's place."""
    site = inside.site
    keys, values = [part.inputs["k"] for part in site.parts], [part.inputs.get("v") for part in site.parts]
    kv_heads = keys[0].shape[1]

    def reading(k: _Others, v: _Others | None) -> Reading:
        def of(i: int, head: int, source: int) -> Array | None:
            own, mine = k[i], head * kv_heads // len(inside.raw[i])
            if own is None or own.shape != keys[i].shape:
                return None
            query = site.parts[i].inputs["q"][:, head]
            scores = np.where(inside.allowed[i][head], query @ own[:, source].T * inside.scale, -np.inf)
            return _result(softmax(scores), values[i] if v is None else v[i], mine if v is None else source)

        return of

    def query(i: int, head: int, source: int) -> Array | None:
        return _result(
            site.parts[i].inputs["probs"][source], values[i], head * kv_heads // len(inside.raw[i])
        )

    def of_rank(rank: int) -> Reading:
        return reading(keys_of(rank), cached(site, "v", rank=rank))

    def keys_of(rank: int) -> _Others:
        return cached(site, "k", rank=rank)

    yield from kv_head_maps(site, kv_heads, reading(keys, values), of_rank)
    if values[0] is None:
        yield from exchanged(site, "query", query)
    else:
        yield from kv_head_maps(
            site, kv_heads, reading(keys, None), lambda rank: reading(cached(site, "k", rank=rank), None)
        )


def _result(probs: Array, values: Array | None, kv_head: int) -> Array:
    """Of one head: probabilities [T, K], or the context [T, D]."""
    return probs if values is None else probs @ values[:, kv_head]
