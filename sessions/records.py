"""What a session holds, as plain values: the vocabulary of the writer, the reader and the diff.

Arrays are numpy; no torch, no engine. One *step* is one forward pass of every sequence in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Order of the last axis of `StepRecord.stats`.
STATISTICS = ("min", "max", "mean", "rms", "absmax", "nan", "inf", "zeros")

#: Layers that a model may have.
MAX_LAYERS = 1024

JSON = Any  # None, bool, int, float, str, list, dict


@dataclass(frozen=True, slots=True)
class Tap:
    """A tap that the session knows: its position in the statistics array, its name, its layout string
    (`replicate`, `partial`, `shard(DIM)` or `shard(DIM,replicas=N)`)."""

    index: int
    name: str
    layout: str


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SequenceStep:
    """What one forward pass did to one sequence of the batch.

    `ids` went in at `positions`; `kv_lens[rank][layer]` rows are cached afterwards (empty: not
    known); `block_table` names the pool's blocks in order;
    `emitted` is the token chosen from the last row (None inside a chunked prefill); `forced` indicates that it
    was given, not sampled; top-k are ids and raw logits, descending; `logsumexp` is the natural-log normaliser
    of those logits, from which probabilities follow.
    """

    seq: int
    ids: Sequence[int]
    positions: Sequence[int]
    kv_lens: Sequence[Sequence[int]]
    block_table: Sequence[int] = ()
    emitted: int | None = None
    forced: bool = False
    topk_ids: Sequence[int] = ()
    topk_logits: Sequence[float] = ()
    logsumexp: float | None = None
    entropy: float | None = None


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One captured tensor of one tap on one rank for one sequence. `dtype` is the engine's
    ("float32", "bfloat16", "float16", …); the array holds it exactly (bfloat16 travels as uint16).
    `slice` states what part of the whole it is when it was cut ("" = whole)."""

    tap: str
    rank: int
    seq: int
    array: NDArray[Any]
    dtype: str
    slice: str = ""


@dataclass(frozen=True, slots=True)
class TensorKey:
    """Where one captured tensor stands in a session, and what it is: its shape as captured, `slice` "" = whole."""

    tap: str
    step: int
    rank: int
    seq: int
    slice: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one branch. `stats[taps, ranks, len(STATISTICS)]` float32 and `checksums[taps, ranks]`
    uint64 follow the session's tap order; a tap that did not run is NaN with checksum 0."""

    step: int
    phase: str  # "prefill" | "decode"
    sequences: Sequence[SequenceStep]
    wall_seconds: float
    stats: NDArray[np.float32] | None = None
    checksums: NDArray[np.uint64] | None = None
    tensors: Sequence[TensorRecord] = ()
    free_blocks: int | None = None
    used_blocks: int | None = None
    dropped: Sequence[str] = ()  # a line for each thing that the capture budget left out


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that has stopped at the tap `place` (an index) and is not over: what has passed by now, that tap included.

    Arrays as in `StepRecord`; of a sequence only its ids and positions are known.
    """

    step: int
    place: int
    sequences: Sequence[SequenceStep]
    stats: NDArray[np.float32] | None = None
    checksums: NDArray[np.uint64] | None = None
    tensors: Sequence[TensorRecord] = ()


@dataclass(frozen=True, slots=True)
class Branch:
    """A line of history. It shares every step before `fork_step` with its parent."""

    id: int
    name: str
    parent: int | None
    fork_step: int
    rules: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, in order: a command, a stop, a note. `data` is JSON."""

    id: int
    branch: int
    step: int
    kind: str  # "command" | "stop" | "note" | "error" | …
    text: str
    data: JSON = None


@dataclass(frozen=True, slots=True)
class VerdictRecord:
    """One judged tap: what `check`, `golden` or `diagnose` found. `detail` is JSON (metrics, floor, rank)."""

    branch: int
    step: int
    tap: str
    verdict: str  # "pass" | "suspect" | "fail" | "absent"
    detail: JSON = None
