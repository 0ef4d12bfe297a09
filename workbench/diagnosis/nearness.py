"""Which of two low-precision runs is nearer to the truth: where engine and reference differ, neither need be wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.workbench.diagnosis.measure import MeasuredTap

#: Of two errors the larger over the smaller, up to which they are about as large, and equal.
ABOUT, EQUAL = 3.0, 1.05


def nearer(measured: Sequence[MeasuredTap], reference: str, dtype: str) -> str:
    """How far the engine's logits and those of the reference at the engine's dtype are from the truth, in words; ""
    where that is not known, or one of the two is much further off."""
    pairs = [
        (one.engine.metrics.rel_l2, one.noise.rel_l2)
        for one in measured
        if one.tap == "logits" and one.noise is not None and one.engine.metrics is not None
    ]
    if not pairs or not all(math.isfinite(error) for pair in pairs for error in pair):
        return ""
    ours, theirs = (
        math.sqrt(sum(error**2 for error in side) / len(pairs)) for side in zip(*pairs, strict=True)
    )
    if not min(ours, theirs) > 0 or max(ours, theirs) > ABOUT * min(ours, theirs):
        return ""
    who = f"{reference} in {dtype}"
    reported = f"the logits of the engine are {ours:.2g} (relative) from float64, those of {who} {theirs:.2g}"
    if max(ours, theirs) <= EQUAL * min(ours, theirs):
        return f"{reported}: both are as near"
    return f"{reported}: {'the engine' if ours < theirs else who} is nearer"
