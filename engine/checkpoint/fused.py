"""Tensors that a checkpoint holds stacked, as the model's own: q, k and v of `qkv_proj`, gate and up of `gate_up_proj`,
the matrices of all experts. Loads torch when a tensor is read."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lockstep.engine.checkpoint.safetensors import SafetensorsSource
from lockstep.engine.checkpoint.source import TensorInfo
from lockstep.engine.checkpoint.stacks import Place, whole_stacks
from lockstep.engine.config import ModelConfig
from lockstep.engine.parallel.shards import Span

if TYPE_CHECKING:
    import torch


class UnstackedSource:
    """`source` with the stacked tensors as their parts. A stack of another shape stays as it is, and is refused."""

    def __init__(self, source: SafetensorsSource, model: ModelConfig) -> None:
        self._source = source
        there = source.names()
        self._parts = whole_stacks(model, {name: source.info(name).shape for name in there})
        self._names = (there - {place.tensor for place in self._parts.values()}) | self._parts.keys()

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
        place = self._parts[name]
        return replace(self._source.info(place.tensor), shape=place.parameter_shape)

    def read(self, name: str, dim: int | None = None, span: Span | None = None) -> torch.Tensor:
        """As the source does."""
        if name not in self._parts:
            return self._source.read(name, dim, span)
        place = self._parts[name]
        rows, columns = place.rows, span if dim == 1 else None
        if not place.transposed and len(place.parameter_shape) > 1:
            own = span if dim == 0 and span is not None else Span(0, place.parameter_shape[0])
            return self._read_pieces(place, own, columns)
        if dim == 0 and span is not None:
            rows = Span(
                rows.start + span.start * place.step, min(rows.start + span.stop * place.step, rows.stop)
            )
        if len(place.parameter_shape) == 1:  # vectors are small
            vector = (
                self._source.read(place.tensor)
                if place.matrix is None
                else self._source.read(place.tensor, 0, Span(place.matrix, place.matrix + 1)).flatten()
            )
            return vector[rows.start : rows.stop : place.step].contiguous()
        columns = Span(0, place.parameter_shape[1]) if columns is None else columns
        found = self._source.read_matrix(place.tensor, columns, rows, place.matrix)
        return found.T[:: place.step].contiguous()

    def _read_pieces(self, place: Place, rows: Span, columns: Span | None) -> torch.Tensor:
        """Rows of a matrix, which may lie head by head in the tensor."""
        pieces = [
            self._source.read_matrix(place.tensor, piece, columns, place.matrix)
            for piece in place.pieces(rows)
        ]
        if len(pieces) == 1:
            return pieces[0]
        import torch  # whoever asks for tensors has it loaded

        return torch.cat(pieces)

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
