"""What a runner keeps of each request, and what a forward pass tells of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.sampler import Choice
from engine.sampling import Sampling
from engine.taps.hub import Captured


@dataclass(slots=True)
class Sequence:
    """One request: every token so far, how many were run, and how many cache rows are valid.

    `computed` counts tokens that went through a forward; `kv_len` counts cached positions. They are
    equal unless something is wrong with positions.
    """

    id: int
    ids: list[int]
    sampling: Sampling
    computed: int = 0
    kv_len: int = 0


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What a pass did to one sequence; `emitted` is None inside a chunked prefill."""

    seq: int
    ids: list[int]
    positions: list[int]
    kv_len: int
    expected_kv_len: int
    block_table: list[int]
    emitted: int | None
    forced: bool
    choice: Choice | None  # rank 0 only


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one forward pass left behind on this rank."""

    phase: str
    sequences: list[SequenceResult]
    seconds: float
    free_blocks: int
    used_blocks: int
    stats: NDArray[np.float32] | None
    checksums: NDArray[np.uint64] | None
    captured: list[Captured] = field(default_factory=list)
