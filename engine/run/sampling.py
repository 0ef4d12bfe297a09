"""Sampling parameters of a sequence. Torch-free: the host uses them as well."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.engine.errors import RequestError

#: Seeds and counts travel as signed 64-bit integers.
LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature 0 is greedy; top_k 0 and top_p 1 are off. RequestError for values out of range."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or math.isinf(self.temperature):
            raise RequestError(f"temperature must be a finite number >= 0, not {self.temperature}")
        if not 0 <= self.top_k <= LARGEST:
            raise RequestError(f"top-k must be from 0 (off) to {LARGEST}, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top-p must be in (0, 1], not {self.top_p}")
        if abs(self.seed) > LARGEST:
            raise RequestError(f"the seed must be from {-LARGEST} to {LARGEST}, not {self.seed}")
