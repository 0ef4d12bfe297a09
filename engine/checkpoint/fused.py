"""Tensors that a checkpoint holds stacked, as the model's own: q, k and v of `qkv_proj`, gate and up of `gate_up_proj`.
Loads torch when a tensor is read."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lockstep.engine.checkpoint.source import Source, TensorInfo
from lockstep.engine.config import ModelConfig
from lockstep.engine.graph.checkpoint_names import FUSED
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.shards import Span

if TYPE_CHECKING:
    import torch


def stored_in(model: ModelConfig) -> dict[str, tuple[str, Span]]:
    """Parameter -> the checkpoint's tensor that holds it, and in which rows; of those that are stacked."""
    rows = {name: shape[0] for name, shape in shards.layer_parameters(model).items()}
    found: dict[str, tuple[str, Span]] = {}
    for whole, parts in FUSED.get(model.family, {}).items():
        start = 0
        for part in (f"{one}.weight" for one in parts):
            span = Span(start, start + rows[part])
            for i in range(model.num_layers):
                found[f"model.layers.{i}.{part}"] = f"model.layers.{i}.{whole}.weight", span
            start = span.stop
    return found


class UnstackedSource:
    """`source` with the stacked tensors as their parts. A stack of another height stays as it is, and is refused."""

    def __init__(self, source: Source, model: ModelConfig) -> None:
        self._source = source
        stacked = stored_in(model)
        heights: dict[str, int] = {}
        for whole, span in stacked.values():
            heights[whole] = max(heights.get(whole, 0), span.stop)
        there = source.names()
        right = {
            whole
            for whole, rows in heights.items()
            if whole in there and source.info(whole).shape[:1] == (rows,)
        }
        self._parts = {name: place for name, place in stacked.items() if place[0] in right}
        self._names = (there - right) | self._parts.keys()

    @property
    def bytes_read(self) -> int:
        """As the source's."""
        return self._source.bytes_read

    def names(self) -> set[str]:
        """The tensors, those of stacks one by one."""
        return set(self._names)

    def info(self, name: str) -> TensorInfo:
        """Of a part: its own shape."""
        if name not in self._parts:
            return self._source.info(name)
        whole, span = self._parts[name]
        info = self._source.info(whole)
        return replace(info, shape=(span.size, *info.shape[1:]))

    def read(self, name: str, dim: int | None = None, span: Span | None = None) -> torch.Tensor:
        """As the source does."""
        if name not in self._parts:
            return self._source.read(name, dim, span)
        whole, rows = self._parts[name]
        if dim != 0 or span is None:
            part = self._source.read(whole, 0, rows)
            return (
                part if dim is None or span is None else part.narrow(dim, span.start, span.size).contiguous()
            )
        return self._source.read(
            whole, 0, Span(rows.start + span.start, min(rows.start + span.stop, rows.stop))
        )

    def digest(self) -> str:
        """The checkpoint's own."""
        return self._source.digest()

    def close(self) -> None:
        """Release the files."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
