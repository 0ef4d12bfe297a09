"""The runner's state of each sequence, and the result of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.run.results import Phase, SequenceResult
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.taps.hub import Captured


@dataclass(slots=True)
class Sequence:
    """One request: every token so far, how many were run, and how many cache rows it has.

    `computed` counts tokens that went through a forward; `kv_len` counts the cache rows that its blocks are
    for; `held` [layers] shows how far each layer's cache reaches, by what was written to it. All are equal
    unless something is wrong with positions or with the cache. `passes` are the tokens computed by the end of each.
    """

    id: int
    ids: list[int]
    sampling: Sampling
    held: list[int]
    prompt_length: int
    computed: int = 0
    kv_len: int = 0
    passes: list[int] = field(default_factory=list)

    @property
    def decodes(self) -> bool:
        """Whether its prompt was read: what it reads next is a token that it has emitted."""
        return self.computed >= self.prompt_length


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one forward pass on this rank."""

    phase: Phase
    sequences: list[SequenceResult]
    seconds: float
    free_blocks: int
    used_blocks: int
    stats: NDArray[np.float32] | None
    checksums: NDArray[np.uint64] | None
    captured: list[Captured] = field(default_factory=list)
