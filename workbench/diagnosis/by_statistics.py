"""What statistics alone tell of a run: the first tap whose extremes or size leave the reference's by far.

That is where something shows, not where it is wrong: an error that keeps both is not seen before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sessions.records import STATISTICS
from workbench.diagnosis.recording import Array, Recording
from workbench.views.moved import ROUNDING

#: Times what rounding, or the reference itself at that dtype, moves a statistic: less is not told.
FAR = 10.0
_MIN, _MAX, _RMS, _NAN, _INF = (STATISTICS.index(name) for name in ("min", "max", "rms", "nan", "inf"))
_NAMES = ("min", "max", "rms")


@dataclass(frozen=True, slots=True)
class MovedTap:
    """A tap whose statistic `name` is far from what it should be, at one step."""

    tap: str
    step: int
    name: str
    seen: float
    right: float

    def in_words(self) -> str:
        return (
            f"by its statistics the run first leaves the reference at {self.tap}, step {self.step}: {self.name} "
            f"{self.seen:.4g} instead of {self.right:.4g}; what statistics do not show may be wrong before"
        )


def first_moved(engine: Recording, golden: Recording, floor: Recording | None = None) -> MovedTap | None:
    """The first tap of the first step that is far off, over all ranks and sequences; None where none is. `floor`: the
    reference at the engine's dtype."""
    for step in engine.steps:
        table = engine.session.stats(step, engine.branch)
        if table is None or step not in golden.steps:
            continue
        seqs = sorted(engine.sequences(step))
        for tap in engine.session.taps:
            seen = table[tap.index].astype(np.float64)
            if not golden.has_tap(tap.name) or tap.name.endswith(".partial") or np.isnan(seen).all():
                continue
            right = _of(golden, tap.name, step, seqs)
            if right is None:
                continue
            near = None if floor is None else _of(floor, tap.name, step, seqs)
            # A vocabulary need not divide by the ranks: their mean square is not that of the whole.
            names = _NAMES[:2] if tap.name == "logits" and len(seen) > 1 else _NAMES
            # A vocabulary need not divide by the ranks: their mean square is not that of the whole.
            names = _NAMES[:2] if tap.name == "logits" and len(seen) > 1 else _NAMES
            rounding = ROUNDING.get(engine.dtype, ROUNDING["float32"])
            moved = _moved(seen, right, near, rounding, names)
            if moved is not None:
                return MovedTap(tap.name, step, *moved)
    return None


def _of(side: Recording, tap: str, step: int, seqs: list[int]) -> Array | None:
    """All numbers of a tap in a step."""
    whole = [side.whole_or_none(tap, step, seq) for seq in seqs]
    found = [x.reshape(-1) for x in whole if x is not None]
    return np.concatenate(found) if found and len(found) == len(seqs) else None


def _moved(
    seen: Array, right: Array, near: Array | None, rounding: float, names: Sequence[str]
) -> tuple[str, float, float] | None:
    """The statistic [ranks, STATISTICS] that is furthest off, with what it should be. Ranks hold all of the tensor, or
    parts of it that are alike: extremes and the mean square are those of all of them together."""
    odd = float(np.nansum(seen[:, [_NAN, _INF]]))
    if odd and np.isfinite(right).all():
        return "NaN and infinities", odd, 0.0
    ours = np.array(
        [np.nanmin(seen[:, _MIN]), np.nanmax(seen[:, _MAX]), math.sqrt(np.nanmean(seen[:, _RMS] ** 2))]
    )
    truth, other = _figures(right), None if near is None else _figures(near)
    size = float(np.abs(truth).max())
    noise = 0.0 if other is None else float(np.abs(other - truth).max())
    apart = np.abs(ours - truth)[: len(names)]
    if not np.isfinite(apart).all() or apart.max() <= FAR * max(noise, rounding * size):
        return None
    worst = int(apart.argmax())
    return names[worst], float(ours[worst]), float(truth[worst])


def _figures(x: Array) -> Array:
    finite = x[np.isfinite(x)]
    if not finite.size:
        return np.zeros(3)
    return np.array([finite.min(), finite.max(), math.sqrt(float(np.mean(finite**2)))])
