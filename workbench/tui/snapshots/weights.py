"""Parameters as the checkpoint has them and as the ranks hold them. Read without torch: bytes, numpy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.header import Entry, read_header
from engine.checkpoint.resolve import open_checkpoint
from engine.checkpoint.survey import NOTE, QKV_NOTE, STANDS_OUT, survey
from engine.config import ModelConfig
from engine.errors import EngineError
from sessions.text import clean
from workbench.tui.snapshots.overview import Where
from workbench.tui.snapshots.source import Source

#: The most elements of one tensor that are read to be measured: more are sampled by rows, and said so.
_MOST = 8_000_000
_BINS = 60
_NUMPY = {"float32": "<f4", "float16": "<f2", "float64": "<f8", "bfloat16": "<u2"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: its global shape, and which part each rank holds ("rows 0:128", "whole")."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """All parameters of the session's checkpoint; `problem` says why there are none."""

    parameters: tuple[Parameter, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Extreme:
    """An element far from its neighbours."""

    index: int
    value: float
    place: str
    rank: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """One parameter's values: statistics, histogram (`counts` between `edges`), extremes; `strip[heads,
    head_dim]` for a q/k/v bias; `matrix` of what was read (2-D) for a heatmap."""

    name: str
    minimum: float
    maximum: float
    mean: float
    deviation: float
    nan: int
    zeros: int
    counts: tuple[int, ...]
    edges: tuple[float, float]
    extremes: tuple[Extreme, ...]
    matrix: NDArray[np.float32]
    is_strip: bool
    sampled: str
    note: str


def weights(source: Source, where: Where) -> Weights:
    """The parameters of the checkpoint that the session was made from, if it is still there."""
    path = source.meta.get("model_path")
    if not isinstance(path, str) or not Path(path).exists():
        return Weights((), "The checkpoint of this session is not on this machine.")
    try:
        model, checkpoint = open_checkpoint(Path(path))
        with checkpoint:
            found = tuple(
                Parameter(
                    clean(item.name, limit=120),
                    item.info.shape,
                    item.info.dtype,
                    tuple(_part(shard.dim, shard.span.start, shard.span.stop) for shard in item.shards),
                )
                for item in survey(checkpoint, model, tp=source.session.ranks, statistics=False)
            )
    except EngineError as error:
        return Weights((), clean(str(error), limit=400))
    return Weights(found)


def _part(dim: int | None, start: int, stop: int) -> str:
    if dim is None:
        return "whole"
    return f"{'rows' if dim == 0 else 'cols'} {start}:{stop}"


def measured(source: Source, where: Where, name: str) -> Measured | None:
    """The values of one parameter; None where they cannot be read."""
    path = Path(str(source.meta.get("model_path")))
    try:
        model, checkpoint = open_checkpoint(path)
        with checkpoint:
            info = checkpoint.info(name)
        entry = read_header(info.file).entries[name]
    except (EngineError, KeyError):
        return None
    if info.dtype not in _NUMPY or not info.numel:
        return None
    values, sampled = _read(info.file, entry, info.dtype)
    flat = values.reshape(-1)
    finite = flat[np.isfinite(flat)]
    if not finite.size:
        return None
    low, high = float(finite.min()), float(finite.max())
    counts, _ = np.histogram(finite, bins=_BINS, range=(low, high if high > low else low + 1))
    head_dim = _head_dim(model, name, info.shape)
    rows = flat.size // head_dim if head_dim else values.shape[0] if values.ndim > 1 else 1
    extremes = _extremes(flat, head_dim, source.session.ranks) if len(info.shape) == 1 else ()
    return Measured(
        name=clean(name, limit=120),
        minimum=low,
        maximum=high,
        mean=float(finite.mean()),
        deviation=float(finite.std()),
        nan=int(np.isnan(flat).sum()),
        zeros=int((flat == 0).sum()),
        counts=tuple(int(c) for c in counts),
        edges=(low, high),
        extremes=extremes,
        matrix=flat.reshape(rows, -1),
        is_strip=bool(head_dim),
        sampled=sampled,
        note=(QKV_NOTE if head_dim else NOTE) if extremes else "",
    )


def _head_dim(model: ModelConfig, name: str, shape: tuple[int, ...]) -> int:
    """The width of a head where `name` is a q/k/v bias, else 0."""
    projection = any(part in name for part in ("q_proj.bias", "k_proj.bias", "v_proj.bias"))
    return model.head_dim if projection and len(shape) == 1 and shape[0] % model.head_dim == 0 else 0


def _read(file: Path, entry: Entry, dtype: str) -> tuple[NDArray[np.float32], str]:
    """The values as float32, of evenly spaced rows where there are too many."""
    kind = np.dtype(_NUMPY[dtype])
    mapped: NDArray[np.generic] = np.memmap(file, kind, "r", entry.start, entry.shape)
    sampled = ""
    if mapped.size > _MOST:
        step = -(-mapped.size // _MOST)
        sampled = f"of every {step}th row"
        mapped = mapped[::step]
    raw = np.array(mapped)
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32), sampled
    return raw.astype(np.float32), sampled


def _extremes(flat: NDArray[np.float32], head_dim: int, ranks: int) -> tuple[Extreme, ...]:
    """The elements whose modified z-score stands out, strongest first."""
    middle = float(np.median(flat))
    spread = float(np.median(np.abs(flat - middle))) or float(np.abs(flat - middle).mean()) * 0.8
    if spread == 0:
        return ()
    score = 0.6745 * np.abs(flat - middle) / spread
    strongest = [int(i) for i in np.argsort(-score)[:12] if score[i] >= STANDS_OUT]
    return tuple(
        Extreme(
            i,
            float(flat[i]),
            f"head {i // head_dim}, channel {i % head_dim}" if head_dim else f"index {i}",
            i * ranks // flat.size if head_dim and (flat.size // head_dim) % ranks == 0 else None,
        )
        for i in strongest
    )
