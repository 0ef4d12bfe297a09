"""Cached rows that nobody in the recording has written, and that are right from some row on: a prefix that was computed
otherwise, as by another request whose pages are taken for this one's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.variant import ELEMENTS_A_PARAMETER, Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.caches.caches import cache_variant, what

#: How far the size of such rows may be from that of those that should be there, as a factor.
_SIZE = 3.0


def foreign_prefix(site: Site) -> Iterator[Variant]:
    """The first rows of some sequences, the same ones at every step, hold something else than they did when written."""
    if site.deviation is None or not all(part.fits for part in site.parts):
        return
    lengths: dict[int, set[int]] = {}
    guesses: list[Array | None] = [None] * len(site.parts)
    numbers: dict[int, Array] = {}
    for i, (part, scope) in enumerate(zip(site.parts, site.deviation.scopes, strict=True)):
        seq, rows = site.taps.passes[site.passes[i]].seq, np.asarray(scope.any((1, 2)))
        count = int(rows.sum())
        lengths.setdefault(seq, set()).add(count)
        seen = part.seen[:count]
        if (
            not rows[:count].all()
            or not np.isfinite(seen).all()
            or not _as_large(seen, part.expected[:count])
        ):
            return
        if count and not np.array_equal(numbers.setdefault(seq, seen), seen):
            return  # rows that are read from memory stay as they are
        guesses[i] = np.concatenate([seen, part.expected[count:]])
    found = {seq: counts.pop() for seq, counts in lengths.items() if len(counts) == 1 and counts != {0}}
    if not found or any(len(counts) > 1 for counts in lengths.values()):
        return
    seq, count = next(iter(found.items()))
    more = f", and so for {len(found) - 1} more" if len(found) > 1 else ""
    text = foreign_words(what(site), f"the first {count} rows of sequence {seq}", more)
    cost = sum(x.size for x in numbers.values()) // ELEMENTS_A_PARAMETER
    yield cache_variant(site, "cache_foreign_prefix", text, guesses, {"sequences": found}, cost)


def foreign_words(what_is_held: str, rows: str, more: str = "") -> str:
    return (
        f"the cache of {what_is_held} holds for {rows} what no request here has written{more}: a prefix of another "
        "request is taken for it, or of another model, adapter or state of the weights"
    )


def _as_large(seen: Array, right: Array) -> bool:
    """Whether the numbers have about the size that they should have: what was never written has not."""
    sizes = [float(np.linalg.norm(x)) for x in (seen, right)]
    return min(sizes) * _SIZE >= max(sizes)
