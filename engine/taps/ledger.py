"""Statistics of a step: tensors of all taps are collected and measured together at its end.

Where kernels measure them, they are kept as they are until then: only what is overwritten within the step is copied.
Where there are none, small ones are copied next to others of their size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.engine.taps import cpu_pass, one_pass
from lockstep.engine.taps.collected import Collected, apart, side_by_side
from lockstep.engine.taps.measurands import MOST, Growing, PerSequence, pieces_of
from lockstep.engine.taps.measure import PIECE, TiledStatistics, measured_rows, measured_whole
from lockstep.engine.taps.parts import Groups, merge_runs, statistics, unmask

#: Tensors of up to this many elements are copied next to others of their size, and measured when these fill a piece.
#: Larger ones are measured at once: one kernel each is cheap.
DEFERRED = 1 << 17
#: The same on a GPU, where what is measured at once costs two dozen launches.
GPU_DEFERRED = 1 << 20
#: Elements of the room for tensors of one size, on the CPU a piece: on a GPU 2 MiB of float32, 16 for larger ones, of
#: which a step has few sizes.
_GPU_ROOM, _LARGE_ROOM = 1 << 19, 1 << 22
#: Sizes of tensors that room is kept for from step to step.
SIZES = 16


class _Slab:
    """Rows for tensors of one size and dtype that are measured together, and the entries that they are of."""

    __slots__ = ("entries", "rows", "space")

    def __init__(self, size: int, like: Tensor) -> None:
        room = (_LARGE_ROOM if size > DEFERRED else _GPU_ROOM) if like.is_cuda else PIECE
        self.space = torch.empty((max(1, room // max(1, size)), size), dtype=like.dtype, device=like.device)
        self.rows, self.entries = self.space.unbind(), list[int]()

    def add(self, entry: int, x: Tensor) -> bool:
        """Copy x; whether there is no room for another."""
        self.rows[len(self.entries)].copy_(x.reshape(-1))
        self.entries.append(entry)
        return len(self.entries) == len(self.rows)

    def measured(self) -> _Measured:
        """What has been copied."""
        return _Measured(self.entries, *measured_rows(self.space[: len(self.entries)]))


@dataclass(frozen=True, slots=True)
class _Measured:
    """Parts [n, 8] and checksums [n] of some entries, on the device."""

    entries: list[int]
    parts: Tensor
    checksums: Tensor


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a captured step measures, which replaying it fills: the pieces by tap; of taps in which a mask grows, the
    numbers of their pieces, one a sequence of the batch; and parts and checksums of the pieces."""

    groups: Groups
    growing: list[tuple[int, NDArray[np.int64]]]
    measured: Tensor
    tables: one_pass.CapturedTables


class StatisticsLedger:
    """Collects the tensors of one step; `close` returns the table of all taps."""

    def __init__(self, num_taps: int, overwritten: Collection[int] = ()) -> None:
        """`overwritten`: taps whose tensors later operations of a step write to."""
        self.num_taps, self.overwritten = num_taps, frozenset(overwritten)
        self.copies = False  # whether all others may be overwritten as well: a fault does as it likes
        self._waiting = Collected()
        self._entries: list[int] = []  # of what waits there whole, and
        self._numbers: list[int] = []  # what it is there
        #: Whether kernels measure this step's tensors of a dtype: all are on one device.
        self._takes: dict[torch.dtype, bool] = {}
        self._growing: list[tuple[int, slice]] = []  # taps that a mask grows in, and their entries
        self._slabs: dict[tuple[int, torch.dtype], _Slab] = {}  # kept from step to step
        self._taps: list[int] = []  # tap of each entry, in the order seen
        self._masked: list[int] = []  # infinities of each entry that the mask explains
        self._measured: list[_Measured] = []
        self._tiled: dict[int, TiledStatistics] = {}

    def add(self, tap: int, x: Tensor, masked: int = 0) -> None:
        """Record tensor x at `tap`, which may be overwritten afterwards. `masked`: cells that a correct mask has put to
        -inf."""
        entry = self._enter(tap, masked)
        if waiting := self._room(x):
            kept = x.clone() if self.copies or tap in self.overwritten else x
            if kept.is_contiguous() and kept.numel() <= MOST:
                self._waits(entry, waiting.add_whole(kept))
                return
            for piece in pieces_of(kept):
                self._waits(entry, waiting.add(piece))
        else:
            self._copy(entry, x)

    def add_each(self, tap: int, each: PerSequence, masked: Sequence[int] | None) -> None:
        """Record what each sequence of the batch has at `tap`, which only faults overwrite. `masked`: cells that a
        correct mask has put to -inf, where there are any."""
        count = each.count
        entries = range(len(self._taps), len(self._taps) + count)
        self._taps += [tap] * count
        self._masked += masked or [0] * count
        waiting = self._room(each.x)
        if waiting and not self.copies:
            first = waiting.add(each)
            self._entries += entries
            self._numbers += range(first, first + count)
            return
        for entry, part in zip(entries, each.parts(), strict=True):
            if waiting:
                self._waits(entry, waiting.add_whole(part))
            else:
                self._copy(entry, part)

    def _copy(self, entry: int, x: Tensor) -> None:
        """Take x next to others of its size; measure it at once where it is large."""
        size = x.numel()
        if size > (GPU_DEFERRED if x.is_cuda else DEFERRED):
            self._measured.append(_Measured([entry], *measured_whole(x)))
            return
        slab = self._slabs.get((size, x.dtype))
        if slab is None:
            slab = self._slabs[size, x.dtype] = _Slab(size, x)
        if slab.add(entry, x):
            self._measured.append(slab.measured())
            slab.entries = []

    def tiled(
        self, tap: int, shape: tuple[int, int, int], outside: float, like: Tensor, masked: int
    ) -> TiledStatistics:
        """What records a tensor [heads, T, K] that comes in tiles until the step is over, of the dtype of `like`."""
        waiting = None if self.copies else self._room(like)  # as they are: a fault may overwrite them
        one = TiledStatistics(shape, outside, like.dtype, like.device, waiting)
        self._tiled[self._enter(tap, masked)] = one
        return one

    def _room(self, x: Tensor) -> Collected | None:
        """Where tensors like x wait; None where they are measured by `measure`."""
        dtype = x.dtype
        if dtype not in self._takes:
            taken = one_pass.refusal(x.device, dtype) is None if x.is_cuda else cpu_pass.takes(x)
            self._takes[dtype] = taken
        return self._waiting if self._takes[dtype] else None

    def _waits(self, entry: int, number: int) -> None:
        self._entries.append(entry)
        self._numbers.append(number)

    def add_growing(self, tap: int, pieces: Sequence[Growing], masked: Sequence[int] | None) -> None:
        """Record what each sequence of the batch has at `tap`, as long as it is when the step runs. `masked`: cells
        that a correct mask has put to -inf, where there are any."""
        if masked:
            self._growing.append((tap, slice(len(self._taps), len(self._taps) + len(pieces))))
        for sequence, piece in enumerate(pieces):
            entry = self._enter(tap, masked[sequence] if masked else 0)
            self._waits(entry, self._waiting.add(piece))

    def begin_capture(self, tables: one_pass.CapturedTables) -> None:
        """What the next step records is measured by launches that go by `tables`."""
        self.clear()
        self._waiting.tables = tables

    def end_capture(self, tables: one_pass.CapturedTables) -> Recorded:
        """All that a step has recorded; the ledger is empty again. Called while the graph is being captured."""
        self._waiting.flush()
        assert not self._tiled
        assert not self._measured
        numbers, groups = np.array(self._numbers), Groups.of(np.array(self._taps))
        growing = [(tap, numbers[entries]) for tap, entries in self._growing]
        measured = side_by_side(self._waiting.measured)
        found = Recorded(replace(groups, order=numbers[groups.order]), growing, measured, tables)
        self.clear()
        return found

    def _enter(self, tap: int, masked: int) -> int:
        self._taps.append(tap)
        self._masked.append(masked)
        return len(self._taps) - 1

    def close(self) -> tuple[NDArray[np.float32], NDArray[np.uint64]]:
        """The table of the step, which is over; the ledger is empty again."""
        table = self.table()
        self.clear()
        return table

    def table_with(
        self, tap: int, x: Tensor, masked: int = 0
    ) -> tuple[NDArray[np.float32], NDArray[np.uint64]]:
        """The table as it would be with tensor x at `tap`, which is not recorded yet."""
        self._measured.append(_Measured([self._enter(tap, masked)], *measured_whole(x)))
        table = self.table()
        del self._taps[-1], self._masked[-1], self._measured[-1]
        return table

    def table(self) -> tuple[NDArray[np.float32], NDArray[np.uint64]]:
        """Statistics [taps, 8] and checksums [taps] so far: NaN and 0 where a tap has not run."""
        entries = len(self._taps)
        parts, sums = np.zeros((entries, 8)), np.zeros(entries, dtype=np.int64)
        waiting = [slab.measured() for slab in self._slabs.values() if slab.entries]
        tiled = [_Measured([entry], *one.close()) for entry, one in self._tiled.items() if not one.waits]
        found = [*self._measured, *waiting, *tiled]
        if found:  # one copy to the host: it waits for all that a GPU has been given
            order = [entry for one in found for entry in one.entries]
            parts[order] = torch.cat([one.parts for one in found]).cpu().numpy()
            sums[order] = torch.cat([one.checksums for one in found]).cpu().numpy()
        if self._waiting.count:
            self._waiting.flush()
            self._take(*apart(side_by_side(self._waiting.measured).cpu().numpy()), parts, sums)
        groups = Groups.of(np.array(self._taps, np.int64))
        return self._tabulated(groups, unmask(parts, self._masked), sums)

    def _tabulated(
        self, groups: Groups, parts: NDArray[np.float64], sums: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.uint64]]:
        """From the parts and checksums of entries, of which each tap may have several."""
        stats = np.full((self.num_taps, 8), np.nan, dtype=np.float32)
        checksums = np.zeros(self.num_taps, dtype=np.uint64)
        if len(parts):
            whole, chains = groups.merged(parts, sums.view(np.uint64))
            stats[groups.numbers], checksums[groups.numbers] = statistics(whole), chains
        return stats, checksums

    def replayed(
        self, recorded: Recorded, measured: NDArray[np.int64], masked: Callable[[int], list[int]]
    ) -> tuple[NDArray[np.float32], NDArray[np.uint64]]:
        """The table of a captured step that has been replayed, from what it has `measured`. `masked(tap)`: infinities
        that a correct mask has put in each sequence's part."""
        parts, checksums = apart(measured)
        for tap, numbers in recorded.growing:
            if any(cells := masked(tap)):
                parts[numbers] = unmask(parts[numbers], cells)
        return self._tabulated(recorded.groups, parts, checksums)

    def _take(
        self,
        measured: NDArray[np.float64],
        checksums: NDArray[np.int64],
        parts: NDArray[np.float64],
        sums: NDArray[np.int64],
    ) -> None:
        """Enter what the pieces came to: of a tensor of several, which stand together, they are put together."""
        if self._entries:
            entries, numbers = np.array(self._entries), np.array(self._numbers)
            first = np.flatnonzero(np.diff(entries, prepend=-1))
            parts[entries[first]] = merge_runs(measured[numbers], first)
            sums[entries[first]] = np.add.reduceat(checksums[numbers], first)  # modulo 2**64
        for entry, one in self._tiled.items():
            if one.waits:
                parts[entry], sums[entry] = one.put_together(measured, checksums)

    def clear(self) -> None:
        """Drop everything collected."""
        self._waiting = Collected()
        self._entries.clear()
        self._numbers.clear()
        self._takes.clear()
        self._growing.clear()
        for slab in self._slabs.values():
            slab.entries = []
        while len(self._slabs) > SIZES:  # attention has another one at every step
            self._slabs.pop(next(iter(self._slabs)))
        self._taps.clear()
        self._masked.clear()
        self._measured.clear()
        self._tiled.clear()
