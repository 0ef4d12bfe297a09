"""Ours less theirs, element by element: what infinity, NaN and a hidden key mean in a difference."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.taps.names import local_name

#: In these -inf is no value but a key that the mask hides. A probability of a hidden key is 0.
_SCORES, _PROBS = "attn.scores", "attn.probs"


def hides(tap: str) -> bool:
    """Whether -inf in the tap's tensor is a key that the mask hides."""
    return local_name(tap) in (_SCORES, _PROBS)


def less(ours: NDArray[np.float32], theirs: NDArray[np.float32], tap: str) -> NDArray[np.float32]:
    """The difference of two tensors of one shape: equal infinities, and NaN on both sides, differ by 0.

    Where a mask hides keys, -inf is a key that both sides hide and +inf a score that one side alone hides; a
    probability that one side hides is 0 there.
    """
    left, right = np.isneginf(ours), np.isneginf(theirs)
    if local_name(tap) == _PROBS:
        ours, theirs = np.where(left, np.float32(0), ours), np.where(right, np.float32(0), theirs)
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    with np.errstate(invalid="ignore"):
        difference: NDArray[np.float32] = np.where(same, np.float32(0), ours - theirs)
    if hides(tap):
        difference[left & right] = -np.inf
    if local_name(tap) == _SCORES:
        difference[left != right] = np.inf
    return difference


def hidden_by_one(ours: NDArray[np.float32], theirs: NDArray[np.float32], tap: str) -> tuple[int, int]:
    """How many scores ours hides and theirs does not, and the other way round."""
    if local_name(tap) != _SCORES:
        return 0, 0
    left, right = np.isneginf(ours), np.isneginf(theirs)
    return int(np.count_nonzero(left & ~right)), int(np.count_nonzero(right & ~left))
