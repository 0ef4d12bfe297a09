"""One step of two sides tap by tap: what differs beyond rounding first, in execution order, then the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lockstep.sessions.diff import Diff, TapDiff, diff
from lockstep.sessions.errors import SessionError
from lockstep.sessions.records import STATISTICS
from lockstep.sessions.text import clean
from lockstep.workbench.views.moved import ROUNDING, MovedStatistic, most_moved
from lockstep.workbench.views.sides import GOLDEN, Other, Sides, sides
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.verdicts import WRONG_ABOVE, Judged, judged_at
from lockstep.workbench.views.where import Where
from lockstep.workbench.words.numbers import number

#: In the order of the rows. "bits": the checksums differ and no statistic does by more than rounding: only the tensors
#: could distinguish rounding from another order of the same values. "unknown": nothing could be compared.
Difference = Literal["beyond", "bits", "rounding", "equal", "unknown"]
_ORDER: tuple[Difference, ...] = ("beyond", "bits", "rounding", "equal", "unknown")

_RMS = STATISTICS.index("rms")


@dataclass(frozen=True, slots=True)
class ComparedTap:
    """One tap on both sides. `statistic` is the one that has moved most, with its value on either side (None: not
    recorded there); `rel_l2` and `max_abs` are of the tensors where both are there, or as a judge recorded them."""

    tap: int
    name: str
    difference: Difference
    statistic: str
    rank: int | None
    ours: float | None
    theirs: float | None
    rel_l2: float | None = None
    max_abs: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """One step of both sides. `why_not`: why nothing can be compared; the statistics stand beside each other all the
    same. `rows` are sorted by what differs, `first` is the first tap that differs beyond rounding: beyond WRONG_ABOVE
    times the noise floor where one was measured (of `floored` taps), else beyond the fixed `tolerance`."""

    step: int
    names: tuple[str, str]
    why_not: str
    rows: tuple[ComparedTap, ...]
    first: int | None
    floored: int
    tolerance: float

    @property
    def rounding(self) -> str:
        """What counts as rounding, in words; "" where nothing is compared."""
        if self.why_not:
            return ""
        fixed = f"a fixed {number(self.tolerance)}"
        if not self.floored:
            return f"rounding: {fixed}; `golden` would measure the noise floor"
        rest = f" (where none, {fixed})" if self.floored < len(self.rows) else ""
        return f"rounding: {WRONG_ABOVE:g} × the noise floor golden measured{rest}"

    def count(self, difference: Difference) -> int:
        """How many taps differ so."""
        return sum(row.difference == difference for row in self.rows)

    @property
    def headline(self) -> str:
        """The comparison in a sentence."""
        if self.why_not:
            return self.why_not
        compared = len(self.rows) - self.count("unknown")
        if not compared:
            return "nothing could be compared: neither tensors nor checksums are on both sides"
        beyond = self.count("beyond")
        if self.first is None:
            bits = self.count("bits")
            rest = f"; {bits} differ in bits, and no statistic shows how" if bits else ""
            return f"none of {compared} operations differs beyond rounding{rest}"
        name = next(row.name for row in self.rows if row.tap == self.first)
        return f"{beyond} of {compared} operations differ beyond rounding, the first: {name}"


def compared_step(
    source: SessionSource, where: Where, other: Other, parted: int | None = None
) -> ComparedStep:
    """Every tap of the step at `where` and on the other side."""
    both = sides(source, where, other, parted)
    compared = {} if both.why_not else _diffs(both)
    ours = {one.tap: one for one in judged_at(source.session, where.branch, where.step)}
    judged = ours if other == GOLDEN else {}
    floors = _floors(list(ours.values()))
    if other != GOLDEN and not both.lacks_step:
        floors = _floors(judged_at(source.session, other, where.step)) | floors
    tolerance = ROUNDING.get(source.meta.config.dtype, ROUNDING["float32"])
    rows = [
        _row(
            both, tap, compared, judged, WRONG_ABOVE * floors[info.name] if info.name in floors else tolerance
        )
        for tap, info in enumerate(source.session.taps)
    ]
    rows.sort(key=lambda row: (_ORDER.index(row.difference), row.tap))
    first = rows[0].tap if rows and rows[0].difference == "beyond" else None
    return ComparedStep(where.step, both.names, both.why_not, tuple(rows), first, len(floors), tolerance)


def _floors(judged: Sequence[Judged]) -> dict[str, float]:
    """The relative L2 error that each tap's dtype alone made, where that was measured."""
    return {one.tap: one.floor for one in judged if one.floor is not None and 0 < one.floor < np.inf}


def _diffs(both: Sides) -> dict[str, TapDiff | str]:
    """What the one comparison reports of each tap: a difference, or why there is none."""
    ours, theirs, step = both.ours.session, both.theirs.session, both.here.step
    try:
        found: Diff = diff(
            ours, theirs, branch_a=both.here.branch, branch_b=both.there.branch, steps=[step], seqs=[both.here.seq]
        )  # fmt: skip
        absent = {one.tap: one.reason for one in found.absent if not theirs.has_tap(one.tap)}
        return {**absent, **{one.tap.name: one for one in found}}
    except SessionError as error:
        return {tap.name: clean(str(error), limit=200) for tap in ours.taps}


def _row(
    both: Sides,
    tap: int,
    compared: Mapping[str, TapDiff | str],
    judged: Mapping[str, Judged],
    rounding: float,
) -> ComparedTap:
    """One tap: as the one comparison has it, else as a judge recorded it, else with what there is on either side.
    `rounding`: the relative L2 error that is no more than that."""
    name = both.ours.session.taps[tap].name
    moved, ours = _statistic(both, tap, name)
    row = ComparedTap(tap, clean(name, limit=120), "unknown", "rms", None, ours, None)
    if moved is not None:
        row = replace(row, statistic=moved.name, rank=moved.rank, ours=moved.ours, theirs=moved.theirs)
    one, verdict = compared.get(name), judged.get(name)
    if isinstance(one, TapDiff):
        difference, note = _difference(one, moved, rounding)
        if one.metrics is not None:
            row = replace(row, rel_l2=one.metrics.rel_l2, max_abs=one.metrics.max_abs)
        return replace(row, difference=difference, note=note)
    if verdict is not None and verdict.verdict != "absent":
        difference = "rounding" if verdict.verdict == "pass" else "beyond"
        row = replace(row, rel_l2=verdict.rel_l2, max_abs=verdict.max_abs)
        return replace(row, difference=difference, note=_judged(verdict))
    return replace(row, note="" if both.why_not else one or _lacking(both, name))


def _difference(one: TapDiff, moved: MovedStatistic | None, rounding: float) -> tuple[Difference, str]:
    """Whether a difference is more than rounding, and what there is to report about it."""
    if one.metrics is None:  # checksums only, or tensors that do not fit together
        if one.equal:
            return "equal", ""
        if one.seq is not None:
            return "beyond", clean(one.note, limit=200)
        if moved is not None and moved.share > rounding:
            return "beyond", ""
        return "bits", "same statistics, other bits: only the tensors show how"
    rank = f"rank {one.rank} alone" if one.rank is not None else ""
    shapes = "" if one.metrics.shapes is None else "shapes {} and {}".format(*one.metrics.shapes)
    note = clean("; ".join(filter(None, (rank, shapes, one.note))), limit=200)
    if one.equal:
        return "equal", note
    return ("beyond" if not one.metrics.rel_l2 <= rounding else "rounding"), note


def _judged(verdict: Judged) -> str:
    """A verdict of `golden` in a few words."""
    times = (
        f"{verdict.ratio:.3g} × the noise floor"
        if verdict.ratio is not None and np.isfinite(verdict.ratio)
        else ""
    )
    state = "inherited" if verdict.inherited else verdict.verdict
    return "; ".join(filter(None, (state, times or verdict.reason)))


def _lacking(both: Sides, tap: str) -> str:
    """On which sides there is no tensor of a tap, where checksums cannot be compared either."""
    sessions = ((both.ours, both.here), (both.theirs, both.there))
    lacks = [
        name
        for name, (source, at) in zip(both.names, sessions, strict=True)
        if not any(
            key.tap == tap and key.seq == at.seq for key in source.session.captured(at.step, at.branch)
        )
    ]
    return f"no tensor of it in {' nor in '.join(lacks)}"


def _statistic(both: Sides, tap: int, name: str) -> tuple[MovedStatistic | None, float | None]:
    """The statistic that has moved most; where only one side has any, that one's rms."""
    stats = both.ours.stats(both.here.step, both.here.branch)
    if stats is None:
        return None, None
    theirs = None if both.lacks_step else both.theirs.stats(both.there.step, both.there.branch)
    session = both.theirs.session
    if theirs is None or session.ranks != both.ours.session.ranks or not session.has_tap(name):
        return None, float(stats[tap, 0, _RMS])
    return most_moved(stats[tap], theirs[session.tap(name).index]), None
