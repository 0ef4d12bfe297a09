"""The values of one parameter, read from the checkpoint without torch: statistics, a histogram, what stands out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.checkpoint.gguf.source import GgufSource
from lockstep.engine.checkpoint.header import read_header
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.checkpoint.source import Source
from lockstep.engine.checkpoint.survey import NOTE, QKV_NOTE, STANDS_OUT
from lockstep.engine.config import ModelConfig
from lockstep.engine.errors import EngineError
from lockstep.sessions.text import clean
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.tensor import TensorFigures, tensor_figures

#: The most elements of one tensor that are read to be measured: more are sampled by rows, which is reported.
_MOST = 8_000_000
_BINS = 60
_EXTREMES = 12
#: How the file's dtypes lie in numpy, which has no bfloat16.
_NUMPY = {"float32": "<f4", "float16": "<f2", "float64": "<f8", "bfloat16": "<u2"}


@dataclass(frozen=True, slots=True)
class Extreme:
    """An element far from its neighbours."""

    index: int
    value: float
    place: str
    rank: int | None


@dataclass(frozen=True, slots=True, eq=False)
class ParameterValues:
    """One parameter's values: statistics with a histogram, extremes; `matrix` is what was read (2-D) for a heatmap,
    a head a row where it `is_strip`: a q/k/v bias."""

    name: str
    figures: TensorFigures
    extremes: tuple[Extreme, ...]
    matrix: NDArray[np.float32]
    is_strip: bool
    sampled: str
    note: str


def parameter_values(source: SessionSource, name: str) -> ParameterValues | None:
    """The values of one parameter; None where they cannot be read."""
    path = source.model_path
    if path is None:
        return None
    try:
        model, checkpoint = open_checkpoint(path)
        with checkpoint:
            values, sampled = read_values(checkpoint, name)
            shape = checkpoint.info(name).shape
    except (EngineError, KeyError):
        return None
    if not values.size:
        return None
    flat = values.reshape(-1)
    head_dim = _head_dim(model, name, shape)
    rows = flat.size // head_dim if head_dim else values.shape[0] if values.ndim > 1 else 1
    extremes = _extremes(flat, head_dim, source.session.ranks) if len(shape) == 1 else _rows(values)
    return ParameterValues(
        name=clean(name, limit=120),
        figures=tensor_figures(flat, _BINS),
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


def read_values(checkpoint: Source, name: str) -> tuple[NDArray[np.float32], str]:
    """The values of a tensor as float32, of evenly spaced rows where there are too many. KeyError for a dtype that has
    no plain values."""
    info = checkpoint.info(name)
    step = max(1, -(-info.numel // _MOST))
    sampled = f"of every {step}th row" if step > 1 else ""
    if isinstance(checkpoint, GgufSource):
        return checkpoint.rows(name, step), sampled
    if info.dtype not in _NUMPY:
        raise KeyError(f"{info.dtype} values cannot be shown")
    start = read_header(info.file).entries[info.stored_as or name].start
    if not info.numel:
        return np.empty(info.shape, np.float32), ""
    mapped: NDArray[np.generic] = np.memmap(info.file, np.dtype(_NUMPY[info.dtype]), "r", start, info.shape)
    raw = np.array(mapped[::step] if step > 1 else mapped)
    if info.dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32), sampled
    return raw.astype(np.float32), sampled


def _rows(values: NDArray[np.float32]) -> tuple[Extreme, ...]:
    """The rows of a matrix whose rms stands out."""
    level = np.sqrt((values.reshape(len(values), -1).astype(np.float64) ** 2).mean(axis=1))
    return tuple(
        Extreme(i, value, f"rms of row {i}", None) for i, value in _standing_out(level.astype(np.float32))
    )


def _extremes(flat: NDArray[np.float32], head_dim: int, ranks: int) -> tuple[Extreme, ...]:
    """The elements of a vector that stand out."""
    return tuple(
        Extreme(
            i,
            value,
            f"head {i // head_dim}, channel {i % head_dim}" if head_dim else f"index {i}",
            i * ranks // flat.size if head_dim and (flat.size // head_dim) % ranks == 0 else None,
        )
        for i, value in _standing_out(flat)
    )


def _standing_out(flat: NDArray[np.float32]) -> list[tuple[int, float]]:
    """Index and value of those whose modified z-score is out of the ordinary, strongest first."""
    finite = flat[np.isfinite(flat)]
    if not finite.size:
        return []
    middle = float(np.median(finite))
    spread = float(np.median(np.abs(finite - middle))) or float(np.abs(finite - middle).mean()) * 0.8
    if spread == 0:
        return []
    score = np.where(np.isfinite(flat), 0.6745 * np.abs(flat - middle) / spread, 0)
    return [(int(i), float(flat[i])) for i in np.argsort(-score)[:_EXTREMES] if score[i] >= STANDS_OUT]
