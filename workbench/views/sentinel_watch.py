"""Where each sentinel fires on a branch, for the screen: a little at a time, and in the step that is under way."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions import SequenceStep, Session
from lockstep.sessions.text import clean
from lockstep.workbench.views import sentinels
from lockstep.workbench.views.branch_sentinel import BranchSentinel, fired_at, left_golden, why_blind
from lockstep.workbench.views.sentinels import NAMES, TAIL, SentinelFinding, SentinelKind
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.verdicts import judged_of
from lockstep.workbench.views.where import Where

#: Seconds that one question of the screen may take.
_BUDGET = 0.03


@dataclass(frozen=True, slots=True)
class SentinelHistory:
    """Where one sentinel fired: a byte a step, 1 where it did; and every rank that it has named."""

    steps: bytes
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Watch:
    """All sentinels of a branch after `scanned` of `total` steps."""

    sentinels: tuple[BranchSentinel, ...]
    scanned: int
    total: int
    histories: Mapping[SentinelKind, SentinelHistory]


@dataclass(slots=True)
class _Scan:
    next_step: int = 0
    tails: dict[int, list[int]] = field(default_factory=dict)  # by sequence
    fired: dict[SentinelKind, BranchSentinel] = field(default_factory=dict)
    steps: dict[SentinelKind, bytearray] = field(default_factory=dict)
    ranks: dict[SentinelKind, set[int]] = field(default_factory=dict)

    def add(self, kind: SentinelKind, step: int, ranks: Iterable[int]) -> None:
        """It fired at that step."""
        known = self.steps.setdefault(kind, bytearray())
        known.extend(bytes(max(0, step + 1 - len(known))))
        known[step] = 1
        self.ranks.setdefault(kind, set()).update(ranks)

    def look(
        self,
        source: SessionSource,
        branch: int,
        step: int,
        stats: NDArray[np.float32] | None,
        checksums: NDArray[np.uint64] | None,
        sequences: Sequence[SequenceStep],
    ) -> None:
        """Look at the next step."""
        for kind, found in self._found(source, stats, checksums, sequences):
            if found is not None:
                self.add(kind, step, found.ranks)
                if kind not in self.fired:
                    self.fired[kind] = fired_at(source.session, kind, branch, step, found)
        self.next_step = step + 1

    def _found(
        self,
        source: SessionSource,
        stats: NDArray[np.float32] | None,
        checksums: NDArray[np.uint64] | None,
        sequences: Sequence[SequenceStep],
    ) -> Iterable[tuple[SentinelKind, SentinelFinding | None]]:
        """What one step shows."""
        session = source.session
        if stats is not None:
            yield "nan", sentinels.first_not_finite(session, stats, "nan")
            yield "inf", sentinels.first_not_finite(session, stats, "inf")
        yield "desync", sentinels.desync(session, checksums)
        yield "cache", sentinels.misaligned(session, sequences)
        for reported in sequences:
            if reported.emitted is None:
                continue
            tail = self.tails[reported.seq] = [
                *self.tails.get(reported.seq, [])[1 - TAIL :],
                reported.emitted,
            ]
            found = sentinels.repetition(tail, source.texts.label)
            if found is not None and len(sequences) > 1:
                found = replace(found, words=f"sequence {reported.seq}: {found.words}")
            yield "repetition", found

    def copy(self) -> _Scan:
        """One that can be gone on with aside."""
        steps = {kind: bytearray(known) for kind, known in self.steps.items()}
        ranks = {kind: set(known) for kind, known in self.ranks.items()}
        return _Scan(self.next_step, dict(self.tails), dict(self.fired), steps, ranks)

    def history(self, kind: SentinelKind, total: int) -> SentinelHistory:
        """As far as was looked."""
        steps = bytes(self.steps.get(kind, b""))
        return SentinelHistory(steps.ljust(total, b"\0")[:total], tuple(sorted(self.ranks.get(kind, ()))))


class SentinelWatch:
    """Scans all sequences of a branch; one that grew is scanned on from where it was left."""

    def __init__(self) -> None:
        self._scans: dict[int, _Scan] = {}

    def watch(self, source: SessionSource, where: Where) -> Watch:
        """Go on scanning the branch for a short while, and report what was found so far; in the step that is under way
        as well, as far as it has come."""
        scan = self._scans.setdefault(where.branch, _Scan())
        session, steps = source.session, source.session.steps(where.branch)
        deadline = time.monotonic() + _BUDGET
        while scan.next_step < steps.stop and time.monotonic() < deadline:
            step = scan.next_step
            stats, checksums = session.stats(step, where.branch), session.checksums(step, where.branch)
            reported = source.record(step, where.branch).sequences
            scan.look(source, where.branch, step, stats, checksums, reported)
        flight = source.under_way(where.branch, steps.stop)
        if flight is not None and scan.next_step == steps.stop:
            scan, steps = (
                scan.copy(),
                source.reach(where.branch),
            )  # it will be looked at again once it is over
            scan.look(source, where.branch, flight.step, flight.stats, flight.checksums, flight.sequences)
        for one in _noted(session, where.branch):
            scan.fired.setdefault(one.kind, one)
        if scan.next_step >= steps.stop:
            for judged in judged_of(session, where.branch):
                if judged.verdict == "fail" and judged.step in steps:
                    scan.add("golden", judged.step, judged.ranks)
            for stop in sentinels.stops(session, where.branch):
                if stop.step in steps:
                    scan.add("stop", stop.step, ())
        every = tuple(scan.fired.get(kind) or _clear(session, where.branch, kind) for kind in NAMES)
        histories = {kind: scan.history(kind, steps.stop) for kind in NAMES}
        return Watch(every, scan.next_step, steps.stop, histories)


def _clear(session: Session, branch: int, kind: SentinelKind) -> BranchSentinel:
    """One that has found nothing, as far as it could see."""
    return BranchSentinel(kind, NAMES[kind], branch, looked=why_blind(session, branch, kind))


def _noted(session: Session, branch: int) -> Iterable[BranchSentinel]:
    """What others wrote into the session: verdicts and stops."""
    golden = left_golden(session, branch)
    if golden is not None:
        yield golden
    for stop in sentinels.stops(session, branch)[:1]:
        yield fired_at(session, "stop", branch, stop.step, SentinelFinding(clean(stop.text, limit=80)))
