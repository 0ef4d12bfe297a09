"""Keys that are not there, of a padded batch, page or bucket, which nothing masks: zeros, which score 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.blocks import by_head
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.attention.inside import Guess, Inside, Rows

_MULTIPLES = (4, 8, 16, 32, 64, 128, 256)
#: How many more keys there may be, whatever their number.
_MORE = (1, 2, 3, 4, 5, 6, 7, 8)
#: Slots at most that a cache may have left; caches of sequences that are listed.
_MOST_EMPTY, _LISTED = 1 << 20, 6


def padded_keys(site: Site) -> Iterator[Variant]:
    """Variants of probabilities, or of what a fused attention gives: each denominator has so many exp(0) more."""
    if not all(part.fits for part in site.parts):
        return
    inside = Inside(site)
    most = max(len(part.inputs["scores"][0][0]) for part in site.parts)
    ways: list[tuple[str, Callable[[int], int]]] = [
        *((f"up to a multiple of {n}", lambda keys, n=n: -keys % n) for n in _MULTIPLES),
        *((f"up to {n}", lambda keys, n=n: n - keys) for n in (site.facts.model.max_position, *_powers(most))),
        *((f"{n} of them" if n > 1 else "one of them", lambda keys, n=n: n) for n in _MORE),
    ]  # fmt: skip
    for words, more in ways:
        text = f"keys that are not there take a share: padding with zeros ({words}), which score 0 and are not masked"
        yield inside.variant("padded_keys", "mask", text, _guess(inside, partial(_of_keys, more)))
    slots = _slots(inside)
    if slots:
        yield inside.variant(
            "empty_slots", "mask", _of_slots(slots), _guess(inside, partial(_empty, inside, slots)),
            {"slots": list(slots.values())}, len(set(slots.values())),
        )  # fmt: skip


def _slots(inside: Inside) -> dict[int, int]:
    """By sequence how many slots its cache has, where each of its wrong passes says the same, by the share that keys
    lack; empty where they do not."""
    site, found = inside.site, dict[int, set[int]]()
    for i in inside.wrong_parts:
        part = site.parts[i]
        seen, right = by_head(site, part.seen), by_head(site, part.expected)
        total = np.logaddexp.reduce(part.inputs["scores"], axis=-1)
        with np.errstate(all="ignore"):
            kept = (right * seen).sum(-1) / (right**2).sum(-1)
            empty = np.exp(total) * (1 / kept - 1)
        empty = empty[np.isfinite(empty)]
        count = float(np.median(empty)) if empty.size else 0.0
        if not 0.5 <= count < _MOST_EMPTY:
            return {}
        keys = part.inputs["scores"].shape[-1]
        found.setdefault(part.rows[-1].seq, set()).add(keys + round(count))
    return {
        seq: min(sizes) for seq, sizes in sorted(found.items()) if all(len(x) == 1 for x in found.values())
    }


def _empty(inside: Inside, slots: Mapping[int, int], i: int, keys: int) -> int:
    """How many slots a pass finds empty: none where its result is right, as behind the mask of a prompt."""
    return slots[inside.site.parts[i].rows[-1].seq] - keys if i in inside.wrong_parts else 0


def _of_slots(slots: Mapping[int, int]) -> str:
    sizes = list(dict.fromkeys(slots.values()))
    listed = [f"{size} of sequence {seq}" for seq, size in slots.items()]
    more = f" and of {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    said = str(sizes[0]) if len(sizes) == 1 else f"{', '.join(listed[:_LISTED])}{more}"
    return f"slots of the cache that nothing was written to yet are attended to, as zeros, which score 0: it has {said}"


def _powers(most: int) -> Iterator[int]:
    """Powers of two from so many keys on."""
    first = int(np.ceil(np.log2(max(most, 2))))
    yield from (2**n for n in range(first, first + 4))


def _guess(inside: Inside, more: Callable[[int, int], int]) -> Guess:
    """Of how many more keys a part has beside its own."""

    def guess(i: int, rows: Rows) -> tuple[Array, Array | None]:
        probs, scores = inside.probs(i)[:, rows], inside.site.parts[i].inputs["scores"][:, rows]
        count = max(more(i, scores.shape[-1]), 0)
        total = np.logaddexp.reduce(scores, axis=-1, keepdims=True)
        return probs / (1 + count * np.exp(-total)), inside.values(i)

    return guess


def _of_keys(more: Callable[[int], int], query: int, keys: int) -> int:
    """How many are added, by how many there are, whichever the query."""
    return more(keys)
