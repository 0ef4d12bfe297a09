"""Statistics over the steps: the chosen taps' history on every rank, and where they stand now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.taps.names import local_name, matches
from lockstep.sessions import STATISTICS, Session, Tap
from lockstep.workbench.views.operations import agreement
from lockstep.workbench.views.statistics import counted
from lockstep.workbench.words.plain_text import one_line

#: What the line shows: NaN and Inf make it break off, which is then marked.
STATISTIC = "rms"


@dataclass(frozen=True, slots=True, eq=False)
class TapSeries:
    """One tap's STATISTIC. `values[ranks, points]` are the largest of each bin of steps; `now[rank]` is at the
    step in focus; `broken` marks points where a NaN or Inf was counted; `agree`: see `agreement`."""

    tap: str
    layout: str
    steps: tuple[int, int]
    values: NDArray[np.float32]
    broken: NDArray[np.bool_]
    now: tuple[float | None, ...]
    not_finite: tuple[int, ...]  # elements of the step in focus that are NaN or Inf, by rank
    agree: bool | None


def choose(session: Session, globs: Sequence[str], also: Sequence[str], limit: int) -> tuple[list[Tap], int]:
    """The taps that the globs select (none given: the first divergence, some residuals, the logits), in execution
    order, and how many were left out."""
    if globs:
        found = [tap for tap in session.taps if matches(tap.name, globs)]
        return found[:limit], max(0, len(found) - limit)
    residuals = [tap for tap in session.taps if local_name(tap.name) == "mlp_residual"]
    picked = {residuals[i * (len(residuals) - 1) // 2].name for i in range(3)} if residuals else set()
    wanted = {"embed", "final_norm", "logits", *also, *picked}
    found = [tap for tap in session.taps if tap.name in wanted]
    return (found or list(session.taps))[:limit], 0


def history(session: Session, tap: Tap, branch: int, step: int | None, points: int) -> TapSeries:
    """One tap over all steps of a branch that have statistics."""
    values, broken = [], []
    steps: NDArray[np.int64] = np.empty(0, np.int64)
    for rank in range(session.ranks):
        steps, seen = session.series(tap.name, STATISTIC, rank, branch)
        bad = np.zeros(len(steps), bool)
        for statistic in ("nan", "inf"):
            bad |= session.series(tap.name, statistic, rank, branch)[1] > 0
        values.append(_binned(np.where(np.isfinite(seen), seen, np.nan), points))
        broken.append(_binned(bad, points))
    now, not_finite, agree = _present(session, tap, branch, step)
    return TapSeries(
        one_line(tap.name, 100),
        one_line(tap.layout, 40),
        (int(steps[0]), int(steps[-1])) if len(steps) else (0, 0),
        np.stack(values).astype(np.float32),
        np.stack(broken).astype(bool),
        now,
        not_finite,
        agree,
    )


def _binned(values: NDArray[np.float32] | NDArray[np.bool_], points: int) -> NDArray[np.float32]:
    """At most `points` values, the largest of each bin; NaN only where a bin holds nothing else."""
    if len(values) <= points:
        return values.astype(np.float32)
    starts = np.arange(points) * len(values) // points
    return np.fmax.reduceat(values.astype(np.float32), starts)


def _present(
    session: Session, tap: Tap, branch: int, step: int | None
) -> tuple[tuple[float | None, ...], tuple[int, ...], bool | None]:
    """The statistic, the count of NaN and Inf on each rank, and whether replicas agree, at one step."""
    stats = None if step is None else session.stats(step, branch)
    sums = None if step is None else session.checksums(step, branch)
    agree = agreement(session, sums)[tap.index]
    if stats is None:
        return (None,) * session.ranks, (0,) * session.ranks, agree
    row = stats[tap.index]
    bad = tuple(map(counted, row[:, [STATISTICS.index("nan"), STATISTICS.index("inf")]]))
    return tuple(float(x) for x in row[:, STATISTICS.index(STATISTIC)]), bad, agree
