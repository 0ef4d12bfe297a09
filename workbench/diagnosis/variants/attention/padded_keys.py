"""Keys that are not there, of a padded batch, page or bucket, which nothing masks: zeros, which score 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.attention.inside import Guess, Inside, Rows

_MULTIPLES = (4, 8, 16, 32, 64, 128, 256)
#: How many more keys there may be, whatever their number.
_MORE = (1, 2, 3, 4, 5, 6, 7, 8)


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
        yield inside.variant("padded_keys", "mask", text, _guess(inside, more))


def _powers(most: int) -> Iterator[int]:
    """Powers of two from so many keys on."""
    first = int(np.ceil(np.log2(max(most, 2))))
    yield from (2**n for n in range(first, first + 4))


def _guess(inside: Inside, more: Callable[[int], int]) -> Guess:
    def guess(i: int, rows: Rows) -> tuple[Array, Array | None]:
        probs, scores = inside.probs(i)[:, rows], inside.site.parts[i].inputs["scores"][:, rows]
        count = max(more(scores.shape[-1]), 0)
        total = np.logaddexp.reduce(scores, axis=-1, keepdims=True)
        return probs / (1 + count * np.exp(-total)), inside.values(i)

    return guess
