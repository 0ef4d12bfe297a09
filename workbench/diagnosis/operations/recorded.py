"""The tensors of one recording as operations read them: every step and sequence at once, each decoded once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from engine.taps.names import layer_of
from sessions import layouts
from sessions.errors import LayoutError
from sessions.records import SequenceStep
from workbench.diagnosis.recording import Array, Recording

#: Bytes of decoded tensors that are kept.
KEPT_BYTES = 1 << 30
#: Layers that are decoded at once, where a tap has no more rows than these in all steps and sequences.
LAYERS_AT_ONCE, FEW_ROWS = 4, 512


@dataclass(frozen=True, slots=True)
class Row:
    """One token in one forward pass. `position` is where it stands in its sequence, `recorded_position` where the
    engine says that it does; `length` is how many tokens the sequence has by then, the rest of a prompt that comes in
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


class RecordedTaps:
    """Reads `recording`. Where tokens stand is `golden`'s word, or else counted.

    `passes` are in the order of steps and sequences; what is read of a tap is in that order too.
    """

    def __init__(self, recording: Recording, golden: Recording | None = None) -> None:
        self.recording, self.golden = recording, golden
        self.passes = tuple(_passes(recording, golden))
        self._kept: OrderedDict[str, _Decoded] = OrderedDict()
        self._replaced: dict[str, _Decoded] = {}
        self._captured = recording.session.captured_taps(recording.branch)

    @property
    def ranks(self) -> range:
        return range(self.recording.ranks)

    def has(self, tap: str) -> bool:
        """Whether the session knows the tap and has not given a reason why it cannot."""
        return self.recording.has_tap(tap) and tap not in self.recording.session.meta.absent

    def captured(self, tap: str) -> bool:
        """Whether any tensor of it was recorded."""
        return self.has(tap) and (tap in self._replaced or tap in self._captured)

    def tensors(self, tap: str, rank: int) -> tuple[Array | None, ...]:
        """What one rank held in each pass, in float64; None where that was not captured whole."""
        if not self.has(tap):
            return (None,) * len(self.passes)
        decoded = self._decoded(tap)
        return decoded.arrays[decoded.lead[rank]]

    def rows(self, tap: str, rank: int, passes: Sequence[int]) -> Array | None:
        """The tensors of those passes (by their index) one below the other; None where one lacks."""
        tensors = self.tensors(tap, rank)
        chosen = [tensors[i] for i in passes]
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
        """The same recording with other tensors of one tap: of each rank one for each pass, None where it lacks."""
        other = copy(self)
        other._kept = OrderedDict(self._kept)
        other._replaced = {
            **self._replaced,
            tap: _Decoded(tuple(self.ranks), {r: tuple(t) for r, t in tensors.items()}, 0),
        }
        return other

    def lead(self, tap: str, rank: int) -> int:
        """The lowest rank whose tensors of that tap equal this rank's bit for bit, throughout."""
        return self._decoded(tap).lead[rank] if self.has(tap) else 0

    def _decoded(self, tap: str) -> _Decoded:
        if tap in self._replaced:
            return self._replaced[tap]
        if tap not in self._kept:
            self._kept |= self._decode(self._together(tap))
            for name in list(self._kept):
                if name != tap and sum(one.nbytes for one in self._kept.values()) > KEPT_BYTES:
                    del self._kept[name]
        self._kept.move_to_end(tap)
        return self._kept[tap]

    def _together(self, tap: str) -> list[str]:
        """The taps that are read at once: a session finds those of one step by reading the list of them all."""
        at_once = LAYERS_AT_ONCE if sum(len(one.rows) for one in self.passes) <= FEW_ROWS else 1
        layer = layer_of(tap)
        if layer is None:
            return [tap]
        names = (one.name for one in self.recording.session.taps)
        return [
            name for name in names if (of := layer_of(name)) is not None and of // at_once == layer // at_once
        ]

    def _decode(self, taps: Sequence[str]) -> dict[str, _Decoded]:
        held: dict[str, list[list[Array | None]]] = {tap: [[] for _ in self.ranks] for tap in taps}
        digests = {tap: [blake2b() for _ in self.ranks] for tap in taps}
        session, branch = self.recording.session, self.recording.branch
        for one in self.passes:
            for tap in taps:
                for rank in self.ranks:
                    raw = session.tensor(tap, step=one.step, rank=rank, seq=one.seq, branch=branch, slice="")
                    digest = digests[tap][rank]
                    digest.update(b"-" if raw is None else f"{raw.dtype}{raw.shape}".encode())
                    digest.update(b"" if raw is None else np.ascontiguousarray(raw).tobytes())
                    held[tap][rank].append(None if raw is None else raw.astype(np.float64))
        return {tap: _shared(held[tap], [digest.digest() for digest in digests[tap]]) for tap in taps}


def _shared(held: Sequence[Sequence[Array | None]], digests: Sequence[bytes]) -> _Decoded:
    """Each rank's tensors of one tap, those of ranks with equal digests once."""
    lead = tuple(digests.index(digest) for digest in digests)
    arrays = {rank: tuple(held[rank]) for rank in sorted(set(lead))}
    nbytes = sum(x.nbytes for tensors in arrays.values() for x in tensors if x is not None)
    return _Decoded(lead, arrays, nbytes)


def _passes(recording: Recording, golden: Recording | None) -> Iterator[SequencePass]:
    read: dict[int, int] = {}  # tokens of each sequence so far
    lengths = _lengths(recording)
    for step in recording.steps:
        told = golden.sequences(step) if golden is not None and step in golden.steps else {}
        for seq, sequence in sorted(recording.sequences(step).items()):
            rows = tuple(_rows(step, sequence, told.get(seq), read.get(seq, 0), lengths[step, seq]))
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
    for token, position, told in zip(sequence.ids, right, recorded, strict=True):
        yield Row(step, sequence.seq, position, token, told, length)
