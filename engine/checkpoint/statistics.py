"""Statistics of a tensor that comes in pieces, and robust scores. Does not import torch itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Elements measured at a time: as float64 they stay in a core's cache.
CHUNK = 1 << 18

#: The normal distribution's 0.75 quantile: turns a median absolute deviation into a σ.
_MAD_TO_SIGMA = 0.6744897501960817
#: The same for the mean absolute deviation, sqrt(2/π).
_MEAN_AD_TO_SIGMA = math.sqrt(2 / math.pi)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Minimum to absmax are over the finite elements (NaN where there are none); `std` is the population's."""

    count: int
    min: float
    max: float
    mean: float
    std: float
    absmax: float
    nan: int
    inf: int
    zeros: int


class Tally:
    """Accumulates float64 pieces; mean and variance by the update of Chan, Golub and LeVeque (1979)."""

    def __init__(self) -> None:
        self._count = self._finite = self._nan = self._inf = self._zeros = 0
        self._min, self._max = math.inf, -math.inf
        self._mean = self._squares = 0.0  # of the finite ones: mean, sum of squared deviations

    def add(self, piece: torch.Tensor) -> None:
        """Count in one more piece (any shape, float64)."""
        self._count += piece.numel()
        self._zeros += piece.numel() - int(piece.count_nonzero())
        is_finite = piece.isfinite()
        new = int(is_finite.sum())
        finite = piece
        if new < piece.numel():
            self._nan += int(piece.isnan().sum())
            self._inf += int(piece.isinf().sum())
            finite = piece[is_finite]
        if new == 0:
            return
        low, high = finite.aminmax()
        self._min, self._max = min(self._min, float(low)), max(self._max, float(high))
        mean, squares = float(finite.mean()), float(finite.var(correction=0)) * new
        delta, total = mean - self._mean, self._finite + new
        self._squares += squares + delta * delta * self._finite * new / total
        self._mean += delta * new / total
        self._finite = total

    def result(self) -> Statistics:
        """The statistics of all pieces."""
        some = self._finite > 0
        return Statistics(
            count=self._count,
            min=self._min if some else math.nan,
            max=self._max if some else math.nan,
            mean=self._mean if some else math.nan,
            std=math.sqrt(self._squares / self._finite) if some else math.nan,
            absmax=max(abs(self._min), abs(self._max)) if some else math.nan,
            nan=self._nan,
            inf=self._inf,
            zeros=self._zeros,
        )


def modified_z_scores(values: torch.Tensor) -> torch.Tensor:
    """Distance of each value from the median in robust standard deviations (Iglewicz and Hoaglin, 1993).

    `values` is 1-D float64. The scale is the median absolute deviation or, where more than half of the values
    are equal, the mean absolute deviation; where all are equal, every score is 0. Values that are not finite
    score 0: they are counted elsewhere, and are no question of distance.
    """
    finite = values.isfinite()
    scores = values.new_zeros(values.shape)
    known = values[finite]
    if known.numel() == 0:
        return scores
    distance = known - known.median()
    scale = float(distance.abs().median()) / _MAD_TO_SIGMA or float(distance.abs().mean()) / _MEAN_AD_TO_SIGMA
    if scale > 0:
        scores[finite] = distance / scale
    return scores
