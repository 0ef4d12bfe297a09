"""Levels 5 and 6: the first operation with equal inputs and other bits, and whether the passes' shapes explain it.

A product of many rows and of one are two kernels on most machines, and two numbers of ranks two orders of a sum: the
bits of right engines depend on the batch, the chunk and the number of ranks (He et al. 2025, "Defeating Nondeterminism
in LLM Inference").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.sessions.metrics import coarser
from lockstep.sessions.text import clean
from lockstep.workbench.diagnosis.diagnose import Explanation
from lockstep.workbench.diagnosis.mismatch.level import ROLLOUT, TRAINER, Level
from lockstep.workbench.diagnosis.mismatch.weights import are_others
from lockstep.workbench.diagnosis.operations.facts import UNIT
from lockstep.workbench.diagnosis.row_comparison import RowComparison, TapRows
from lockstep.workbench.diagnosis.row_sides import Kind, RowSide, paired
from lockstep.workbench.words.plain_text import plural

#: Roundings of the result, in the norm, by which two right kernels may differ.
ROUNDINGS = 4.0


@dataclass(frozen=True, slots=True)
class Shapes:
    """The rows of one tap by the shape of the passes that computed them: of `same` rows in passes of as many rows on
    both sides `same_unequal` differ, of `other` rows in passes of another number `other_unequal`."""

    same: int
    same_unequal: int
    other: int
    other_unequal: int


def compare_operations(
    a: RowSide,
    b: RowSide,
    rows: RowComparison,
    explained: Mapping[str, Explanation],
    roundings: tuple[str, ...] = (),
) -> tuple[Level, Level]:
    """The levels "operation" and "shape". `roundings` state where one side rounds in another order than the other."""
    if not rows.taps:
        text = "no tap was recorded on both sides"
        return Level("operation", "unknown", text), Level("shape", "unknown", text)
    causes = tuple(
        f"{name}: {clean(cause.in_words())}"
        for name, side in ((ROLLOUT, a), (TRAINER, b))
        if name in explained and not are_others(side, explained[name])
        for cause in explained[name].causes
    )
    one = rows.first
    if one is None or not rows.differing:
        return _equal(rows, causes)
    size = _size(a, b, one)
    within = size is not None and size <= ROUNDINGS
    reasons = list(_reasons(a, b, one))
    text = _in_words(one, size)
    if not within or causes:
        unasked = "not asked: an operation differs by more than rounding"
        # What is wrong by the checkpoint comes first: the first difference may be no more than rounding.
        stated = (*causes, text, *roundings)
        return Level("operation", "differs", stated[0], stated[1:]), Level("shape", "unknown", unasked)
    same = Level("shape", "equal", "the passes have the same shapes")
    if roundings:  # which no shape explains
        unasked = f"not asked: an operation rounds in another order; {'; '.join(reasons)}"
        return Level("operation", "differs", text, roundings), (
            Level("shape", "unknown", unasked) if reasons else same
        )
    if not reasons:
        return Level("operation", "differs", text), same
    equal = Level("operation", "equal", f"no operation differs by more than rounding; {text}")
    return equal, Level("shape", "differs", reasons[0], tuple(reasons[1:]))


def _equal(rows: RowComparison, causes: tuple[str, ...]) -> tuple[Level, Level]:
    if rows.by_statistics_alone:
        text = "the statistics of every tap are the same, which proves nothing"
        return Level("operation", "unknown", text, causes), Level("shape", "unknown", text)
    text = f"{plural(len(rows.taps), 'tap')} of {plural(rows.rows, 'row')} are equal bit for bit"
    return Level("operation", "equal", text, causes), Level("shape", "equal", "nothing differs by it")


def _size(a: RowSide, b: RowSide, one: TapRows) -> float | None:
    """The difference in roundings; None where there are only hashes or statistics."""
    if one.metrics is None:
        return None
    dtype = coarser(*(side.session.meta.config.dtype or "float32" for side in (a, b)))
    return one.metrics.rel_l2 / UNIT.get(dtype, UNIT["float32"])


def _in_words(one: TapRows, size: float | None) -> str:
    where = one.first_own or one.first
    place = "" if where is None else f", first at sequence {where[0]}, position {where[1]}"
    tap, rows = clean(one.tap, limit=80), plural(one.rows, "row")
    text = f"{tap} has equal inputs and another output in {one.own} of {rows}{place}"
    return text if size is None else f"{text}: off by {size:.2g} roundings"


def _reasons(a: RowSide, b: RowSide, one: TapRows) -> Iterator[str]:
    """What of the way in which both ran explains other bits."""
    first, second = a.session.meta.config.dtype, b.session.meta.config.dtype
    if first != second and first and second:
        yield f"the rollout computes in {clean(first)}, the trainer in {clean(second)}"
    if a.session.ranks != b.session.ranks:
        yield (
            f"the rollout has {plural(a.session.ranks, 'rank')}, the trainer {b.session.ranks}: sums are "
            "added up in another order"
        )
    shapes = shapes_of(a, b, one.tap)
    if shapes.other_unequal and not shapes.same_unequal:
        rest = f", none of {shapes.same} in passes of the same number" if shapes.same else ""
        yield (
            f"{shapes.other_unequal} of {shapes.other} rows differ that were computed in passes of another number of "
            f"rows{rest}: the bits of {clean(one.tap, limit=80)} depend on how many rows a pass has"
        )


def shapes_of(a: RowSide, b: RowSide, tap: str) -> Shapes:
    """Of the rows that both recorded in one kind."""
    both, counts = a.kinds(tap) & b.kinds(tap), {True: [0, 0], False: [0, 0]}
    if not both & {"tensor", "hashes"}:
        return Shapes(0, 0, 0, 0)
    kind: Kind = "tensor" if "tensor" in both else "hashes"
    for seq, other, positions in paired(a, b):
        mine, theirs = a.rows(tap, kind, seq, positions), b.rows(tap, kind, other, positions)
        for position in mine.keys() & theirs.keys():
            same = a.sequences[seq][position].count == b.sequences[other][position].count
            counts[same][0] += 1
            counts[same][1] += not np.array_equal(mine[position], theirs[position])
    return Shapes(*counts[True], *counts[False])
