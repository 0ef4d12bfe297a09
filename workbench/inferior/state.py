"""What an inferior knows of its sequences, and where it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.run.sampling import Sampling
from lockstep.sessions.records import SequenceStep


@dataclass(frozen=True, slots=True)
class Paused:
    """All ranks stand at one tap inside a pass."""

    place: int
    reason: str  # "step" | "breakpoint" | "interrupt"
    breaks: tuple[int, ...]  # ids of the breaks that hit
    ranks: tuple[int, ...]  # ranks on which one hit
    names: tuple[Mapping[str, float], ...] = ()  # each rank's statistics of that tap, and where it stands
    sequences: Sequence[SequenceStep] = ()  # what the pass reads
    kv_lens: Sequence[Mapping[int, int]] = ()  # each rank's rows of each sequence; see `Pause`
    #: [taps, ranks, statistics] of what has passed by now (NaN: not yet); None where none are measured.
    stats: NDArray[np.float32] | None = None


@dataclass(slots=True)
class SequenceState:
    """What the host knows of one sequence: enough to run it again from the start."""

    ids: list[int]  # prompt and emitted tokens
    prompt_length: int
    sampling: Sampling
    lengths: list[tuple[int, int, int]] = field(default_factory=list)  # (ids, computed, cached) after each
