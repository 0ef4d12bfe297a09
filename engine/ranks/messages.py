"""What a host and its ranks say to each other (torch-free): tagged `msgspec.Struct`s, validated on arrival.

    host → rank     a command; to each rank its own share where there is one (`StagePatch`), else the same to all
    rank → host     `RankReady` once; then one answer a command, or `CommandFailure`

No frame holds more than one tensor, but for the rows of one layer's cache: what a step has captured comes tensor by
tensor before the step's report (`CapturedTensor`), and patches go tensor by tensor before `PutPatches`.

A command class names its answer: `ReadTap(RankCommand[TensorReport])` is answered by a `TensorReport`.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, get_args

from msgspec import Struct, field
from msgspec.msgpack import Decoder

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.ranks.wire import WireArray
from engine.run.results import Phase, SequenceResult, TokenChoice
from engine.run.sampling import Sampling
from engine.taps.breaks import Pause, PauseSpec

A = TypeVar("A")

# --- rank → host ---------------------------------------------------------------------------------------


class RankReady(Struct, frozen=True, tag="ready"):
    """The rank has met the others. `backend` carries their collectives."""

    pid: int
    backend: str


class Done(Struct, frozen=True, tag="done"):
    """The command was carried out."""


class CommandFailure(Struct, frozen=True, tag="failure"):
    """The command raised. `expected`: the message alone tells the user enough."""

    kind: str  # the exception's class
    expected: bool
    message: str
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> CommandFailure:
        """What `error` was."""
        told = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, isinstance(error, EngineError), str(error), told)


class LoadReport(Struct, frozen=True, tag="loaded"):
    """What this rank has loaded, in bytes read, resident at most, and of weights kept."""

    bytes_read: int
    peak_bytes: int
    parameters: int
    weight_bytes: int
    context: int  # tokens that a sequence may have
    unpaged: str | None  # why attention does not read the paged cache directly


class CapturedTensor(Struct, frozen=True, tag="captured"):
    """One tensor that a step has left behind, sent before its `StepReport`."""

    tap: int
    seq: int
    cut: Literal["full", "last"]
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


class PauseReport(Struct, frozen=True, tag="paused"):
    """The rank stands still inside a pass."""

    pause: Pause


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


class LensReport(Struct, frozen=True, tag="lens"):
    """One choice a row; rank 0 only, the others have nothing to tell."""

    layers: list[TokenChoice]


StepOutcome = StepReport | PauseReport | StepAbandoned
Answer = (
    RankReady | Done | CommandFailure | LoadReport | CapturedTensor | StepReport | PauseReport | StepAbandoned
    | TensorReport | WeightsReport | CacheReport | ChecksumReport | LensReport
)  # fmt: skip

# --- host → rank ---------------------------------------------------------------------------------------


class RankCommand(Struct, Generic[A], frozen=True):
    """A command that each rank answers with an A."""


class Ping(RankCommand[Done], frozen=True, tag="ping"):
    """Nothing, to see that the rank answers."""


class Leave(RankCommand[Done], frozen=True, tag="leave"):
    """Leave, also from within a paused pass."""


class LoadModel(RankCommand[LoadReport], frozen=True, tag="load"):
    """Load a checkpoint: each rank its shards only."""

    path: str
    config: EngineConfig
    rules: Mapping[str, str] = {}


class ReplaceRules(RankCommand[Done], frozen=True, tag="rules"):
    """Put other rules in force, from an empty cache and without sequences; `reload` reads the weights anew."""

    rules: Mapping[str, str]
    reload: bool = False


class RebindRules(RankCommand[Done], frozen=True, tag="rebind"):
    """Put other rules in force for the next step and keep the cache as it is; `reload` reads the weights anew."""

    rules: Mapping[str, str]
    reload: bool = False


class WatchTaps(RankCommand[Done], frozen=True, tag="watch"):
    """Set what every step leaves behind: statistics of all taps, tensors of some (tap indices), whole or their last
    token's row."""

    statistics: bool = False
    full: Sequence[int] = ()
    last: Sequence[int] = ()


class AddSequence(RankCommand[Done], frozen=True, tag="add"):
    """A new sequence."""

    seq: int
    ids: Sequence[int]
    sampling: Sampling = Sampling()


class SetSampling(RankCommand[Done], frozen=True, tag="sampling"):
    """Change how a sequence's further tokens are chosen."""

    seq: int
    sampling: Sampling


class RemoveSequence(RankCommand[Done], frozen=True, tag="remove"):
    """A sequence is done."""

    seq: int


class Rewind(RankCommand[Done], frozen=True, tag="rewind"):
    """Go back: keep `lengths[seq]` = (ids, computed tokens, cached rows) of each sequence; the next pass is `step`."""

    lengths: Mapping[int, tuple[int, int, int]]
    step: int


class StagePatch(RankCommand[None], frozen=True, tag="stage"):
    """One patch of this rank's, in its own coordinates; not answered. It is in force from the next `PutPatches` on.
    Bounds are (start, stop) of each dimension; `after` as in `TapPatch`."""

    tap: int
    seq: int
    step: int
    bounds: Sequence[tuple[int, int]]
    value: WireArray
    after: bool = False


class PutPatches(RankCommand[Done], frozen=True, tag="patch"):
    """Replace the patches in force by the `count` staged last."""

    count: int


class RunStep(RankCommand[StepOutcome], frozen=True, tag="step"):
    """One forward pass; `forced[seq]` is the token to go on with, `pause` says where to stop (None: nowhere)."""

    forced: Mapping[int, int] = {}
    pause: PauseSpec | None = None


class ResumeStep(RankCommand[StepOutcome], frozen=True, tag="resume"):
    """Go on in a paused pass."""

    pause: PauseSpec


class AbandonStep(RankCommand[StepOutcome], frozen=True, tag="abandon"):
    """Break a paused pass off."""


class ReadTap(RankCommand[TensorReport], frozen=True, tag="read"):
    """A tensor that has passed in the paused pass."""

    place: int
    seq: int = 0


class ReadWeights(RankCommand[WeightsReport], frozen=True, tag="weights"):
    """Statistics and checksums of all weights; with `compare` the checkpoint is read again for its checksums."""

    compare: bool = False


class ReadWeight(RankCommand[TensorReport], frozen=True, tag="weight"):
    """This rank's share of one weight."""

    name: str


class ReadCache(RankCommand[CacheReport], frozen=True, tag="kv"):
    """Cached keys and values of a sequence in one layer."""

    layer: int
    seq: int = 0


class ChecksumCache(RankCommand[ChecksumReport], frozen=True, tag="kv_checksum"):
    """One number for all that is cached of every sequence."""


class LogitLens(RankCommand[LensReport], frozen=True, tag="lens"):
    """What residual rows [L, hidden] would choose if the final norm and the output head came next."""

    rows: WireArray
    top: int


Command = (
    Ping | Leave | LoadModel | ReplaceRules | RebindRules | WatchTaps | AddSequence | SetSampling | RemoveSequence
    | Rewind | StagePatch | PutPatches | RunStep | ResumeStep | AbandonStep | ReadTap | ReadWeights | ReadWeight
    | ReadCache | ChecksumCache | LogitLens
)  # fmt: skip

COMMANDS: Decoder[Command] = Decoder(Command)
ANSWERS: Decoder[Answer] = Decoder(Answer)


def answers_of(command: RankCommand[A]) -> type[A]:
    """The class (or union of classes) of a command's answer, for isinstance."""
    (base,) = type(command).__orig_bases__  # type: ignore[attr-defined]
    answer: Any
    (answer,) = get_args(base)
    return answer  # type: ignore[no-any-return]
