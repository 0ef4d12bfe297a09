"""Statistics of a step: tensors of all taps are collected and measured together at its end."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.engine.taps.measure import TiledStatistics, checksum, measure, measured_whole
from lockstep.engine.taps.parts import merge_groups, statistics, unmask

#: Tensors of up to this many elements are kept until the end of the step and measured with others of their size.
#: Larger ones are measured at once: keeping them would cost memory, and one kernel each is cheap.
DEFERRED = 1 << 15


class StatisticsLedger:
    """Collects the tensors of one step; `close` returns the table of all taps."""

    def __init__(self, num_taps: int) -> None:
        self.num_taps = num_taps
        self._deferred: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._order: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
        self._taps: list[int] = []  # tap of each entry, in the order seen
        self._masked: list[int] = []  # infinities of each entry that the mask explains
        self._measured: dict[int, tuple[Tensor, Tensor]] = {}
        self._tiled: dict[int, TiledStatistics] = {}

    def add(self, tap: int, x: Tensor, masked: int = 0, volatile: bool = True) -> None:
        """Record tensor x at `tap`. `masked`: cells that a correct mask has put to -inf. `volatile`: x may be
        overwritten before the step is over."""
        entry = self._enter(tap, masked)
        size = x.numel()
        if size > DEFERRED:
            self._measured[entry] = measured_whole(x)
        else:
            key = (size, x.dtype)
            self._deferred[key].append(x.clone() if volatile else x)
            self._order[key].append(entry)

    def add_tiled(self, tap: int, tiled: TiledStatistics, masked: int) -> None:
        """Record a tensor that comes in tiles until the step is over."""
        self._tiled[self._enter(tap, masked)] = tiled

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
        self.add(tap, x, masked)
        table = self.table()
        del self._taps[-1], self._masked[-1]
        if self._measured.pop(len(self._taps), None) is None:
            key = (x.numel(), x.dtype)
            del self._deferred[key][-1], self._order[key][-1]
        return table

    def table(self) -> tuple[NDArray[np.float32], NDArray[np.uint64]]:
        """Statistics [taps, 8] and checksums [taps] so far: NaN and 0 where a tap has not run."""
        entries = len(self._taps)
        parts, sums = np.zeros((entries, 8)), np.zeros(entries, dtype=np.int64)
        for key, tensors in self._deferred.items():
            if not tensors:
                continue
            rows = torch.stack([x.reshape(-1) for x in tensors])
            where = self._order[key]
            parts[where], sums[where] = measure(rows).cpu().numpy(), checksum(rows).cpu().numpy()
        tiled = {entry: one.close() for entry, one in self._tiled.items()}
        for entry, (part, total) in {**self._measured, **tiled}.items():
            parts[entry], sums[entry] = part.cpu().numpy()[0], int(total[0])
        parts = unmask(parts, self._masked)
        stats = np.full((self.num_taps, 8), np.nan, dtype=np.float32)
        checksums = np.zeros(self.num_taps, dtype=np.uint64)
        if entries:
            taps, whole, chains = merge_groups(np.array(self._taps), parts, sums.view(np.uint64))
            stats[taps], checksums[taps] = statistics(whole), chains
        return stats, checksums

    def clear(self) -> None:
        """Drop everything collected."""
        self._deferred.clear()
        self._order.clear()
        self._taps.clear()
        self._masked.clear()
        self._measured.clear()
        self._tiled.clear()
