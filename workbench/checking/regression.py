"""Whether an engine still computes what it did: a fresh recording held against an old one of the same tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lockstep.sessions import Session
from lockstep.workbench.diagnosis.row_comparison import RowComparison, TapRows, compare_rows
from lockstep.workbench.diagnosis.row_sides import RowSide
from lockstep.workbench.judgements.coverage import Coverage, coverage
from lockstep.workbench.views.moved import ROUNDING
from lockstep.workbench.views.verdicts import WRONG_ABOVE
from lockstep.workbench.words.plain_text import plural

RegressionVerdict = Literal["match", "diverged", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Regression:
    """What became of a comparison, and what it rests on. `why`: of a verdict that cannot be given. `tolerance` is that
    of the relative L2 error of a row, 0: bit for bit."""

    verdict: RegressionVerdict
    coverage: Coverage
    comparison: RowComparison
    tolerance: float
    why: str = ""

    @property
    def culprits(self) -> tuple[TapRows, ...]:
        """The operations that differ by themselves; where none is known to, all that differ."""
        own = tuple(one for one in self.comparison.taps if one.own)
        return own or self.comparison.differing


def regression(run: Session, baseline: Session, *, bitwise: bool = False) -> Regression:
    """Hold `run` against `baseline`. Nothing that could not be compared counts as equal: neither a row of the baseline
    that was not computed again, nor rows that are not proved to be the same."""
    dtype = run.meta.config.dtype or "float32"
    tolerance = 0.0 if bitwise else WRONG_ABOVE * ROUNDING.get(dtype, ROUNDING["float32"])
    sides = RowSide(run), RowSide(baseline)
    found = compare_rows(*sides, tolerance)
    rests = coverage(run, baseline)
    reported = Regression("diverged" if found.differing else "match", rests, found, tolerance)
    why = _doubt(reported, sides[1])
    return replace(reported, verdict="inconclusive", why=why) if why else reported


def _doubt(regression: Regression, baseline: RowSide) -> str:
    found, rests = regression.comparison, regression.coverage
    if not found.rows:
        return "no sequence reads the tokens of the baseline: give both runs the same prompts, and decode greedily"
    if rests.misplaced:
        return rests.misplaced
    if found.differing:
        return ""
    wanted = sum(map(len, baseline.sequences.values()))
    if not found.taps:
        return "no tap is in both recordings"
    if found.parted:
        seq, position = found.parted[0]
        return (
            f"sequence {seq} goes on with another token at position {position}, though everything before is "
            "within rounding: a tie, or what chooses tokens has changed"
        )
    if found.rows < wanted:
        return f"only {found.rows} of the baseline's {plural(wanted, 'row')} were computed again"
    if rests.ranks < rests.of_ranks:
        return rests.lacking
    return "statistics only: that they are equal proves nothing" if found.by_statistics_alone else ""
