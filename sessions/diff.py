"""Two sessions, tap by tap: metrics where both captured a tensor, exact checksums where only those are there.

No judgement: tolerances, noise floors and causes are the diagnosis' part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions import layouts, slices
from lockstep.sessions.alignment import matched_sequences
from lockstep.sessions.dtypes import widen
from lockstep.sessions.errors import LayoutError, SessionError
from lockstep.sessions.metrics import METRICS_BYTES, Metrics, coarser, metrics
from lockstep.sessions.records import Tap, TensorRecord
from lockstep.sessions.session import Session

#: A rank is named alone when it is this many times as wrong as the next.
_OUTLIER = 8.0


@dataclass(frozen=True, slots=True)
class TapDiff:
    """One tap at one step, `a` (engine) against `b` (golden).

    `metrics` are those of the rebuilt tensors of sequence `seq`; where replicas disagree, those of the worst
    replica. None where there are checksums only (then `seq` is None too: they cover the whole batch), or
    where the ranks' parts do not make up a tensor (then `note` states why).
    `equal`: no element, or no checksum, differs on any rank. `rank` is the one rank that is wrong, None if
    none or more than one is. `differing_ranks` differ at all, `per_rank` gives each rank's metrics against
    its part of the golden tensor; both are empty where the layout does not show the parts (a sum). `note` is
    what rebuilding had to report, and what part was compared.
    """

    tap: Tap
    step: int
    seq: int | None
    metrics: Metrics | None
    equal: bool
    rank: int | None = None
    differing_ranks: tuple[int, ...] = ()
    per_rank: Mapping[int, Metrics] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Absent:
    """A tap that could not be compared, and why."""

    tap: str
    reason: str


class Diff:
    """Iterate for the `TapDiff`s in execution order (step, tap, seq); tensors are read one tap at a time.

    `steps` were found comparable, `seqs[step]` with the same ids; `taps` are those to compare, with their
    counterparts; `absent` are the taps without.
    """

    def __init__(
        self,
        a: Session,
        b: Session,
        branches: tuple[int, int],
        seqs: Mapping[int, tuple[int, ...]],
        taps: Collection[str] | None = None,
    ) -> None:
        """Use `diff`."""
        self.a, self.b, self.branches, self.seqs = a, b, branches, seqs
        self.steps = tuple(seqs)
        both = (tap for tap in a.taps if b.has_tap(tap.name))
        self.taps = [(tap, b.tap(tap.name)) for tap in both if taps is None or tap.name in taps]
        self.absent = tuple(_absent(a, b, branches))

    def __iter__(self) -> Iterator[TapDiff]:
        for step in self.steps:
            yield from self._step(step)

    def _step(self, step: int) -> Iterator[TapDiff]:
        held = {(key.tap, key.seq) for key in self.a.captured(step, self.branches[0])}
        held &= {(key.tap, key.seq) for key in self.b.captured(step, self.branches[1])}
        sums = self._checksums(step)
        for tap, golden in self.taps:
            seqs = [seq for seq in self.seqs[step] if (tap.name, seq) in held]
            for seq in seqs:
                try:
                    yield self._tensors(tap, golden, step, seq)
                except LayoutError as error:  # a broken engine's shards: a finding like any other
                    yield TapDiff(tap, step, seq, None, False, note=str(error))
            if not seqs and sums is not None:
                yield _compare_checksums(tap, step, sums[0][tap.index], sums[1][golden.index])

    def _checksums(self, step: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]] | None:
        if self.a.ranks != self.b.ranks:
            return None
        ours, theirs = self.a.checksums(step, self.branches[0]), self.b.checksums(step, self.branches[1])
        return None if ours is None or theirs is None else (ours, theirs)

    def _tensors(self, tap: Tap, golden: Tap, step: int, seq: int) -> TapDiff:
        ours = _Side(self.a, tap, self.a.parts(tap.name, step=step, seq=seq, branch=self.branches[0]))
        theirs = _Side(self.b, golden, self.b.parts(golden.name, step=step, seq=seq, branch=self.branches[1]))
        notes = [ours.whole.note, f"golden: {theirs.whole.note}" if theirs.whole.note else ""]
        if ours.whole.array is None or theirs.whole.array is None:
            return TapDiff(tap, step, seq, None, False, note="; ".join(filter(None, notes)))
        left, right, part = same_part(
            ours.whole.array, ours.whole.slice, theirs.whole.array, theirs.whole.slice
        )
        dtype = coarser(ours.dtype, theirs.dtype)
        self.a.meter.room(METRICS_BYTES * left.size, f"comparing {tap.name[:80]!r} at step {step}")
        whole = metrics(left, right, dtype)
        per_rank = (
            {} if whole.shapes or ours.whole.slice != part else _per_rank(ours, theirs, right, whole, dtype)
        )
        replicas = [per_rank[rank] for rank in ours.whole.disagreeing_ranks if rank in per_rank]
        differing = tuple(rank for rank, one in per_rank.items() if not one.equal)
        return TapDiff(
            tap,
            step,
            seq,
            max([whole, *replicas], key=lambda one: one.rel_l2),
            whole.equal and not differing,
            _odd_one(per_rank),
            differing,
            per_rank,
            "; ".join(filter(None, [*notes, f"compared [{part}]" if part else ""])),
        )


class _Side:
    """What one session's ranks captured of a tap, and the whole rebuilt from it."""

    def __init__(self, session: Session, tap: Tap, records: dict[int, TensorRecord]) -> None:
        self.ranks = session.ranks
        self.layout = layouts.parse(tap.layout)
        self.whole = layouts.rebuild_records(self.layout, records, session.ranks)
        self.dtype = records[min(records)].dtype
        self.arrays = {r: widen(p.array, p.dtype) for r, p in records.items() if p.slice == self.whole.slice}


def diff(
    a: Session,
    b: Session,
    *,
    branch_a: int = 0,
    branch_b: int = 0,
    steps: Sequence[int] | None = None,
    seqs: Sequence[int] | None = None,
    taps: Collection[str] | None = None,
) -> Diff:
    """Compare `a` (engine) with `b` (golden) over `steps`, `seqs` and `taps`, by default those that both have.

    `IdsMismatch` unless both were fed the same ids at the same positions; `SessionError` if they have
    nothing in common, or lack a step or sequence that was asked for.
    """
    if steps is None:
        mine, theirs = a.steps(branch_a), b.steps(branch_b)
        steps = range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))
    matched = {
        step: matched_sequences(
            step, a.step(step, branch_a).sequences, b.step(step, branch_b).sequences, seqs
        )
        for step in steps
    }
    if not any(matched.values()):
        raise SessionError(
            f"{a.path.name} (branch {branch_a}) and {b.path.name} (branch {branch_b}) have no sequence of any "
            "step in common: there is nothing to compare."
        )
    return Diff(a, b, (branch_a, branch_b), matched, taps)


def _absent(a: Session, b: Session, branches: tuple[int, int]) -> Iterator[Absent]:
    """Taps that can never be compared; a session may give its own reasons in `meta.absent`, by tap."""
    captured = a.captured_taps(branches[0]), b.captured_taps(branches[1])
    for tap in a.taps:
        if not b.has_tap(tap.name):
            yield Absent(tap.name, _reason(b, tap.name))
        elif a.ranks != b.ranks and not (tap.name in captured[0] and tap.name in captured[1]):
            lacking = [
                one.path.name for one, names in zip((a, b), captured, strict=True) if tap.name not in names
            ]
            yield Absent(tap.name, f"no tensor of it in {' nor in '.join(lacking)}")
    for tap in b.taps:
        if not a.has_tap(tap.name):
            yield Absent(tap.name, _reason(a, tap.name))


def _reason(session: Session, tap: str) -> str:
    return session.meta.absent.get(tap) or f"{session.path.name} has no such tap"


def same_part(
    left: NDArray[Any], left_slice: str, right: NDArray[Any], right_slice: str
) -> tuple[NDArray[Any], NDArray[Any], str]:
    """Both wholes cut to the part that was captured on either side. LayoutError where that are two parts."""
    if left_slice == right_slice:
        return left, right, left_slice
    if right_slice == "":
        return left, slices.apply(right, left_slice), left_slice
    if left_slice == "":
        return slices.apply(left, right_slice), right, right_slice
    raise LayoutError(
        f"parts [{left_slice}] and [{right_slice}] do not compare: capture the whole on one side"
    )


def _per_rank(
    ours: _Side, theirs: _Side, golden: NDArray[Any], whole: Metrics, dtype: str
) -> dict[int, Metrics]:
    """Each rank against its part of the golden tensor; empty where the layout does not show the parts."""
    if ours.ranks == 1 or (ours.layout.kind == "replicate" and not ours.whole.disagreeing_ranks):
        return dict.fromkeys(sorted(ours.arrays), whole)
    if ours.layout == theirs.layout and ours.ranks == theirs.ranks and ours.whole.slice == theirs.whole.slice:
        parts = theirs.arrays
    elif ours.layout.kind == "partial":
        return {}
    else:
        lengths = (
            None if ours.layout.kind == "replicate" else layouts.sizes(ours.layout, ours.arrays, ours.ranks)
        )
        parts = layouts.cut(ours.layout, golden, ours.ranks, lengths)
    return {r: metrics(array, parts[r], dtype) for r, array in sorted(ours.arrays.items()) if r in parts}


def _odd_one(per_rank: dict[int, Metrics]) -> int | None:
    """The one rank that is far more wrong than every other (None with a single rank)."""
    if len(per_rank) < 2:
        return None
    (worst, rank), (second, _) = sorted(((one.rel_l2, rank) for rank, one in per_rank.items()), reverse=True)[
        :2
    ]
    return rank if worst > _OUTLIER * second else None


def _compare_checksums(tap: Tap, step: int, a: NDArray[np.uint64], b: NDArray[np.uint64]) -> TapDiff:
    differing = tuple(int(rank) for rank in np.flatnonzero(a != b))
    only = differing[0] if len(differing) == 1 and len(a) > 1 else None
    return TapDiff(tap, step, None, None, not differing, only, differing, note="checksums only")
