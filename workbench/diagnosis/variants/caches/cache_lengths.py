"""A cache of the right heads that is longer or shorter than what was written: which rows are too many, or lost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.caches.caches import cache_variant


def cache_lengths(site: Site) -> Iterator[Variant]:
    """Variants in which the rows that were written stand around others, or around a gap; each part at its own place."""
    odd = [i for i, part in enumerate(site.parts) if not part.fits]
    if not odd or any(site.parts[i].seen.shape[1:] != site.parts[i].expected.shape[1:] for i in odd):
        return
    guesses: list[Array | None] = [None] * len(site.parts)
    reported: list[str] = []
    for i in odd:
        seen, rows = site.parts[i].seen, site.parts[i].expected
        more = len(seen) - len(rows)
        short, long = (rows, seen) if more > 0 else (seen, rows)
        at = _common(short, long)
        if more == 0 or not len(short) or at + _common(short[::-1], long[::-1]) < len(short):
            return
        extra = long[at : at + abs(more)]
        guesses[i] = np.concatenate([rows[:at], extra, rows[at:]]) if more > 0 else np.delete(
            rows, slice(at, at - more), axis=0
        )  # fmt: skip
        reported.append(_wording(more, at, len(short), extra))
    name = "cache_rows_inserted" if len(site.parts[odd[0]].seen) > len(site.parts[odd[0]].expected) else (
        "cache_rows_dropped"
    )  # fmt: skip
    fitted = {"rows": len(site.parts[odd[0]].seen) - len(site.parts[odd[0]].expected)}
    yield cache_variant(site, name, reported[0], guesses, fitted, len(odd))


def _common(a: Array, b: Array) -> int:
    """How many rows two tensors have in common from the start."""
    count = min(len(a), len(b))
    apart = np.abs(a[:count] - b[:count]).reshape(count, -1).max(1, initial=0.0)
    size = np.abs(a[:count]).reshape(count, -1).max(1, initial=0.0)
    same = apart <= 1e-2 * size
    return count if same.all() else int(np.argmin(same))


def _wording(more: int, at: int, short: int, rows: Array) -> str:
    """One pass in words."""
    count = f"{abs(more)} row{'s' * (abs(more) > 1)}"
    place = (
        "before the first row" if at == 0 else "behind the last row" if at >= short else f"from row {at} on"
    )
    if more < 0:
        return (
            f"{count} {'is' if more == -1 else 'are'} missing {place}: the cache is shorter than the sequence"
        )
    held = "of zeros, never written" if not rows.any() else "of other numbers: stale, or another sequence's"
    return f"the cache is longer than the sequence by {count} {held}, {place}"
