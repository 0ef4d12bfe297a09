"""What statistics alone report on a run: the first tap whose extremes or size leave the reference's by far, in some
row.

That is where something shows, not where it is wrong: an error that keeps both is not seen before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.engine.taps.names import local_name
from lockstep.sessions.meta import ROW_STATISTICS
from lockstep.sessions.records import STATISTICS
from lockstep.workbench.diagnosis.recording import Array, Recording
from lockstep.workbench.views.moved import ROUNDING

#: Times what rounding, or the reference itself at that dtype, moves a statistic: less is not reported.
FAR = 10.0
_MIN, _MAX, _RMS, _NAN, _INF = (STATISTICS.index(name) for name in ("min", "max", "rms", "nan", "inf"))
_NAMES = ("min", "max", "rms")
#: Taps whose first axis is not the tokens of a pass.
_OTHER_ROWS = ("attn.k_cache", "attn.v_cache", "attn.scores", "attn.probs")


@dataclass(frozen=True, slots=True)
class MovedTap:
    """A tap whose statistic `name` is far from what it should be, at one step; `row` names its token."""

    tap: str
    step: int
    name: str
    seen: float
    right: float
    row: str = ""

    def in_words(self) -> str:
        return (
            f"by its statistics the run first leaves the reference at {self.tap}, step {self.step}{self.row}: "
            f"{self.name} {self.seen:.4g} instead of {self.right:.4g}; what statistics do not show may be wrong before"
        )


def first_moved(engine: Recording, golden: Recording, floor: Recording | None = None) -> MovedTap | None:
    """The first tap of the first step that is far off in some row, of those that left statistics alone; None where none
    is. `floor`: the reference at the engine's dtype."""
    rounding = ROUNDING.get(engine.dtype, ROUNDING["float32"])
    for step in engine.steps:
        if step not in golden.steps:
            continue
        for tap in engine.session.taps:
            if not golden.has_tap(tap.name) or local_name(tap.name) in _OTHER_ROWS:
                continue
            for rows in _measured(engine, golden, floor, tap.name, step):
                moved = rows.moved(rounding, tap.name)
                if moved is not None:
                    place, name, seen, right = moved
                    return MovedTap(tap.name, step, name, seen, right, place)
    return None


@dataclass(frozen=True, slots=True)
class _MeasuredRows:
    """Rows of one tap: their statistics [rows, ranks, STATISTICS], and what they should be, [rows, elements], at the
    engine's dtype too (`near`), if that is known. `places` state which token each row is."""

    seen: Array
    right: Array
    near: Array | None
    places: Sequence[str]

    def moved(self, rounding: float, tap: str) -> tuple[str, str, float, float] | None:
        """The row that is furthest off: its place, which statistic, and what that is and should be. Ranks hold parts of
        it that are alike: extremes and the mean square are those of all of them together."""
        odd = np.nansum(self.seen[:, :, [_NAN, _INF]], axis=(1, 2))
        if odd.any() and np.isfinite(self.right).all():
            at = int(odd.argmax())
            return self.places[at], "NaN and infinities", float(odd[at]), 0.0
        ours = np.stack(
            [
                self.seen[:, :, _MIN].min(axis=1),
                self.seen[:, :, _MAX].max(axis=1),
                np.sqrt((self.seen[:, :, _RMS] ** 2).mean(axis=1)),
            ],
            axis=1,
        )
        truth = _figures(self.right)
        noise = 0.0 if self.near is None else float(np.abs(_figures(self.near) - truth).max())
        # A vocabulary need not divide by the ranks: their mean square is not that of the whole.
        names = _NAMES[:2] if tap == "logits" and self.seen.shape[1] > 1 else _NAMES
        apart = np.abs(ours - truth)[:, : len(names)]
        if not np.isfinite(apart).all():
            return None
        row, worst = divmod(int(apart.argmax()), apart.shape[1])
        if apart[row, worst] <= FAR * max(noise, rounding * float(np.abs(truth).max())):
            return None
        return self.places[row], names[worst], float(ours[row, worst]), float(truth[row, worst])


def _measured(
    engine: Recording, golden: Recording, floor: Recording | None, tap: str, step: int
) -> Iterator[_MeasuredRows]:
    """All rows of a tap in a step, together; of a replica those of each rank. Nothing where its tensors are there."""
    layout = engine.layout(tap)
    if not (seqs := sorted(engine.sequences(step))):
        return
    right = _of(golden, tap, step, seqs)
    near = None if floor is None else _of(floor, tap, step, seqs)
    if layout.kind == "partial" or right is None:
        return
    by_rank = [
        found for rank in range(engine.ranks) if (found := _rows(engine, tap, rank, step, seqs)) is not None
    ]
    if not by_rank or any(found.shape != by_rank[0].shape for found in by_rank):
        return
    places = [
        f", sequence {seq}, position {at}"
        for seq in seqs
        for at in list(engine.sequences(step)[seq].positions)[-(1 if tap == "logits" else 0) :]
    ]
    if len(by_rank[0]) == 1 < len(places):  # of the pass as a whole
        right, near, places = right.reshape(1, -1), None if near is None else near.reshape(1, -1), [""]
    if not len(by_rank[0]) == len(right) == len(places):
        return
    if layout.kind == "shard":
        yield _MeasuredRows(np.stack(by_rank, axis=1), right, near, places)
        return
    for found in by_rank:
        yield _MeasuredRows(found[:, None], right, near, places)


def _rows(side: Recording, tap: str, rank: int, step: int, seqs: Sequence[int]) -> Array | None:
    """Statistics [rows, STATISTICS] of what one rank had of all sequences; [1, STATISTICS] of a step as a whole. None
    where its tensors are there."""
    by_row = [side.shard(tap + ROW_STATISTICS, rank, step, seq) for seq in seqs]
    if all(found is not None for found in by_row):
        return np.concatenate([found for found in by_row if found is not None])
    table = side.session.stats(step, side.branch)
    if table is None or side.shard(tap, rank, step, seqs[0]) is not None:
        return None
    reported = table[side.session.tap(tap).index, rank].astype(np.float64)
    return None if np.isnan(reported).all() else reported[None]


def _of(side: Recording, tap: str, step: int, seqs: Sequence[int]) -> Array | None:
    """The rows of a tap in a step, of all sequences."""
    whole = [side.whole_or_none(tap, step, seq) for seq in seqs]
    found = [x.reshape(len(x), -1) for x in whole if x is not None]
    return np.concatenate(found) if found and len(found) == len(seqs) else None


def _figures(x: Array) -> Array:
    """Minimum, maximum and root of the mean square of each row's finite numbers."""
    finite = np.isfinite(x)
    count = np.maximum(finite.sum(axis=1), 1)
    low, high = (np.where(finite, x, nothing) for nothing in (np.inf, -np.inf))
    square = np.sqrt((np.where(finite, x, 0.0) ** 2).sum(axis=1) / count)
    found: Array = np.stack([low.min(axis=1), high.max(axis=1), square], axis=1)
    return np.where(np.isfinite(found), found, 0.0)
