"""What a host sends its ranks (torch-free): tagged `msgspec.Struct`s, validated on arrival.

The same to all of them, but for `StagePatch`: each rank gets its own share, one tensor a frame, before `PutPatches`.
A command class names its answer: `ReadTap(RankCommand[TensorReport])` is answered by a `TensorReport`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, get_args

from msgspec import Struct
from msgspec.msgpack import Decoder

from lockstep.engine.config import EngineConfig
from lockstep.engine.ranks.reports import (
    CacheReport,
    ChecksumReport,
    Done,
    LensReport,
    LoadReport,
    MemoryReport,
    StepOutcome,
    TensorReport,
    WeightsReport,
)
from lockstep.engine.ranks.wire import WireArray
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.taps.breaks import PauseSpec

A = TypeVar("A")


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
    token's row; of attention as many of the newest rows as all ranks together can hand over in `rows_bytes`.
    `newest`: attention by `taps.names.newest_rows`."""

    statistics: bool = False
    full: Sequence[int] = ()
    last: Sequence[int] = ()
    rows_bytes: int | None = None  # as float16; None: the last token's row alone
    newest: Sequence[int] = ()


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


class DraftTokens(RankCommand[Done], frozen=True, tag="draft"):
    """Tokens that a sequence goes on with: its next pass reads all that it has not read yet."""

    seq: int
    ids: Sequence[int]


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
    """One forward pass; `forced[seq]` is the token to go on with, `pause` states where to stop (None: nowhere)."""

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


class MeasureMemory(RankCommand[MemoryReport], frozen=True, tag="memory"):
    """What this rank holds of its device's memory, and the most since it was asked before."""


class ChecksumCache(RankCommand[ChecksumReport], frozen=True, tag="kv_checksum"):
    """One number for all that is cached of every sequence."""


class LogitLens(RankCommand[LensReport], frozen=True, tag="lens"):
    """What residual rows [L, hidden] would choose if the final norm and the output head came next."""

    rows: WireArray
    top: int


Command = (
    Ping | Leave | LoadModel | ReplaceRules | RebindRules | WatchTaps | AddSequence | SetSampling | RemoveSequence
    | Rewind | DraftTokens | StagePatch | PutPatches | RunStep | ResumeStep | AbandonStep | ReadTap | ReadWeights
    | ReadWeight | ReadCache | ChecksumCache | LogitLens | MeasureMemory
)  # fmt: skip

COMMANDS: Decoder[Command] = Decoder(Command)


def answers_of(command: RankCommand[A]) -> type[A]:
    """The class (or union of classes) of a command's answer, for isinstance."""
    (base,) = type(command).__orig_bases__  # type: ignore[attr-defined]
    answer: Any
    (answer,) = get_args(base)
    return answer  # type: ignore[no-any-return]
