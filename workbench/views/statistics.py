"""The statistics of a session as a table: a row for each step, tap and rank, with checksum and verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.errors import RequestError
from lockstep.engine.taps.names import matches
from lockstep.sessions import STATISTICS, Session, Tap
from lockstep.workbench.views.verdicts import Judged, verdicts_at
from lockstep.workbench.words.plain_text import one_line

COLUMNS = ("branch", "step", "tap", "layout", "rank", *STATISTICS, "checksum", "verdict", "rel_l2")

#: More rows than this are no table that anybody opens.
MOST_ROWS = 2_000_000


def counted(values: NDArray[np.floating]) -> int:
    """The sum of statistics that are counts. What is no number, in a stranger's session, counts nothing."""
    return int(values[np.isfinite(values)].astype(np.float64).sum())


def select(session: Session, globs: Sequence[str]) -> list[Tap]:
    """The taps that the globs select (none given: all). RequestError for a glob that selects none."""
    for glob in globs:
        if not any(matches(tap.name, [glob]) for tap in session.taps):
            names = ", ".join(one_line(tap.name, 40) for tap in session.taps[:3])
            raise RequestError(
                f"no tap matches {one_line(glob, 80)!r}: {one_line(session.path.name, 60)} has {names}, …"
            )
    return [t for t in session.taps if not globs or matches(t.name, globs)]


def rows(
    session: Session, branch: int, steps: Sequence[int], taps: Sequence[Tap]
) -> Iterator[tuple[object, ...]]:
    """The rows of `COLUMNS`, steps outermost. A step without statistics gives none."""
    name = next(one_line(line.name) for line in session.branches() if line.id == branch)
    for step in steps:
        stats, sums = session.stats(step, branch), session.checksums(step, branch)
        if stats is None:
            continue
        verdicts = {one.tap: one for one in verdicts_at(session, branch, step)}
        for tap in taps:
            verdict = verdicts.get(tap.name)
            error = None if verdict is None else Judged.of(verdict).rel_l2
            for rank in range(session.ranks):
                checksum = "" if sums is None else f"{int(sums[tap.index, rank]):016x}"
                yield (
                    name, step, tap.name, tap.layout, rank, *map(float, stats[tap.index, rank]),
                    checksum, None if verdict is None else verdict.verdict, error,
                )  # fmt: skip
