"""The pieces of a step that wait to be measured together, without being copied: on a GPU, and on a CPU by kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.engine.taps import cpu_pass, one_pass
from lockstep.engine.taps.measurands import SIGNED_ODD, Growing, Measurand, PerSequence
from lockstep.engine.taps.parts import PARTS

#: Bytes of tensors that are kept until they are measured; on a CPU what its caches hold.
HELD, CPU_HELD = 1 << 28, 1 << 23


class Collected:
    """The pieces of a step: those that wait, and what those before them came to."""

    def __init__(self) -> None:
        self.count = 0
        #: Pieces that wait, and the number of each (of several the first); on a CPU apart from tensors that are one.
        self._pieces: list[Measurand | Growing | PerSequence] = []
        self._numbers: list[int] = []
        self._wholes: list[Tensor] = []
        self._of_wholes: list[int] = []
        self._bytes = 0
        self.measured: list[tuple[Tensor, Tensor]] = []
        self.tables = one_pass.Tables()

    def add(self, piece: Measurand | Growing | PerSequence) -> int:
        """Keep a piece, which nothing may overwrite; its number, or of several the first."""
        number = self.count
        self._pieces.append(piece)
        self._numbers.append(number)
        self.count += piece.count
        self._bytes += piece.nbytes
        if self._bytes >= (HELD if piece.x.is_cuda else CPU_HELD):
            self.flush()
        return number

    def add_whole(self, x: Tensor) -> int:
        """Keep a contiguous tensor, which nothing may overwrite, as one piece; its number."""
        if x.is_cuda:
            return self.add(Measurand(x))
        number = self.count
        self._wholes.append(x)
        self._of_wholes.append(number)
        self.count += 1
        self._bytes += x.nbytes
        if self._bytes >= CPU_HELD:
            self.flush()
        return number

    def flush(self) -> None:
        """Measure those that wait. Their memory is free for what the device is given from now on."""
        if not self._pieces and not self._wholes:
            return
        if self._pieces and self._pieces[0].x.is_cuda:
            self.measured.append(one_pass.measured(self._pieces, self.tables))
        else:
            parts, sums = cpu_pass.measured(self._pieces, self._numbers, self._wholes, self._of_wholes)
            self.measured.append((parts, sums * SIGNED_ODD))
        self._pieces, self._numbers, self._wholes, self._of_wholes, self._bytes = [], [], [], [], 0


def side_by_side(measured: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Parts and checksums of all that was measured, [n, len(PARTS) + 1] int64, to be fetched at once."""
    if not measured:
        return torch.empty((0, len(PARTS) + 1), dtype=torch.int64)
    return torch.cat([torch.cat((parts.view(torch.int64), sums[:, None]), 1) for parts, sums in measured])


def apart(both: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """What stood side by side, on the host: parts [n, len(PARTS)] and checksums [n]."""
    return np.ascontiguousarray(both[:, :-1]).view(np.float64), both[:, -1]
