"""The pieces of a step that wait to be measured together, without being copied: on a GPU, and on a CPU by kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.engine.taps import cpu_pass, one_pass
from lockstep.engine.taps.measurands import SIGNED_ODD, Measurand, Piece
from lockstep.engine.taps.parts import PARTS

#: Bytes of tensors that are kept until they are measured; on a CPU what its caches hold.
HELD, CPU_HELD = 1 << 28, 1 << 23


class Collected:
    """The pieces of a step: those that wait, and what those before them came to."""

    def __init__(self) -> None:
        self.count = 0
        self._pieces: list[Piece | Tensor] = []
        self._bytes = 0
        self.measured: list[tuple[Tensor, Tensor]] = []
        self.tables = one_pass.Tables()

    def add(self, piece: Piece) -> int:
        """Keep a piece, which nothing may overwrite; its number, or of several the first."""
        return self._keep(piece, piece.count, piece.nbytes, piece.x.is_cuda)

    def add_whole(self, x: Tensor) -> int:
        """Keep a contiguous tensor, which nothing may overwrite, as one piece; its number. There is no record of it: a
        step has hundreds."""
        return self._keep(x, 1, x.nbytes, x.is_cuda)

    def _keep(self, piece: Piece | Tensor, count: int, nbytes: int, on_gpu: bool) -> int:
        number = self.count
        self._pieces.append(piece)
        self.count += count
        self._bytes += nbytes
        if self._bytes >= (HELD if on_gpu else CPU_HELD):
            self.flush()
        return number

    def flush(self) -> None:
        """Measure those that wait. Their memory is free for what the device is given from now on."""
        if not self._pieces:
            return
        first = self._pieces[0]
        if (first if isinstance(first, Tensor) else first.x).is_cuda:
            pieces = [Measurand(one) if isinstance(one, Tensor) else one for one in self._pieces]
            self.measured.append(one_pass.measured(pieces, self.tables))
        else:
            parts, sums = cpu_pass.measured(self._pieces)
            self.measured.append((parts, sums * SIGNED_ODD))
        self._pieces, self._bytes = [], 0


def side_by_side(measured: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Parts and checksums of all that was measured, [n, len(PARTS) + 1] int64, to be fetched at once."""
    if not measured:
        return torch.empty((0, len(PARTS) + 1), dtype=torch.int64)
    return torch.cat([torch.cat((parts.view(torch.int64), sums[:, None]), 1) for parts, sums in measured])


def apart(both: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """What stood side by side, on the host: parts [n, len(PARTS)] and checksums [n]."""
    return np.ascontiguousarray(both[:, :-1]).view(np.float64), both[:, -1]
