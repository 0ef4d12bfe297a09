"""Blocks of keys that attention leaves out since their scores are small, as sparse kernels do by a threshold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.attention.tree import softmax
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Keys of a block that are tried, the largest first.
_BLOCKS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
#: A probability that is right at so many times its rounding is not zero by rounding.
_SURE = 4.0


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Of all rows and heads: which blocks are left out, and how far the largest score of each is below the row's."""

    size: int
    left_out: NDArray[np.bool_]
    below: Array

    @property
    def threshold(self) -> tuple[float, float] | None:
        """Between which distances the threshold lies; None where no threshold explains which are left out."""
        kept, gone = self.below[~self.left_out], self.below[self.left_out]
        highest, lowest = float(kept.max(initial=0.0)), float(gone.min(initial=np.inf))
        return (highest, lowest) if highest < lowest else None


def skipped_blocks(site: Site) -> Iterator[Variant]:
    """Probabilities that are zero in whole blocks of keys, and those of the others normalised without them."""
    assert site.deviation is not None, "banks are asked where something is wrong"
    if not all(part.fits for part in site.parts):
        return
    scopes = site.deviation.scopes
    gone = [
        scope & (part.seen == 0) & (part.expected > _SURE * part.noise)
        for part, scope in zip(site.parts, scopes, strict=True)
    ]
    if not any(each.any() for each in gone):
        return
    fitting = [one for size in _BLOCKS if (one := _in_blocks(site, gone, size)) is not None]
    if not fitting:
        return
    found = next((one for one in fitting if one.threshold), fitting[0])
    size, between = found.size, found.threshold
    what = f"blocks of {size} keys" if size > 1 else "keys"
    text = f"{what} are left out of the softmax, {int(found.left_out.sum())} in all rows and heads"
    if between is not None:
        largest = "largest score" if size > 1 else "score"
        text = (
            f"{what} whose {largest} lies too far below the row's are left out of the softmax, from a threshold "
            f"between {between[0]:.3g} and {between[1]:.3g} on, as sparse kernels have"
        )
    guesses = [
        softmax(np.where(each, -np.inf, part.inputs["scores"]))
        for part, each in zip(site.parts, gone, strict=True)
    ]
    noises = [
        part.noise
        * np.maximum(1.0, np.divide(guess, part.expected, out=np.ones_like(guess), where=part.expected > 0))
        for part, guess in zip(site.parts, guesses, strict=True)
    ]
    free = 1 if between is not None else int(found.left_out.sum())
    yield Variant("softmax_skipped", "softmax", text, {"block": size}, guesses, free, noise=noises)


def _in_blocks(site: Site, gone: list[NDArray[np.bool_]], size: int) -> _Blocks | None:
    """What is left out in blocks counted from the first key; None where one is left out in part, or is all there is."""
    flags, distances = [], []
    for part, each in zip(site.parts, gone, strict=True):
        scores = part.inputs["scores"]
        if scores.shape[-1] <= size and each.any():
            return None
        starts = np.arange(0, scores.shape[-1], size)
        out = np.add.reduceat(each, starts, axis=-1)
        there = np.add.reduceat(np.isfinite(scores) & (part.expected > _SURE * part.noise), starts, axis=-1)
        if ((out > 0) & (out < there)).any():
            return None
        rows = each.any(-1, keepdims=True) & (there > 0)
        highest = np.maximum.reduceat(scores, starts, axis=-1)
        flags.append((out > 0)[rows])
        with np.errstate(invalid="ignore"):
            distances.append((scores.max(-1, keepdims=True) - highest)[rows])
    return _Blocks(size, np.concatenate(flags), np.concatenate(distances))
