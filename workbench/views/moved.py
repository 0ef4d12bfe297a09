"""The statistics of two runs of one tap: which of them has moved most. For where no tensors were captured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.records import STATISTICS

#: The relative L2 error that rounding alone may make, by dtype: coarse, for where no noise floor was measured.
ROUNDING = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1.5e-2, "float16": 2e-3}

_ABSMAX, _RMS, _ZEROS = (STATISTICS.index(name) for name in ("absmax", "rms", "zeros"))
_COUNTS = [STATISTICS.index("nan"), STATISTICS.index("inf")]


@dataclass(frozen=True, slots=True)
class MovedStatistic:
    """One statistic of a tap on one rank, in two runs. `share` is its change measured by the greatest element; it is
    infinite where another number of elements is NaN or Inf."""

    name: str
    rank: int
    ours: float
    theirs: float
    share: float


def most_moved(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> MovedStatistic:
    """The statistic [ranks, 8] that differs most; the first rank's rms where none does."""
    left, right = ours.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(all="ignore"):
        scale = np.maximum(left[:, _ABSMAX], right[:, _ABSMAX])[:, None]
        by = np.nan_to_num(np.abs(left - right) / scale, nan=0.0)
    by[:, _COUNTS] = np.where(left[:, _COUNTS] != right[:, _COUNTS], np.inf, 0.0)
    by[:, _ZEROS] = 0.0
    rank, which = (int(i) for i in np.unravel_index(int(by.argmax()), by.shape))
    if by[rank, which] == 0:
        rank, which = 0, _RMS
    return MovedStatistic(
        STATISTICS[which],
        rank,
        float(left[rank, which]),
        float(right[rank, which]),
        float(by[rank, which]),
    )
