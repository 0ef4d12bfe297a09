"""Two runs side by side: branches, sessions, a session and its golden."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from lockstep.sessions import Session, TapDiff
from lockstep.sessions.diff import diff as compare
from lockstep.sessions.text import clean
from lockstep.workbench.debugger.answers import Result
from lockstep.workbench.debugger.commands.judged_diff import (
    ComparisonTable,
    ComparisonVerdict,
    golden_of,
    judged_diff,
)
from lockstep.workbench.debugger.commands.row_diff import row_diff
from lockstep.workbench.debugger.core.backwards import land
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.golden_reference import golden_session
from lockstep.workbench.debugger.core.registry import Argument, command
from lockstep.workbench.debugger.errors import DebuggerError
from lockstep.workbench.judgements.coverage import coverage
from lockstep.workbench.paths import find_session
from lockstep.workbench.settings import session_limits
from lockstep.workbench.views.moved import most_moved
from lockstep.workbench.words.numbers import scalar
from lockstep.workbench.words.plain_text import plural


@command(
    "diff", arguments=(
        Argument("a", "word", required=True, help="a branch, or a session file"),
        Argument("b", "word", required=True, help="a branch, a session file, or golden"),
    ),
    group="checking", help="two branches, two sessions, or one and its golden, tap by tap",
    details="A tap a row, the first that differs on top, over the steps that read the same tokens. Tensors are compared"
    " where both sides hold them, otherwise checksums, and the statistic that has moved most is shown. The run of"
    " another engine is compared row by row, a row being a token of a sequence at its position.",
)  # fmt: skip
def diff(debugger: Debugger, a: str, b: str) -> Result:
    """What differs, and the first of it."""
    land(debugger)
    with _side(debugger, a) as first, _side(debugger, b) as second:
        golden = golden_of(first[0], second[0])
        if golden is not None:
            engine, branch = first if golden is second[0] else second
            return judged_diff(engine, branch, golden)
        if first[0].meta.foreign is not None or second[0].meta.foreign is not None:
            rows = row_diff(*first, *second)
            if rows is not None:
                return rows
        return compare_sessions(*first, *second)


@dataclass(slots=True)
class _Row:
    """How one tap differs: first at `step`, in how many steps, on which ranks, by how much at worst."""

    step: int
    place: int
    note: str
    steps: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    max_abs: float | None = None
    rel_l2: float | None = None

    def take(self, one: TapDiff) -> None:
        self.steps.add(one.step)
        self.ranks.update(one.differing_ranks if one.rank is None else (one.rank,))
        if one.metrics is not None:
            self.max_abs = float(np.fmax(self.max_abs or 0.0, one.metrics.max_abs))
            self.rel_l2 = float(np.fmax(self.rel_l2 or 0.0, one.metrics.rel_l2))


def compare_sessions(a: Session, branch_a: int, b: Session, branch_b: int) -> ComparisonTable:
    """Taps that differ, the first on top; where the tokens part, the steps before are compared."""
    steps = _common_steps(a, branch_a, b, branch_b)
    found = compare(a, b, branch_a=branch_a, branch_b=branch_b, steps=steps)
    rows: dict[str, _Row] = {}
    seen = set()
    for one in found:
        name = one.tap.name
        seen.add(name)
        if one.equal:
            continue
        if name not in rows:
            note = one.note if one.metrics is not None else _moved(a, branch_a, b, branch_b, one) or one.note
            rows[name] = _Row(one.step, one.tap.index, note)
        rows[name].take(one)
    ordered = sorted(rows.items(), key=lambda item: (item[1].step, item[1].place))
    title = f"{len(rows)} of {plural(len(seen), 'tap')} differ over {plural(len(steps), 'step')} on the same tokens"
    if ordered:
        title += f"; the first: {ordered[0][0]} at step {ordered[0][1].step}"
    if found.absent:
        title += f"; {len(found.absent)} could not be compared ({clean(found.absent[0].reason, limit=80)})"
    table = [
        [
            name,
            row.step,
            len(row.steps),
            _ranks(row.ranks, a.ranks),
            row.max_abs,
            row.rel_l2,
            row.note or None,
        ]
        for name, row in ordered
    ]
    columns = ["tap", "first step", "steps", "ranks", "max abs", "rel l2", "note"]
    rests = None
    verdict: ComparisonVerdict = "diverged" if table else "match"
    if a.meta.foreign is not None or b.meta.foreign is not None:
        rests = coverage(a, b, branch=branch_a, other=branch_b)
        why = rests.misplaced or (rests.lacking if not table else "")
        if why:
            verdict, title = "inconclusive", f"inconclusive: {why}\n{title}"
    return ComparisonTable(title, columns, table, "no difference", verdict, rests)


def _ranks(differing: set[int], count: int) -> str:
    return "all" if len(differing) in (0, count) else ", ".join(map(str, sorted(differing)))


def _moved(a: Session, branch_a: int, b: Session, branch_b: int, one: TapDiff) -> str:
    """Where there are checksums only: how many elements are no longer finite, or the statistic that has moved
    most, measured by the greatest element."""
    ours, theirs = a.stats(one.step, branch_a), b.stats(one.step, branch_b)
    if ours is None or theirs is None or a.ranks != b.ranks:
        return ""
    found = most_moved(ours[one.tap.index], theirs[b.tap(one.tap.name).index])
    if found.share == 0:
        return ""
    on = f" on rank {found.rank}" if a.ranks > 1 else ""
    return f"{found.name} {scalar(found.ours)} → {scalar(found.theirs)}{on}"


def _common_steps(a: Session, branch_a: int, b: Session, branch_b: int) -> list[int]:
    """The steps that both have, as long as they read the same ids."""
    steps = []
    for step in range(min(a.steps(branch_a).stop, b.steps(branch_b).stop)):
        ids = [
            {reported.seq: list(reported.ids) for reported in session.step(step, branch).sequences}
            for session, branch in ((a, branch_a), (b, branch_b))
        ]
        shared = ids[0].keys() & ids[1].keys()
        if not shared or any(ids[0][seq] != ids[1][seq] for seq in shared):
            break
        steps.append(step)
    if not steps:
        raise DebuggerError(
            "the two read different tokens from the first step on: no diff of them means anything"
        )
    return steps


@contextmanager
def _side(debugger: Debugger, name: str) -> Iterator[tuple[Session, int]]:
    """A session and a branch of it, by what the user called it."""
    if name == "golden":
        with golden_session(debugger) as golden:
            yield golden, 0
    elif name.isdigit() or any(line.name == name for line in debugger.timeline.lines.values()):
        debugger.session.refresh()
        yield debugger.session, debugger.timeline.named(name).id
    else:
        path = find_session(name)
        if path.suffix != ".session":
            raise DebuggerError(f"{clean(name, limit=80)!r} is neither a branch nor a .session file")
        with Session.open(path, session_limits()) as session, session.walk():
            yield session, 0
