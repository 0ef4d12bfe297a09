"""Level 4: the same experts for the same tokens. About a tenth of the rows differ between two right engines in 16 bits,
for their scores are closer than one rounding; what follows differs by far more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lockstep.engine.taps.names import layer_of, local_name
from lockstep.workbench.diagnosis.mismatch.level import Level
from lockstep.workbench.diagnosis.row_sides import RowSide, paired
from lockstep.workbench.words.plain_text import plural

CHOSEN, SCORES = "mlp.topk_ids", "mlp.router"


@dataclass(frozen=True, slots=True)
class OtherExperts:
    """A row that went to other experts. `margin` is the distance of the scores of the last chosen and the first that
    was not, on the rollout's side; `moved` how far the scores of the two sides are apart; None where not recorded."""

    layer: int
    seq: int
    position: int
    margin: float | None
    moved: float | None

    @property
    def by_rounding(self) -> bool:
        """Whether the scores had to move no further than they did."""
        return self.margin is not None and self.moved is not None and self.margin <= 2 * self.moved


def compare_routing(a: RowSide, b: RowSide) -> Level:
    """Every router that both recorded."""
    theirs = set(b.taps)
    taps = [tap for tap in a.taps if local_name(tap) == CHOSEN and tap in theirs]
    if not taps:
        return Level(
            "routing", "equal", "no router was recorded: the model is dense, or its taps were left out"
        )
    found, count = [], 0
    for tap in taps:
        rows = list(_rows(a, b, tap))
        count += len(rows)
        found += [one for one in rows if one is not None]
    if not found:
        return Level(
            "routing", "equal", f"the same experts in {plural(count, 'row')} of {plural(len(taps), 'router')}"
        )
    first = min(found, key=lambda one: (one.position, one.seq, one.layer))
    close = sum(one.by_rounding for one in found)
    text = (
        f"other experts in {len(found)} of {plural(count, 'row')}, first in layer {first.layer} at sequence "
        f"{first.seq}, position {first.position}"
    )
    details = [f"{close} of them by scores that are no further apart than the two sides'"]
    return Level("routing", "differs", text, tuple(details))


def _rows(a: RowSide, b: RowSide, tap: str) -> Iterator[OtherExperts | None]:
    """None for a row that went to the same experts."""
    layer = layer_of(tap) or 0
    router = tap.replace(CHOSEN, SCORES)
    for seq, other, positions in paired(a, b):
        mine, theirs = a.rows(tap, "tensor", seq, positions), b.rows(tap, "tensor", other, positions)
        scores = a.rows(router, "tensor", seq, positions), b.rows(router, "tensor", other, positions)
        for position in positions:
            if position not in mine or position not in theirs:
                continue
            chosen, others = (np.sort(side[position], axis=None) for side in (mine, theirs))
            if np.array_equal(chosen, others):
                yield None
                continue
            margin = moved = None
            if all(position in side for side in scores):
                left, right = (side[position].astype(np.float64).reshape(-1) for side in scores)
                ranked = np.sort(left)[::-1]
                k = chosen.size
                margin = float(ranked[k - 1] - ranked[k]) if k < ranked.size else None
                moved = float(np.abs(left - right).max()) if left.shape == right.shape else None
            yield OtherExperts(layer, seq, position, margin, moved)
