"""Two runs of one command: whether they read the same tokens, and whether what both recorded is equal bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.sessions import Session
from lockstep.workbench.diagnosis.row_comparison import Place, compare_rows
from lockstep.workbench.diagnosis.row_sides import RowSide
from lockstep.workbench.words.plain_text import plural


@dataclass(frozen=True, slots=True)
class SameRun:
    """`rows` tokens were read in both of the first's `of`; at `parted` a sequence goes on with another token, `alone`
    sequences of the first are in the second from no token on. Of the `taps` that both recorded `differing` are not
    equal. `sampled`: the first chose tokens that were not its likeliest."""

    rows: int
    of: int
    parted: tuple[Place, ...]
    alone: int
    taps: int
    differing: int
    sampled: bool

    @property
    def other_tokens(self) -> str:
        """How their tokens differ; "" where they do not, as far as both went."""
        reported = [
            f"sequence {seq} goes on with another token at position {at}" for seq, at in self.parted[:1]
        ]
        if self.alone:
            reported.append(f"{plural(self.alone, 'sequence')} of the first run did not come again")
        if reported and self.sampled:
            reported.append("tokens are sampled: decode greedily (temperature 0)")
        return "; ".join(reported)

    def in_words(self) -> str:
        """For people."""
        if self.other_tokens:
            return self.other_tokens
        runs = f"the same tokens in {self.rows} of {plural(self.of, 'row')}"
        if not self.taps:
            return runs
        if not self.differing:
            return f"{runs}, and the same bits in all {plural(self.taps, 'tap')} that both runs kept"
        return f"{runs}, but other bits in {self.differing} of {plural(self.taps, 'tap')}: it does not repeat exactly"


def same_run(first: Session, second: Session) -> SameRun:
    """Hold a run against one of the same command before it."""
    sides = RowSide(first), RowSide(second)
    found = compare_rows(*sides)
    return SameRun(
        found.rows,
        sum(map(len, sides[0].sequences.values())),
        found.parted,
        len(sides[0].sequences) - found.sequences,
        len(found.taps),
        len(found.differing),
        _sampled(first) or _sampled(second),
    )


def _sampled(run: Session) -> bool:
    return any(
        one.emitted is not None and len(one.topk_ids) > 0 and one.emitted != one.topk_ids[0]
        for step in run.steps()
        for one in run.step(step).sequences
    )
