"""The causal mask: what is added to the scores."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lockstep.engine.faults.fault import Fault

if TYPE_CHECKING:
    from torch import Tensor


def multiplied_mask(allowed: Tensor) -> Tensor:
    """(1 - allowed) * -inf: -inf where masked as intended, and 0 * -inf = NaN where allowed."""
    return (1.0 - allowed.float()) * -math.inf


def no_mask(allowed: Tensor) -> Tensor:
    """Nothing is masked."""
    return allowed.new_zeros(allowed.shape).float()


def added_mask(allowed: Tensor) -> Tensor:
    """The mask's ones and zeros are added to the scores as they are."""
    return allowed.float()


def weak_mask(allowed: Tensor) -> Tensor:
    """Masked scores are lowered by 10 only: small enough to be seen through."""
    return allowed.new_zeros(allowed.shape).float().masked_fill(~allowed, -10.0)


FAULTS = (
    Fault(
        id="additive-mask",
        seam="mask",
        value="additive",
        correct="filled",
        title="additive mask made by multiplying with -inf",
        group="mask",
        level="step",
        first_tap="layers.*.attn.scores",
        symptom="0 * -inf is NaN in every cell the mask allows: all scores of the first layer, then everything",
        patch={"mask": multiplied_mask},
    ),
    Fault(
        id="no-mask",
        seam="mask",
        value="none",
        correct="filled",
        title="attention without a causal mask",
        group="mask",
        level="step",
        first_tap="layers.*.attn.scores",
        symptom="tokens attend to later ones: the prefill is wrong, a decode step only where a window is lost as well",
        source="turboderp/exllama#101",
        patch={"mask": no_mask},
    ),
    Fault(
        id="mask-added",
        seam="mask",
        value="ones",
        correct="filled",
        title="a mask of ones and zeros added to the scores",
        group="mask",
        level="step",
        first_tap="layers.*.attn.scores",
        symptom="allowed scores are one too large, masked ones are hardly lower: tokens attend to later ones",
        patch={"mask": added_mask},
    ),
    Fault(
        id="mask-weak",
        seam="mask",
        value="weak",
        correct="filled",
        title="masked scores lowered by 10 only",
        group="mask",
        level="step",
        first_tap="layers.*.attn.scores",
        symptom="later tokens keep a little weight, the more the larger their scores",
        patch={"mask": weak_mask},
    ),
)
