"""`lockstep.diff`: two recordings, tap by tap."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lockstep.sessions import Session
from lockstep.workbench.debugger.answers import JsonObject
from lockstep.workbench.debugger.commands.diff import compare_sessions
from lockstep.workbench.debugger.commands.judged_diff import (
    ComparisonTable,
    ComparisonVerdict,
    golden_of,
    judged_diff,
)
from lockstep.workbench.debugger.commands.row_diff import row_diff
from lockstep.workbench.judgements.coverage import Coverage
from lockstep.workbench.library import html
from lockstep.workbench.library.reading import RecordedRun
from lockstep.workbench.paths import find_session
from lockstep.workbench.settings import session_limits

#: A recording: its file, its name among the user's sessions, or one that is open.
Recorded = str | Path | RecordedRun


@dataclass(frozen=True, slots=True, repr=False)
class RunDiff:
    """Two recordings compared. True exactly where nothing differs: `assert lockstep.diff(a, b)`."""

    table: ComparisonTable

    def __bool__(self) -> bool:
        return self.matches

    @property
    def verdict(self) -> ComparisonVerdict:
        """ "match", "diverged", or "inconclusive": the recordings do not carry a verdict."""
        return self.table.verdict

    @property
    def matches(self) -> bool:
        """Whether nothing differs, or, against a golden reference, nothing is wrong."""
        return self.verdict == "match"

    @property
    def summary(self) -> str:
        """How many taps differ, which is the first, and why."""
        return self.table.title

    @property
    def columns(self) -> Sequence[str]:
        """What `rows` hold."""
        return self.table.columns

    @property
    def rows(self) -> Sequence[Sequence[object]]:
        """The taps that differ, the first on top."""
        return self.table.rows

    @property
    def coverage(self) -> Coverage | None:
        """What the verdict on another engine's recordings rests on; None for Lockstep's own."""
        return self.table.coverage

    def to_json(self) -> JsonObject:
        """Plain values: what `--json` prints."""
        return self.table.to_json()

    def __str__(self) -> str:
        return self.table.to_text()

    def __repr__(self) -> str:
        return f"<RunDiff {self.verdict}: {'; '.join(self.table.to_text().splitlines()[:2])}>"

    def _repr_html_(self) -> str:
        first, *others = self.summary.splitlines()
        parts = [html.heading(first, self.verdict), *map(html.paragraph, others)]
        if self.coverage is not None:
            parts += map(html.paragraph, [self.coverage.in_words(), *self.coverage.remarks()])
        parts.append(html.table(self.columns, self.rows) if self.rows else html.paragraph(self.table.empty))
        return html.block(*parts)


def diff(a: Recorded, b: Recorded, *, branch_a: int = 0, branch_b: int = 0, bitwise: bool = False) -> RunDiff:
    """Which taps differ, and the first operation that has equal inputs and an unequal output.

    Rows are matched by sequence and position over the tokens that both read. Where one of the two is a golden
    reference, each tap of the other is judged against its noise, unless `bitwise`.

    SessionError where a file cannot be read; DebuggerError where the two have no token in common.
    """
    with ExitStack() as stack:
        first, second = (opened(stack, one) for one in (a, b))
        stack.enter_context(first.walk(second))
        golden = None if bitwise else golden_of(first, second)
        if golden is not None:
            engine, branch = (first, branch_a) if golden is second else (second, branch_b)
            return RunDiff(judged_diff(engine, branch, golden))
        rows = row_diff(first, branch_a, second, branch_b)
        return RunDiff(compare_sessions(first, branch_a, second, branch_b) if rows is None else rows)


def opened(stack: ExitStack, one: Recorded) -> Session:
    if isinstance(one, RecordedRun):
        return one.session
    return stack.enter_context(Session.open(find_session(one), session_limits()))
