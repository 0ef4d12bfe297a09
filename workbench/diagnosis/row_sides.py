"""The rows of a recording: every token of every sequence at its position, whatever passes it was computed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from numpy.typing import NDArray

from lockstep.engine.taps.names import local_name
from lockstep.sessions import Session, slices
from lockstep.sessions.errors import LayoutError
from lockstep.sessions.meta import ROW_HASHES, ROW_STATISTICS, is_companion
from lockstep.sessions.records import SequenceStep

#: What is known of a tap's rows: its numbers, a hash of each row's bits, or eight statistics of each.
Kind = Literal["tensor", "hashes", "statistics"]
#: Taps whose rows are those of the cache, not of the pass.
_NOT_OF_THE_PASS = ("attn.k_cache", "attn.v_cache")
#: Taps of [heads, tokens, keys].
_HEADS_FIRST = ("attn.scores", "attn.probs")
_ENDINGS: Mapping[Kind, str] = {"tensor": "", "hashes": ROW_HASHES, "statistics": ROW_STATISTICS}


@dataclass(frozen=True, slots=True)
class ComputedRow:
    """Where one token was computed: the step, and the row of its pass."""

    token: int
    step: int
    index: int
    count: int  # rows of that pass


class RowSide:
    """One branch of a session, by (sequence, position). Where a position was computed twice the last one counts.
    `counted`: tokens stand where they come in the order in which they were read, whatever the engine reports."""

    def __init__(self, session: Session, branch: int = 0, *, counted: bool = False) -> None:
        self.session, self.branch = session, branch
        self.sequences: dict[int, dict[int, ComputedRow]] = {}
        for step in session.steps(branch):
            for one in session.step(step, branch).sequences:
                mine = self.sequences.setdefault(one.seq, {})
                count = len(one.ids)
                positions = range(len(mine), len(mine) + count) if counted else one.positions
                for index, (token, position) in enumerate(zip(one.ids, positions, strict=False)):
                    mine[position] = ComputedRow(token, step, index, count)
        self._captured = session.captured_taps(branch)

    @property
    def taps(self) -> list[str]:
        """Those of which rows are known, in the order of execution."""
        names = (tap.name for tap in self.session.taps)
        return [name for name in names if self.kinds(name) and not is_companion(name)]

    def kinds(self, tap: str) -> set[Kind]:
        """What is known of its rows."""
        if local_name(tap) in _NOT_OF_THE_PASS:
            return set()
        return {kind for kind, ending in _ENDINGS.items() if tap + ending in self._captured}

    def layout(self, tap: str) -> str:
        return self.session.tap(tap).layout

    def ended_by(self, seq: int, position: int) -> SequenceStep | None:
        """What the pass did to the sequence whose last row this is; None of any other row."""
        row = self.sequences[seq][position]
        if row.index != row.count - 1:
            return None
        sequences = self.session.step(row.step, self.branch).sequences
        return next((one for one in sequences if one.seq == seq), None)

    def rows(self, tap: str, kind: Kind, seq: int, positions: list[int]) -> dict[int, NDArray[Any]]:
        """The tap's rows at those positions of a sequence, as the ranks' parts make them up; those that are there.
        LayoutError where the parts do not fit together."""
        passes: dict[int, Mapping[int, NDArray[Any]]] = {}
        found: dict[int, NDArray[Any]] = {}
        for position in positions:
            row = self.sequences[seq][position]
            if row.step not in passes:
                passes[row.step] = self._whole(tap + _ENDINGS[kind], row.step, seq, kind, row.count)
            if row.index in passes[row.step]:
                found[position] = passes[row.step][row.index]
        return found

    def _whole(self, tap: str, step: int, seq: int, kind: Kind, count: int) -> Mapping[int, NDArray[Any]]:
        """The rows of a pass of `count` by their indices, as the ranks' parts make them up; of some, where the dump had
        no others."""
        try:
            array = self.session.rebuilt(tap, step=step, seq=seq, branch=self.branch, slice="").array
            some = None if array is not None else self._some(tap, step, seq)
            if some is not None:
                array = self.session.rebuilt(tap, step=step, seq=seq, branch=self.branch).array
        except LayoutError:
            return {}
        if array is None or array.ndim == 0:
            return {}
        if kind == "tensor" and local_name(tap) in _HEADS_FIRST and array.ndim > 1:
            array = array.swapaxes(0, 1)
        last = len(array) == 1 and count > 1  # as logits of the last token alone
        rows: Sequence[int] = some or (range(count - 1, count) if last else range(count))
        return dict(zip(rows, array, strict=True)) if len(rows) == len(array) else {}

    def _some(self, tap: str, step: int, seq: int) -> list[int] | None:
        """The rows of which alone a tensor was recorded, on all ranks alike; None where there are none."""
        parts = self.session.parts(tap, step=step, seq=seq, branch=self.branch)
        reported = {part.slice for part in parts.values()}
        terms = slices.parse(reported.pop().removeprefix(":,")) if len(reported) == 1 else []
        return terms[0] if len(terms) == 1 and isinstance(terms[0], list) else None


def paired(a: RowSide, b: RowSide) -> list[tuple[int, int, list[int]]]:
    """Sequences that read the same tokens, (of a, of b), with the positions up to which they do: those of one number
    first, then those that begin alike."""
    left = dict(b.sequences)
    found = []
    for seq in sorted(a.sequences, key=lambda seq: seq not in left):
        shared = {other: _shared(a.sequences[seq], rows) for other, rows in left.items()}
        best = max(shared, key=lambda other: (len(shared[other]), other == seq), default=None)
        if best is not None and shared[best]:
            found.append((seq, best, shared[best]))
            del left[best]
    return sorted(found)


def _shared(a: Mapping[int, ComputedRow], b: Mapping[int, ComputedRow]) -> list[int]:
    positions = []
    for position in sorted(a.keys() & b.keys()):
        if a[position].token != b[position].token:
            break
        positions.append(position)
    return positions
