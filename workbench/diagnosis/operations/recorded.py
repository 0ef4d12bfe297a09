"""The tensors of one recording as operations read them: every step and sequence at once, each decoded once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.operation import OF_POSITIONS
from lockstep.engine.taps.names import operation_at
from lockstep.sessions import layouts
from lockstep.sessions.dtypes import rounded, widen
from lockstep.sessions.errors import LayoutError
from lockstep.sessions.recently_used import RecentlyUsed
from lockstep.sessions.records import SequenceStep, TensorRecord
from lockstep.workbench.diagnosis.recording import Array, Recording

#: Bytes of tensors in float64 that are kept.
KEPT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Row:
    """One token in one forward pass. `position` is where it stands in its sequence, `recorded_position` where the
    engine reports it; `length` is how many tokens the sequence has by then, the rest of a prompt that comes in
    chunks included."""

    step: int
    seq: int
    position: int
    token: int
    recorded_position: int
    length: int = 0


@dataclass(frozen=True, slots=True)
class SequencePass:
    """One forward pass of one sequence: its new tokens."""

    step: int
    seq: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class _Decoded:
    """One tap of all passes. Ranks whose tensors are bit-equal throughout share `lead`, the lowest of them."""

    lead: tuple[int, ...]
    arrays: dict[int, tuple[Array | None, ...]]  # by lead, in the order of the passes
    nbytes: int

    def changed(self, change: Callable[[Array], Array]) -> _Decoded:
        """With every tensor changed in the same way."""
        arrays = {
            rank: tuple(None if x is None else change(x) for x in held) for rank, held in self.arrays.items()
        }
        return _Decoded(self.lead, arrays, self.nbytes)


class RecordedTaps:
    """Reads `recording`. Where tokens stand is `golden`'s word, or else counted.

    `passes` are in the order of steps and sequences; what is read of a tap is in that order too.
    """

    def __init__(self, recording: Recording, golden: Recording | None = None) -> None:
        self.recording, self.golden = recording, golden
        self.passes = tuple(_passes(recording, golden))
        self._kept = RecentlyUsed[_Decoded](KEPT_BYTES)
        self._replaced: dict[str, _Decoded] = {}
        self._captured = recording.session.captured_taps(recording.branch)
        self._hidden: frozenset[str] = frozenset()

    @property
    def ranks(self) -> range:
        return range(self.recording.ranks)

    def has(self, tap: str) -> bool:
        """Whether the session knows the tap and has not given a reason why it cannot."""
        return (
            self.recording.has_tap(tap)
            and tap not in self._hidden
            and tap not in self.recording.session.meta.absent
        )

    def captured(self, tap: str) -> bool:
        """Whether any tensor of it was recorded."""
        return self.has(tap) and (tap in self._replaced or tap in self._captured)

    def measured(self, tap: str) -> bool:
        """Whether statistics of it were recorded, whatever became of its tensors."""
        steps, session = self.recording.steps, self.recording.session
        tables = (session.stats(step, self.recording.branch) for step in steps[:1])
        return self.has(tap) and any(
            table is not None and bool(np.isfinite(table[session.tap(tap).index]).any()) for table in tables
        )

    def tensors(self, tap: str, rank: int) -> tuple[Array | None, ...]:
        """What one rank held in each pass, in float64; None where that was not captured whole."""
        if not self.has(tap):
            return (None,) * len(self.passes)
        decoded = self._decoded(tap)
        return decoded.arrays[decoded.lead[rank]]

    def rows(self, tap: str, rank: int, passes: Sequence[int]) -> Array | None:
        """The tensors of those passes (by their index) one below the other, of what has a row for each position that is
        attended to those of the new tokens; None where one lacks."""
        tensors = self.tensors(tap, rank)
        chosen = [tensors[i] for i in passes]
        if (operation := operation_at(tap)) is not None and operation.form in OF_POSITIONS:
            news = [len(self.passes[i].rows) for i in passes]
            chosen = [None if x is None else x[-new:] for x, new in zip(chosen, news, strict=True)]
        if not chosen or any(x is None or x.ndim == 0 for x in chosen):
            return None
        shapes = {x.shape[1:] for x in chosen if x is not None}
        return np.concatenate([x for x in chosen if x is not None]) if len(shapes) == 1 else None

    def whole(self, tap: str, passes: Sequence[int]) -> Array | None:
        """As `rows`, of the tensor that one rank alone would have had."""
        found = [whole for i in passes if (whole := self._whole(tap, i)) is not None]
        if not found or len(found) < len(passes) or len({x.shape[1:] for x in found}) > 1:
            return None
        return np.concatenate(found)

    def _whole(self, tap: str, i: int) -> Array | None:
        if tap not in self._replaced:
            one = self.passes[i]
            return self.recording.whole_or_none(tap, one.step, one.seq)
        held = {rank: x for rank in self.ranks if (x := self.tensors(tap, rank)[i]) is not None}
        try:
            return layouts.rebuild(self.recording.layout(tap), held, len(self.ranks)).array
        except LayoutError:
            return None

    def replaced(self, tap: str, tensors: Mapping[int, Sequence[Array | None]]) -> RecordedTaps:
        """The same recording with other tensors of one tap: of each rank one for each pass, None where it lacks. Ranks
        that share a sequence share a lead."""
        lead = tuple(next(r for r in self.ranks if tensors[r] is tensors[rank]) for rank in self.ranks)
        other = copy(self)
        other._replaced = {
            **self._replaced,
            tap: _Decoded(lead, {r: tuple(tensors[r]) for r in set(lead)}, 0),
        }
        return other

    def without(self, hidden: Collection[str]) -> RecordedTaps:
        """The same recording as if it did not have some taps."""
        other = copy(self)
        other._hidden = self._hidden | frozenset(hidden)
        return other

    def forgetting(self, replaced: Collection[str]) -> RecordedTaps:
        """The same with what was recorded of some taps, where other tensors had taken its place."""
        other = copy(self)
        other._replaced = {tap: held for tap, held in self._replaced.items() if tap not in replaced}
        return other

    def scaled(self, factors: Mapping[str, float], dtype: str = "float64") -> RecordedTaps:
        """The same recording with the tensors of some taps multiplied by a number each, as an engine does that keeps
        them in `dtype`."""
        return self._changed({tap: partial(_scaled, factor, dtype) for tap, factor in factors.items()})

    def ordered(self, taps: Collection[str], order: NDArray[np.intp]) -> RecordedTaps:
        """The same recording with the channels (last axis) of some taps in that order. Tensors with another number of
        them stay as they are."""
        return self._changed(dict.fromkeys(taps, partial(_in_order, order)))

    def _changed(self, changes: Mapping[str, Callable[[Array], Array]]) -> RecordedTaps:
        other = copy(self)
        other._replaced = {
            **self._replaced,
            **{tap: self._decoded(tap).changed(change) for tap, change in changes.items()},
        }
        return other

    def lead(self, tap: str, rank: int) -> int:
        """The lowest rank whose tensors of that tap equal this rank's bit for bit, throughout."""
        return self._decoded(tap).lead[rank] if self.has(tap) else 0

    def _decoded(self, tap: str) -> _Decoded:
        if tap in self._replaced:
            return self._replaced[tap]
        found = self._kept.get(tap)
        if found is None:
            found = self._decode(tap)
            self._kept.put(tap, found, found.nbytes)
        return found

    def _decode(self, tap: str) -> _Decoded:
        session, branch = self.recording.session, self.recording.branch
        held = [
            [
                session.capture(tap, step=one.step, rank=rank, seq=one.seq, branch=branch, slice="")
                for one in self.passes
            ]
            for rank in self.ranks
        ]
        lead = tuple(next(i for i, other in enumerate(held) if _alike(own, other)) for own in held)
        arrays = {
            rank: tuple(None if x is None else widen(x.array, x.dtype).astype(np.float64) for x in held[rank])
            for rank in sorted(set(lead))
        }
        nbytes = sum(x.nbytes for tensors in arrays.values() for x in tensors if x is not None)
        return _Decoded(lead, arrays, nbytes)


def _scaled(factor: float, dtype: str, x: Array) -> Array:
    return rounded(x * factor, dtype).astype(np.float64)


def _in_order(order: NDArray[np.intp], x: Array) -> Array:
    return x[..., order] if x.ndim and x.shape[-1] == len(order) else x


def _alike(own: Sequence[TensorRecord | None], other: Sequence[TensorRecord | None]) -> bool:
    """Whether two ranks' tensors are equal bit for bit."""
    return all(
        a is b is None or (a is not None and b is not None and _equal_bits(a.array, b.array))
        for a, b in zip(own, other, strict=True)
    )


def _equal_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    if a is b:
        return True
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def _passes(recording: Recording, golden: Recording | None) -> Iterator[SequencePass]:
    read: dict[int, int] = {}  # tokens of each sequence so far
    lengths = _lengths(recording)
    for step in recording.steps:
        reported = golden.sequences(step) if golden is not None and step in golden.steps else {}
        for seq, sequence in sorted(recording.sequences(step).items()):
            rows = tuple(_rows(step, sequence, reported.get(seq), read.get(seq, 0), lengths[step, seq]))
            read[seq] = read.get(seq, 0) + len(rows)
            yield SequencePass(step, seq, rows)


def _lengths(recording: Recording) -> dict[tuple[int, int], int]:
    """(step, sequence) -> how many tokens it has by then. A chunk of a prompt, but for the last, emits nothing."""
    found: dict[tuple[int, int], int] = {}
    read: dict[int, int] = {}
    chunks: dict[int, list[int]] = {}  # steps of each sequence since it last emitted
    for step in recording.steps:
        for seq, sequence in recording.sequences(step).items():
            read[seq] = found[step, seq] = read.get(seq, 0) + len(sequence.ids)
            chunks.setdefault(seq, []).append(step)
            if sequence.emitted is not None:
                found |= {(chunk, seq): read[seq] for chunk in chunks.pop(seq)}
    return found


def _rows(
    step: int, sequence: SequenceStep, golden: SequenceStep | None, first: int, length: int
) -> Iterator[Row]:
    count, recorded = len(sequence.ids), list(sequence.positions)
    right = list(range(first, first + count))
    if golden is not None and len(golden.positions) == count:
        right = list(golden.positions)
    if len(recorded) != count:
        recorded = right
    for token, position, reported in zip(sequence.ids, right, recorded, strict=True):
        yield Row(step, sequence.seq, position, token, reported, length)
