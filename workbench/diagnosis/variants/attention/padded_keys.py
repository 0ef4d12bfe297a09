"""Keys that are not there, of a padded batch, page or bucket, which nothing masks: zeros, which score 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.attention.tree import AttentionTree, Change, Given
from lockstep.workbench.diagnosis.hypotheses.attention.trials import Trial, judged, tried, worded
from lockstep.workbench.diagnosis.hypotheses.blocks import by_head
from lockstep.workbench.diagnosis.hypotheses.setting import Wording
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

_MULTIPLES = (4, 8, 16, 32, 64, 128, 256)
#: How many more keys there may be, whatever their number.
_MORE = (1, 2, 3, 4, 5, 6, 7, 8)
#: Slots at most that a cache may have left; caches of sequences that are listed.
_MOST_EMPTY, _LISTED = 1 << 20, 6


def padded_keys(site: Site) -> Iterator[Variant]:
    """Variants of probabilities, or of what a fused attention gives: each denominator has so many exp(0) more."""
    if judged(site):
        tree = AttentionTree.of(site)
        yield from tried(tree, _trials(tree))


def _trials(tree: AttentionTree) -> Iterator[Trial]:
    most = max(given.raw.shape[-1] for given in tree.given)
    ways: list[tuple[str, Callable[[int], int]]] = [
        *((f"up to a multiple of {n}", lambda keys, n=n: -keys % n) for n in _MULTIPLES),
        *((f"up to {n}", lambda keys, n=n: n - keys) for n in (tree.site.facts.model.max_position, *_powers(most))),
        *((f"{n} of them" if n > 1 else "one of them", lambda keys, n=n: n) for n in _MORE),
    ]  # fmt: skip
    for words, more in ways:
        text = f"keys that are not there take a share: padding with zeros ({words}), which score 0 and are not masked"
        yield worded(Wording("padded_keys", "mask", text, {}), {"probs": _beside(partial(_of_keys, more))})
    slots = _slots(tree)
    if slots:
        words_of = Wording("empty_slots", "mask", _of_slots(slots), {"slots": list(slots.values())})
        yield worded(words_of, {"probs": _beside(partial(_empty, tree, slots))}, len(set(slots.values())))


def _slots(tree: AttentionTree) -> dict[int, int]:
    """By sequence how many slots its cache has, where each of its wrong passes shows the same, by the share that keys
    lack; empty where they do not."""
    site, found = tree.site, dict[int, set[int]]()
    for i in tree.wrong:
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


def _empty(tree: AttentionTree, slots: Mapping[int, int], given: Given) -> int:
    """How many slots a pass finds empty: none where its result is right, as behind the mask of a prompt."""
    part = given.part
    return slots[tree.site.parts[part].rows[-1].seq] - given.raw.shape[-1] if part in tree.wrong else 0


def _of_slots(slots: Mapping[int, int]) -> str:
    sizes = list(dict.fromkeys(slots.values()))
    listed = [f"{size} of sequence {seq}" for seq, size in slots.items()]
    more = f" and of {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    text = str(sizes[0]) if len(sizes) == 1 else f"{', '.join(listed[:_LISTED])}{more}"
    return f"slots of the cache that nothing was written to yet are attended to, as zeros, which score 0: it has {text}"


def _powers(most: int) -> Iterator[int]:
    """Powers of two from so many keys on."""
    first = int(np.ceil(np.log2(max(most, 2))))
    yield from (2**n for n in range(first, first + 4))


def _beside(more: Callable[[Given], int]) -> Change:
    """Of how many more keys a pass has beside its own."""

    def change(probs: Array, given: Given) -> Array:
        total = np.logaddexp.reduce(given.scores, axis=-1, keepdims=True)
        return np.asarray(probs / (1 + max(more(given), 0) * np.exp(-total)))

    return change


def _of_keys(more: Callable[[int], int], given: Given) -> int:
    return more(given.raw.shape[-1])
