"""Contexts of heads that were padded to another width for a kernel, and cut off behind all of them, not behind each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.variant import PARTLY, Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array


def padded_heads(site: Site) -> Iterator[Variant]:
    """The width that leaves least, of those up to twice the heads' own and of powers of two."""
    deviation, dim = site.deviation, site.facts.model.value_dim
    if deviation is None or any(part.seen.ndim != 2 or not part.fits for part in site.parts):
        return
    wrong = [i for i, scope in enumerate(deviation.scopes) if scope.any()]
    part, scope = site.parts[wrong[0]], deviation.scopes[wrong[0]]
    error = np.linalg.norm((part.seen - part.expected)[scope])
    widths = {
        *range(dim + 1, 2 * dim + 1),
        *(2**n for n in range(4, 10) if 2**n > dim),
        site.facts.model.head_dim,
    }
    left = {
        width: float(np.linalg.norm((part.seen - _cut(part.expected, dim, width))[scope]))
        for width in sorted(widths - {dim})
        if width > dim
    }
    width = min(left, key=lambda one: left[one])
    if not left[width] <= PARTLY * error:
        return
    text = (
        f"heads of {dim} channels are padded to {width}, and what is too much is cut off behind all of them, not "
        "behind each: a head's channels begin later than those that are read as its own"
    )
    guesses = [
        _cut(part.expected, dim, width) if i in wrong else part.expected for i, part in enumerate(site.parts)
    ]
    yield Variant("heads_padded", "context", text, {"width": width}, guesses, 1)


def _cut(x: Array, dim: int, width: int) -> Array:
    """Contexts [T, heads * dim] with each head as wide as that, and of these the first so many channels."""
    heads = x.reshape(len(x), -1, dim)
    padded = np.zeros((*heads.shape[:2], width))
    padded[..., :dim] = heads
    return padded.reshape(len(x), -1)[:, : x.shape[1]]
