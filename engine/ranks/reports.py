"""What a rank answers its host (torch-free): tagged `msgspec.Struct`s, validated on arrival.

`RankReady` once; then one answer a command, or `CommandFailure`. What a step has captured comes tensor by tensor
(`CapturedTensor`) before the report of the step or of a pause within it, so that no frame holds more than one tensor.
"""

from __future__ import annotations

import traceback
from typing import Literal

from msgspec import Struct, field
from msgspec.msgpack import Decoder

from lockstep.engine.errors import EngineError
from lockstep.engine.machine import full_gpu
from lockstep.engine.ranks.wire import WireArray
from lockstep.engine.run.results import Phase, SequenceResult, TokenChoice
from lockstep.engine.taps.breaks import Pause


class RankReady(Struct, frozen=True, tag="ready"):
    """The rank has met the others. `backend` carries their collectives."""

    pid: int
    backend: str


class Done(Struct, frozen=True, tag="done"):
    """The command was carried out."""


class CommandFailure(Struct, frozen=True, tag="failure"):
    """The command raised. `expected`: the message alone is enough for the user."""

    kind: str  # the exception's class
    expected: bool
    message: str
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> CommandFailure:
        """What `error` was."""
        reported = "".join(traceback.format_exception(error))
        kind = type(error).__name__
        message = full_gpu(str(error)) if kind == "OutOfMemoryError" else str(error)
        return cls(kind, isinstance(error, EngineError), message, reported)


class LoadReport(Struct, frozen=True, tag="loaded"):
    """What this rank has loaded, in bytes read, held at most (by its GPU, or by the process), and of weights kept."""

    bytes_read: int
    peak_bytes: int
    parameters: int
    weight_bytes: int
    context: int  # tokens that a sequence may have
    unpaged: str | None  # why attention does not read the paged cache directly
    unrepeatable: str | None = None  # why decode steps are not replayed as CUDA graphs


class CapturedTensor(Struct, frozen=True, tag="captured"):
    """One tensor that a step has left behind, sent before its `StepReport`, or before the `PauseReport` that names
    it first."""

    tap: int
    seq: int
    cut: Literal["full", "newest", "last"]
    value: WireArray


class StepReport(Struct, tag="step"):
    """A finished pass. Statistics are [taps, statistics], checksums [taps]; None where they were not asked for."""

    phase: Phase
    seconds: float
    free_blocks: int
    used_blocks: int
    sequences: list[SequenceResult]
    stats: WireArray | None = None
    checksums: WireArray | None = None
    tensors: list[CapturedTensor] = field(
        default_factory=list
    )  # put together by the host, in the order they came


class PausedSequence(Struct, frozen=True):
    """What a paused pass reads of a sequence."""

    seq: int
    ids: list[int]
    positions: list[int]


class PauseReport(Struct, tag="paused"):
    """The rank stands still inside a pass. `stats` [taps, statistics] and `checksums` [taps] are those of the taps that
    have passed, the one that it stands at included (NaN and 0 for the others); `tensors` came since the last pause."""

    pause: Pause
    sequences: list[PausedSequence]
    stats: WireArray | None = None
    checksums: WireArray | None = None
    tensors: list[CapturedTensor] = field(default_factory=list)


class StepAbandoned(Struct, frozen=True, tag="abandoned"):
    """The pass was broken off: no sequence has moved."""


class TensorReport(Struct, frozen=True, tag="tensor"):
    """This rank's part of a tensor."""

    value: WireArray


class RankWeight(Struct, frozen=True):
    """This rank's share of one weight: its statistics in the order of `STATISTICS`. `checkpoint` is the checksum that
    the share has there: None where it was not asked for, or the checkpoint has no such tensor."""

    shape: list[int]
    dtype: str
    stats: list[float]
    checksum: int
    checkpoint: int | None = None

    @property
    def comparison(self) -> str:
        """How the share compares with the checkpoint's: "equal", "different", or "absent" where it has none."""
        if self.checkpoint is None:
            return "absent"
        return "equal" if self.checkpoint == self.checksum else "different"


class WeightsReport(Struct, frozen=True, tag="weights"):
    """This rank's share of every weight, by the checkpoint's names."""

    weights: dict[str, RankWeight]


class CacheReport(Struct, frozen=True, tag="cache"):
    """Cached rows of one sequence in one layer: [kv_len, heads, head_dim] each."""

    keys: WireArray
    values: WireArray


class ChecksumReport(Struct, frozen=True, tag="checksum"):
    """One number for all that this rank has cached."""

    checksum: int


class MemoryReport(Struct, frozen=True, tag="memory"):
    """Bytes that a rank holds of its device's memory, and the most since it was asked before."""

    now: int
    peak: int


class LensReport(Struct, frozen=True, tag="lens"):
    """One choice a row; rank 0 only, the others have nothing to report."""

    layers: list[TokenChoice]


StepOutcome = StepReport | PauseReport | StepAbandoned
Answer = (
    RankReady | Done | CommandFailure | LoadReport | CapturedTensor | StepReport | PauseReport | StepAbandoned
    | TensorReport | WeightsReport | CacheReport | ChecksumReport | LensReport
    | MemoryReport
)  # fmt: skip

ANSWERS: Decoder[Answer] = Decoder(Answer)
