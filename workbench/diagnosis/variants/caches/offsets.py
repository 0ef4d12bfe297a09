"""A cache whose integers come back without their zero points, or with the wrong sign."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.blocks import usual_noise
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.caches.caches import what

#: Steps of eight bits in the range of a row: what rounding to them leaves.
_STEPS = 255
#: How near a row's offset is to its smallest number for that to be reported, relative.
_NEAR = 0.02


def cached_offsets(site: Site) -> Iterator[Variant]:
    """The numbers of each wrong row of each head, or those of them that are larger than the rest, are off by one
    number."""
    assert site.deviation is not None, "banks are asked where something is wrong"
    if not all(part.fits and np.isfinite(part.seen).all() for part in site.parts):
        return
    guesses, noises, cells, above, least = [], usual_noise(site), 0, 0, True
    for part, scope, noise in zip(site.parts, site.deviation.scopes, noises, strict=True):
        guess = part.expected.copy()
        for row, head in np.argwhere(np.asarray(scope).any(2)):
            right = part.expected[row, head]
            moved, by = _moved(right, part.seen[row, head] - right)
            guess[row, head] += np.where(moved, by, 0.0)
            span = float(np.ptp(right))
            noise[row, head] = np.maximum(noise[row, head], span / _STEPS)
            cells, above = cells + 1, above + int(not moved.all())
            least = least and abs(by + float(right.min())) <= _NEAR * span
        guesses.append(guess)
    if not cells:
        return
    each = f"of each row of each head of the cached {what(site)}"
    if above > cells // 2:
        text = (
            f"the larger numbers {each} are off by one amount: integers without sign are read as signed ones"
        )
        yield Variant("cache_sign_of_integers", "cache", text, {}, guesses, 2 * cells, noise=noises)
    else:
        text = f"all numbers {each} are off by one amount: zero points of integers are left out, or others are added"
        text += "; the smallest comes back as 0" if least else ""
        yield Variant("cache_zero_points", "cache", text, {"least": least}, guesses, cells, noise=noises)


def _moved(right: Array, error: Array) -> tuple[Array, float]:
    """Which elements, those above a threshold, are off by one number so that least is left, and by which."""
    order = np.argsort(right)
    sorted_error = error[order]
    count = np.arange(len(error), 0, -1)
    sums = np.cumsum(sorted_error[::-1])[::-1]
    gained = sums**2 / count  # of the error's square, by taking the mean off the elements from here on
    start = int(np.argmax(gained))
    moved = np.zeros(len(error), dtype=bool)
    moved[order[start:]] = True
    return moved, float(sums[start] / count[start])
