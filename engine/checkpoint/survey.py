"""What a checkpoint holds: per tensor its shape, parts per rank, statistics, what stands out.

Tensors are streamed in slices of bounded size, so that a checkpoint larger than memory can be surveyed. What
stands out is reported as that and no more: Qwen2.5 has k-biases such as -14 and -34, exactly as trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from lockstep.engine.checkpoint.source import DTYPE_BITS, Source, TensorInfo
from lockstep.engine.checkpoint.statistics import CHUNK, Statistics, Tally, modified_z_scores
from lockstep.engine.config import ModelConfig
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.shards import Shard, Span

if TYPE_CHECKING:
    import torch

#: |modified z-score| from which an entry or row is reported to stand out: beyond what a few thousand
#: Laplace-distributed values reach (6.8 for 896 of them).
STANDS_OUT = 8.0
READ_CHUNKS = 16  # chunks read from the file at once
FEWEST = 8  # entries below which "its neighbours" means nothing
MOST_OUTLIERS = 16

QKV_NOTE = (
    "large q/k/v biases are legitimate in Qwen2 and Qwen2.5 (k-biases such as -14 and -34 as published): "
    "compare them with the original checkpoint, never clip them"
)
NOT_FINITE = "no trained weight is NaN or infinite: a damaged file or a failed conversion, and all that it feeds is NaN"
NOTE = "stands out from its neighbours, which is not wrong in itself: compare with the original checkpoint"


@dataclass(frozen=True, slots=True)
class Outlier:
    """An entry of a 1-D tensor, or a row of a larger one (then `value` is the row's rms).

    `score` is the modified z-score. `head` and `channel` show where `index` falls in a q/k/v projection;
    `ranks` hold it.
    """

    index: int
    value: float
    score: float
    head: int | None
    channel: int | None
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSurvey:
    """One tensor. `shards[r]` is rank r's part, empty where the model has no such parameter.

    `statistics` is None where none were asked for or the dtype has no plain values (float4, float6, complex).
    `outliers` holds the strongest, `outlier_count` how many there are; `note` how to read them.
    """

    name: str
    info: TensorInfo
    shards: tuple[Shard, ...]
    statistics: Statistics | None = None
    outliers: tuple[Outlier, ...] = ()
    outlier_count: int = 0
    note: str = ""

    @property
    def not_finite(self) -> int:
        """How many of its values are NaN or infinite; 0 where they were not read."""
        return 0 if self.statistics is None else self.statistics.nan + self.statistics.inf


def survey(
    source: Source,
    model: ModelConfig,
    *,
    tp: int = 1,
    ep: int = 1,
    pattern: str = "*",
    statistics: bool = True,
) -> Iterator[TensorSurvey]:
    """The tensors whose name matches the glob `pattern`, in the forward's order, then those of no parameter.

    Does not verify: a checkpoint that does not fit its configuration can be looked at as well.
    `check_fit` first that `tp` and `ep` suit the model.
    """
    expected = shards.parameters(model)
    order = [
        *(name for name in expected if name in source.names()),
        *sorted(source.names() - expected.keys()),
    ]
    for name in order:
        if not fnmatchcase(name, pattern):
            continue
        info = source.info(name)
        known = name in expected and info.shape == expected[name]
        plans = tuple(shards.plan(name, model, tp, rank, ep) for rank in range(tp)) if known else ()
        if statistics and _has_values(info):
            yield _measured(source, model, name, info, plans)
        else:
            yield TensorSurvey(name, info, plans)


def _has_values(info: TensorInfo) -> bool:
    return DTYPE_BITS.get(info.dtype, 0) >= 8 and info.dtype != "complex64"


def _measured(
    source: Source, model: ModelConfig, name: str, info: TensorInfo, plans: tuple[Shard, ...]
) -> TensorSurvey:
    tally = Tally()
    levels: list[torch.Tensor] = []  # one value an entry (1-D) or a row
    for values in _pieces(source, name, info):
        tally.add(values)
        if values.dim() > 0:
            levels.append(values if values.dim() == 1 else _row_rms(values))
    found = _outliers(model, name, levels, plans) if info.shape and info.shape[0] >= FEWEST else []
    return TensorSurvey(
        name,
        info,
        plans,
        tally.result(),
        tuple(found[:MOST_OUTLIERS]),
        len(found),
        (QKV_NOTE if _qkv_bias(name) else NOTE) if found else "",
    )


def _pieces(source: Source, name: str, info: TensorInfo) -> Iterator[torch.Tensor]:
    """The tensor in slices of whole rows, each of about CHUNK elements, as float64."""
    if not info.shape or not info.numel:
        yield source.read(name).double()
        return
    rows = max(1, CHUNK // (info.numel // info.shape[0]))
    for start in range(0, info.shape[0], READ_CHUNKS * rows):
        stop = min(start + READ_CHUNKS * rows, info.shape[0])
        for piece in source.read(name, 0, Span(start, stop)).split(rows):
            yield piece.double()


def _row_rms(values: torch.Tensor) -> torch.Tensor:
    rows = values.flatten(1)
    rms: torch.Tensor = rows.norm(dim=1) / max(1, rows.shape[1]) ** 0.5
    return rms


def _outliers(
    model: ModelConfig, name: str, levels: list[torch.Tensor], plans: tuple[Shard, ...]
) -> list[Outlier]:
    """Those that stand out, the strongest first."""
    values = levels[0].new_empty(sum(len(part) for part in levels))
    start = 0
    for part in levels:
        values[start : start + len(part)] = part
        start += len(part)
    scores = modified_z_scores(values)
    indices = (scores.abs() > STANDS_OUT).nonzero().flatten()
    strongest = indices[scores[indices].abs().argsort(descending=True, stable=True)]
    in_heads = ".self_attn." in name and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
    return [
        Outlier(
            index,
            float(values[index]),
            float(scores[index]),
            index // model.head_dim if in_heads else None,
            index % model.head_dim if in_heads else None,
            _holders(index, plans),
        )
        for index in map(int, strongest.tolist())
    ]


def _holders(index: int, plans: tuple[Shard, ...]) -> tuple[int, ...]:
    """The ranks that hold (a part of) row `index`."""
    return tuple(
        rank
        for rank, shard in enumerate(plans)
        if shard.dim != 0 or shard.span.start <= index < shard.span.stop
    )


def _qkv_bias(name: str) -> bool:
    return name.endswith((".q_proj.bias", ".k_proj.bias", ".v_proj.bias"))
