"""Tensors that a checkpoint holds stacked, as the model's own: q, k and v of `qkv_proj`, gate and up of `gate_up_proj`,
the matrices of all experts, also in MXFP4 blocks. Loads torch when a tensor is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lockstep.engine.checkpoint.mxfp4 import BLOCKS, SCALES, PackedRows, packed_stacks
from lockstep.engine.checkpoint.safetensors import SafetensorsSource
from lockstep.engine.checkpoint.source import TensorInfo
from lockstep.engine.checkpoint.stacks import Place, whole_stacks
from lockstep.engine.config import ModelConfig
from lockstep.engine.parallel.shards import Span

if TYPE_CHECKING:
    import torch

    Piece = torch.Tensor | PackedRows


class _Interleaved:
    """What was read of a stack in which two parameters lie in turn, until the second of them is asked for: of one
    matrix and one vector."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[object, dict[object, Piece]]] = {}

    def take(self, place: Place, part: object, read: Callable[[], Piece]) -> Piece:
        """The piece `part` of the stack: what `read` gives, or has given the first time."""
        kind, stack = len(place.parameter_shape), (place.tensor, place.matrix)
        kept = self._read.get(kind)
        if kept is None or kept[0] != stack:
            kept = self._read[kind] = stack, {}
        if part in kept[1]:
            return kept[1].pop(part)
        piece = kept[1][part] = read()
        return piece


class UnstackedSource:
    """`source` with the stacked tensors as their parts. A stack of another shape stays as it is, and is refused."""

    def __init__(self, source: SafetensorsSource, model: ModelConfig) -> None:
        self._source, self._interleaved = source, _Interleaved()
        there = source.names()
        infos = {name: source.info(name) for name in there}
        packed = packed_stacks(infos) if model.family == "gpt_oss" else {}
        self._infos = infos | {name: stack.info for name, stack in packed.items()}
        self._parts = whole_stacks(model, {name: info.shape for name, info in self._infos.items()})
        stacks = {place.tensor for place in self._parts.values()}
        scales = {name.removesuffix(BLOCKS) + SCALES for name in stacks if name in packed}
        self._packed = stacks & packed.keys()
        self._names = (there - stacks - scales) | self._parts.keys()

    @property
    def bytes_read(self) -> int:
        """As the source's."""
        return self._source.bytes_read

    def names(self) -> set[str]:
        """The tensors, those of stacks one by one."""
        return set(self._names)

    def info(self, name: str) -> TensorInfo:
        """Of a part: its own shape, and of what is in blocks its share of the bytes."""
        if name not in self._parts:
            return self._source.info(name)
        place = self._parts[name]
        stack, shape = self._infos[place.tensor], place.parameter_shape
        part = replace(stack, shape=shape)
        return replace(part, encoded_bytes=stack.encoded_bytes * part.numel // max(1, stack.numel))

    def read(self, name: str, dim: int | None = None, span: Span | None = None) -> torch.Tensor:
        """As the source does."""
        if name not in self._parts:
            return self._source.read(name, dim, span)
        place = self._parts[name]
        wanted = [Span(0, size) for size in place.parameter_shape]
        if dim is not None and span is not None:
            wanted[dim] = span
        if place.step > 1:
            return self._read_in_turn(place, wanted)
        rows, columns = wanted[0], wanted[1] if dim == 1 else None
        own = Span(place.rows.start + rows.start, place.rows.start + rows.stop)
        if len(wanted) == 1:
            return self._read_vector(place, own)
        if place.tensor in self._packed or place.transposed:
            return _rows(self._read_slab(place, own, wanted[1]), place)
        pieces = [
            self._source.read_matrix(place.tensor, piece, columns, place.matrix)
            for piece in place.pieces(rows)
        ]
        if len(pieces) == 1:
            return pieces[0]
        import torch  # whoever asks for tensors has it loaded

        return torch.cat(pieces)

    def _read_in_turn(self, place: Place, wanted: list[Span]) -> torch.Tensor:
        """Rows (and columns) of a parameter between those of others, which are read with it once."""
        low = place.rows.start // place.step * place.step
        rows = Span(low + wanted[0].start * place.step, low + wanted[0].stop * place.step)

        def read() -> Piece:
            return (
                self._read_vector(place, rows)
                if len(wanted) == 1
                else self._read_slab(place, rows, wanted[1])
            )

        return _rows(self._interleaved.take(place, (rows, *wanted[1:]), read), place)

    def _read_vector(self, place: Place, rows: Span) -> torch.Tensor:
        if place.matrix is None:
            return self._source.read(place.tensor, 0, rows)
        return self._source.read_part(place.tensor, (Span(place.matrix, place.matrix + 1), rows))[0]

    def _read_slab(self, place: Place, rows: Span, columns: Span) -> Piece:
        """Rows of one matrix of a stack that is in blocks or transposed."""
        if place.tensor in self._packed:
            return PackedRows.read(self._source.read_part, place.tensor, place.matrix or 0, rows, columns)
        return self._source.read_matrix(place.tensor, columns, rows, place.matrix).T

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


def _rows(piece: Piece, place: Place) -> torch.Tensor:
    """Those of the parameter, of rows in which it may lie between others."""
    first = place.rows.start % place.step
    if isinstance(piece, PackedRows):
        return piece.values(first, place.step)
    return piece[first :: place.step].contiguous()
