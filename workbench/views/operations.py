"""Every tap of one step: statistics on each rank, agreement between ranks, verdict, the recent past."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.records import STATISTICS, StepInFlight
from lockstep.sessions.session import Session
from lockstep.workbench.views.sentinels import not_finite
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.verdicts import Judged, judged_at
from lockstep.workbench.views.where import Where

_MARKS = {None: "", True: "=", False: "≠"}
NAN, INF = STATISTICS.index("nan"), STATISTICS.index("inf")


@dataclass(frozen=True, slots=True, eq=False)
class Operations:
    """One step. `stats[taps, ranks, 8]`; `agreement[taps]` is '=' equal where it must be, '≠' not, '' where
    nothing must be equal; `past[steps, taps, ranks, 8]` are the steps before, this one last.

    `passed`: of a step that is under way the last tap that has passed, None for a step that is over. The statistics
    of later taps are those of the step before (NaN where there is none). The statistics are those of all the
    `sequences` of the step.
    """

    step: int
    stats: NDArray[np.float32] | None
    checksums: NDArray[np.uint64] | None
    agreement: tuple[str, ...]
    judged: dict[str, Judged]
    past: NDArray[np.float32] | None
    first_broken: int | None  # the first tap that holds NaN or Inf
    captured: frozenset[str]
    passed: int | None = None
    sequences: int = 1

    def has_passed(self, tap: int) -> bool:
        """Whether what is reported of a tap is of this very step."""
        return self.passed is None or tap <= self.passed

    def past_of(self, tap: int) -> NDArray[np.float32] | None:
        """The tap's statistics [steps, ranks, 8] over the steps that have come to it."""
        if self.past is None:
            return None
        return self.past[:, tap] if self.has_passed(tap) else self.past[:-1, tap]

    def broken(self, tap: int) -> bool:
        """Whether the tap holds NaN or Inf on any rank."""
        return (
            self.stats is not None
            and self.has_passed(tap)
            and bool(not_finite(self.stats[tap : tap + 1]).any())
        )


def operations(source: SessionSource, where: Where, window: int = 24) -> Operations:
    """Every tap at `where`, with a window of past steps that ends there."""
    session = source.session
    flight = source.under_way(where.branch, where.step)
    if flight is not None:
        return _under_way(source, where, window, flight)
    if where.step not in session.steps(where.branch):
        return Operations(where.step, None, None, (), {}, None, None, frozenset())
    stats = source.stats(where.step, where.branch)
    checksums = session.checksums(where.step, where.branch)
    return Operations(
        step=where.step,
        stats=stats,
        checksums=checksums,
        agreement=tuple(_MARKS[one] for one in agreement(session, checksums)),
        judged={one.tap: one for one in judged_at(session, where.branch, where.step)},
        past=_past(source, where, window),
        first_broken=_first_broken(stats),
        captured=captured_taps(source, where),
        sequences=source.width(where.step, where.branch),
    )


def _under_way(source: SessionSource, where: Where, window: int, flight: StepInFlight) -> Operations:
    """A step that has stopped in its middle: what has passed, and the step before for what has not."""
    session, before = source.session, replace(where, step=where.step - 1)
    there = before.step in session.steps(where.branch)
    past = _past(source, before, window - 1) if there else None
    stats = flight.stats
    if stats is not None and there and (older := source.stats(before.step, where.branch)) is not None:
        stats = stats.copy()
        stats[flight.place + 1 :] = older[flight.place + 1 :]
    if past is not None and flight.stats is not None:
        past = np.concatenate([past, flight.stats[None]])
    return Operations(
        step=where.step,
        stats=stats,
        checksums=flight.checksums,
        agreement=tuple(_MARKS[one] for one in agreement(session, flight.checksums)),
        judged={},
        past=past,
        first_broken=_first_broken(flight.stats),
        captured=captured_taps(source, where),
        passed=flight.place,
        sequences=len(flight.sequences),
    )


def captured_taps(source: SessionSource, where: Where) -> frozenset[str]:
    """The taps whose tensors were captured for the sequence."""
    keys = source.session.captured(where.step, where.branch)
    return frozenset(key.tap for key in keys if key.seq == where.seq)


def agreement(session: Session, checksums: NDArray[np.uint64] | None) -> tuple[bool | None, ...]:
    """Whether the ranks that must hold the same bits do, tap by tap; None where nothing must be equal or the tap did
    not run."""
    if checksums is None:
        return (None,) * len(session.taps)
    differ = session.replicas.disagreeing(checksums)
    return tuple(
        None if not groups or not checksums[tap].any() else tap not in differ
        for tap, groups in enumerate(session.replicas.groups)
    )


def _past(source: SessionSource, where: Where, window: int) -> NDArray[np.float32] | None:
    first = max(source.session.steps(where.branch).start, where.step - window + 1)
    past = [source.stats(step, where.branch) for step in range(first, where.step + 1)]
    known = [stats for stats in past if stats is not None]
    return np.stack(known) if known else None


def _first_broken(stats: NDArray[np.float32] | None) -> int | None:
    if stats is None:
        return None
    taps = np.argwhere(not_finite(stats))[:, 0]
    return int(taps[0]) if taps.size else None
