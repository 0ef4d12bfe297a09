"""A GGUF file, or all files of a split one, as a checkpoint. Loads torch when a tensor is read."""

from __future__ import annotations

import hashlib
import mmap
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.engine.checkpoint.block_types import FLOAT32, PLAIN, QUANTISED, BlockType
from lockstep.engine.checkpoint.file_source import PIECE_BYTES, FileSource, hash_contents
from lockstep.engine.checkpoint.gguf.expansion import PlacedTensor, split_expansions
from lockstep.engine.checkpoint.gguf.header import GgufHeader, GgufTensor
from lockstep.engine.checkpoint.gguf.hyperparameters import model_config
from lockstep.engine.checkpoint.gguf.names import (
    RowOperation,
    TiledHeads,
    as_hugging_face,
    covering,
    hugging_face_name,
    operations,
    tiled_columns,
)
from lockstep.engine.checkpoint.gguf.rotary import FACTORS
from lockstep.engine.checkpoint.gguf.split import read_split
from lockstep.engine.checkpoint.gguf.stated_numbers import stated_numbers
from lockstep.engine.checkpoint.source import TensorInfo
from lockstep.engine.checkpoint.stacks import Place, whole_stacks
from lockstep.engine.checkpoint.ties import PREDICTING
from lockstep.engine.config import ModelConfig
from lockstep.engine.errors import CheckpointError
from lockstep.engine.parallel.shards import CORRECTION, Span
from lockstep.engine.text import printable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

_LAYER = re.compile(r"blk\.(\d+)\.", re.ASCII)
#: Of Mamba-2 what is a matrix here: vectors of one column, and the gated norm's weights by groups.
_FLAT = (".A_log", ".D", "mamba.norm.weight", "mixer.norm.weight")


def open_gguf(path: Path) -> tuple[ModelConfig, GgufSource]:
    """The model that a GGUF file describes (of a split one, the first file), and its tensors."""
    headers = read_split(path)
    files = {name: file for file, header in headers.items() for name in header.tensors}
    tensors = {name: headers[file].tensors[name] for name, file in files.items()}
    model = model_config(
        headers[path].metadata, tensors, str(path), lambda name: _floats(files[name], tensors[name])
    )
    return model, GgufSource(headers, model)


def decode(raw: torch.Tensor, type: BlockType) -> torch.Tensor:
    """The elements of stored rows: in the type's own dtype, or float32 where it is quantised."""
    import torch

    plain = PLAIN.get(type.name)
    if plain is None:
        # Imported here: it loads torch, and most who open a checkpoint read headers only.
        from lockstep.engine.checkpoint.dequantise import dequantise

        return dequantise(raw, type)
    dtype: torch.dtype = getattr(torch, plain)
    if not raw.numel():  # whose strides may be no multiple of an element
        return torch.empty((*raw.shape[:-1], raw.shape[-1] // type.nbytes), dtype=dtype)
    return raw.view(dtype)


def _decode_named(name: str, raw: torch.Tensor, type: BlockType) -> torch.Tensor:
    return decode(raw, type)


@dataclass(frozen=True, slots=True)
class Decoding:
    """How stored tensors become Hugging Face's: what the bytes of a tensor mean, and what its layout is.

    The engine's rules may replace both.
    """

    values: Callable[[str, torch.Tensor, BlockType], torch.Tensor] = _decode_named
    operations: Callable[[str, ModelConfig], tuple[RowOperation, ...]] = operations


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A slice of a tensor as the file stores it: uint8 [..., bytes], whole blocks of each row; `columns` are the
    elements that were asked for, counted from the first that is there."""

    raw: torch.Tensor
    type: BlockType
    columns: Span

    def values(self, decode: Callable[[torch.Tensor, BlockType], torch.Tensor] = decode) -> torch.Tensor:
        """The elements, contiguous."""
        import torch

        covered = self.raw.shape[-1] // self.type.nbytes * self.type.elements
        if self.columns.size == covered:
            return decode(self.raw, self.type)
        # Piece by piece, so that the whole of what covers the slice is never in memory beside it.
        raw, rows = self.raw.reshape(-1, self.raw.shape[-1]), max(1, PIECE_BYTES // (4 * covered))
        values = torch.empty(len(raw), self.columns.size)
        for piece, target in zip(raw.split(rows), values.split(rows), strict=True):
            target.copy_(decode(piece, self.type).narrow(-1, self.columns.start, self.columns.size))
        return values.view(*self.raw.shape[:-1], self.columns.size)


class GgufSource(FileSource):
    """The `Source` of GGUF files: Hugging Face names and layouts, whatever those of the files.

    `read` takes in only the blocks that cover the slice, and gives values in the file's own dtype, or float32 where
    it is quantised.
    """

    def __init__(self, headers: dict[Path, GgufHeader], model: ModelConfig) -> None:
        self.headers, self._model = headers, model
        self.decoding = Decoding()
        found = self._named(headers)
        expansions = split_expansions(found, model)
        for _, names in expansions.values():
            for name in names:
                del found[name]
        self._expansions = {name: one for name, (one, _) in expansions.items()}
        first = next(iter(headers))  # which has the metadata
        self._numbers = stated_numbers(headers[first].metadata, model, str(first))
        parts = whole_stacks(model, {name: _stack_shape(name, one.tensor) for name, one in found.items()})
        stacks = {whole: found.pop(whole) for whole in {place.tensor for place in parts.values()}}
        # Whose rows lie in pieces, head by head: by the whole tensor.
        self._pieces = {name: place for name, place in parts.items() if place.blocks > 1}
        for name, place in parts.items():
            file, tensor = stacks[place.tensor]
            found[name] = PlacedTensor(file, tensor if place.blocks > 1 else _rows_of(tensor, place))
        found = dict(_single(found, model))
        self._tensors = {name: one.tensor for name, one in found.items()}
        infos = {name: _info(*one, self._pieces.get(name)) for name, one in found.items()}
        infos |= {name: one.info for name, one in self._expansions.items()}
        infos |= {
            name: TensorInfo(one.shape, "float32", first, "F32", 4) for name, one in self._numbers.items()
        }
        super().__init__(infos, headers)

    def _named(self, headers: dict[Path, GgufHeader]) -> dict[str, PlacedTensor]:
        """By Hugging Face's names. CheckpointError where two have the same."""
        found: dict[str, PlacedTensor] = {}
        for file, header in headers.items():
            for stored, tensor in header.tensors.items():
                # Part of the configuration, or of a layer that is left unread.
                if stored in FACTORS or _is_behind(stored, self._model):
                    continue
                name = hugging_face_name(stored, self._model.family)
                if name in found:
                    raise CheckpointError(
                        f"{file}: tensor {printable(stored)} is in {found[name].file.name} as well"
                    )
                found[name] = PlacedTensor(file, tensor)
        return found

    def read(self, name: str, dim: int | None = None, span: Span | None = None) -> torch.Tensor:
        """The tensor, or `span` of dimension `dim`, as a contiguous CPU tensor of its own."""
        info = self.readable(name, dim, span)
        if info.dtype not in PLAIN.values():
            raise CheckpointError(
                f"{info.file}: {printable(name)} is of type {info.encoding}, which cannot be read; "
                f"supported are {', '.join((*PLAIN, *QUANTISED))}"
            )
        decode = partial(self.decoding.values, name)
        if (stated := self._numbers.get(name)) is not None:
            import torch

            values = torch.full(stated.shape, stated.value)
            return values if span is None else values[span.start : span.stop]
        if name in self._expansions:
            return self._expansion(name, dim, span, decode)
        applied = self.decoding.operations(name, self._model)
        if applied and len(info.shape) == 1:  # a row of elements, each of which is a row of the layer
            values = self.blocks(name).values(decode)
            for operation in reversed(applied):
                values = operation.from_gguf(values)
            values = as_hugging_face(name, self._model, values)
            return values if span is None else values[span.start : span.stop].clone()
        return as_hugging_face(name, self._model, self.blocks(name, dim, span).values(decode))

    def _expansion(
        self,
        name: str,
        dim: int | None,
        span: Span | None,
        decode: Callable[[torch.Tensor, BlockType], torch.Tensor],
    ) -> torch.Tensor:
        """The slice of a matrix that lies in two tensors."""
        rows, columns = (Span(0, size) for size in self.info(name).shape)
        if span is not None:
            rows, columns = (span, columns) if dim == 0 else (rows, span)
        values, count = self._expansions[name].read(rows, _copy, decode)
        self.bytes_read += count
        return values[:, columns.start : columns.stop].contiguous()

    def blocks(self, name: str, dim: int | None = None, span: Span | None = None) -> Blocks:
        """The blocks that cover the slice, rows in the order of Hugging Face's layout; only they are read.

        Rows of one dimension are elements, which no block can reorder: a q/k bias of `llama` stays in the file's order.
        """
        info = self.readable(name, dim, span)
        if name in self._expansions:  # in no blocks of its own: as plain numbers
            import torch

            values = self._expansion(name, dim, span, partial(self.decoding.values, name))
            return Blocks(values.view(torch.uint8), FLOAT32, Span(0, values.shape[1]))
        tensor = self._tensors[name]
        if (tiled := tiled_columns(name, self._model)) is not None and len(tensor.shape) == 2:
            return self._reordered(name, tiled, dim, span)
        kind, shape = tensor.type, info.shape
        last = len(shape) - 1
        wanted = [Span(0, size) for size in shape]
        if dim is not None and span is not None:
            wanted[dim] = span
        first, stop = wanted[last].start // kind.elements, -(-wanted[last].stop // kind.elements)
        taken = [*wanted[:last], Span(first * kind.nbytes, stop * kind.nbytes)]
        applied = self.decoding.operations(name, self._model) if last else ()
        taken[0] = covering(taken[0], shape[0], applied)
        row_bytes = shape[last] // kind.elements * kind.nbytes
        raw = self._raw(name, info.file, (*shape[:last], row_bytes), taken)
        for operation in reversed(applied):
            raw = operation.from_gguf(raw)
        if last and taken[0] != wanted[0]:
            raw = raw[wanted[0].start - taken[0].start :][: wanted[0].size].clone()
        skipped = first * kind.elements
        return Blocks(raw, kind, Span(wanted[last].start - skipped, wanted[last].stop - skipped))

    def _raw(self, name: str, file: Path, shape: tuple[int, ...], taken: list[Span]) -> torch.Tensor:
        """The part `taken` of the stored bytes [*shape] of the parameter, of one in pieces one below the other."""
        tensor, place = self._tensors[name], self._pieces.get(name)
        if place is None:
            raw = _copy(file, tensor.start, shape, taken)
        else:
            import torch

            whole, (rows, columns) = (place.shape[0], shape[1]), taken
            pieces = [_copy(file, tensor.start, whole, [one, columns]) for one in place.pieces(rows)]
            raw = torch.cat(pieces)[: rows.size]
        self.bytes_read += raw.numel()
        return raw

    def _reordered(self, name: str, tiled: TiledHeads, dim: int | None, span: Span | None) -> Blocks:
        """A matrix whose columns are in another order: in its blocks where each is of one head, else as numbers."""
        import torch

        info, kind = self.info(name), self._tensors[name].type
        rows, columns = (Span(0, size) for size in info.shape)
        if span is not None:
            rows, columns = (span, columns) if dim == 0 else (rows, span)
        width = info.shape[1] // kind.elements * kind.nbytes
        raw = self._raw(name, info.file, (info.shape[0], width), [rows, Span(0, width)])
        if tiled.width % kind.elements == 0:
            per_head = replace(tiled, width=tiled.width // kind.elements * kind.nbytes)
            raw = per_head.from_gguf(raw.T).T
            first, stop = columns.start // kind.elements, -(-columns.stop // kind.elements)
            skipped, taken = first * kind.elements, raw[:, first * kind.nbytes : stop * kind.nbytes]
            return Blocks(taken.contiguous(), kind, Span(columns.start - skipped, columns.stop - skipped))
        values: torch.Tensor = tiled.from_gguf(self.decoding.values(name, raw, kind).float().T).T
        values = values[:, columns.start : columns.stop].contiguous()
        return Blocks(values.view(torch.uint8), FLOAT32, Span(0, columns.size))

    def rows(self, name: str, step: int = 1) -> NDArray[np.float32]:
        """Every `step`-th row (of one dimension: all elements) as float32, without torch: dequantised by gguf-py, which
        knows types that `read` does not. CheckpointError for one that neither knows."""
        info = self.readable(name, None, None)
        import numpy as np

        # Imported here: they take a fifth of a second.
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        if (stated := self._numbers.get(name)) is not None:
            return np.full(stated.shape, stated.value, np.float32)
        if name in self._expansions:
            one = self._expansions[name]
            keys, halves = (
                dequantize(
                    np.memmap(place.file, np.uint8, "r", place.tensor.start, place.byte_shape),
                    GGMLQuantizationType[place.tensor.type.name],
                )
                for place in (one.keys, one.values)
            )
            whole = np.concatenate((keys.swapaxes(1, 2), halves), 1).reshape(info.shape)
            return whole[::step].astype(np.float32, copy=False)
        tensor = self._tensors[name]
        length = tensor.shape[-1] // tensor.type.elements * tensor.type.nbytes
        raw = np.memmap(info.file, np.uint8, "r", tensor.start, (*tensor.shape[:-1], length))
        if (place := self._pieces.get(name)) is not None:
            raw = place.within(raw)
        order = np.arange(info.shape[0])
        for operation in reversed(operations(name, self._model)):
            order = operation.from_gguf(order)
        kind = GGMLQuantizationType[tensor.type.name]
        try:
            if len(tensor.shape) == 1:
                values = dequantize(np.array(raw), kind)[order].astype(np.float32)
                return as_hugging_face(name, self._model, values)
            found = dequantize(raw[order[::step]], kind).astype(np.float32, copy=False)
            tiled = tiled_columns(name, self._model)
            return found if tiled is None else tiled.from_gguf(found.T).T
        except NotImplementedError as error:
            raise CheckpointError(f"{info.file}: {printable(name)}: {kind.name} cannot be read") from error

    def digest(self) -> str:
        """BLAKE2b over each file's metadata and infos and, tensor by tensor, its contents: up to 1 MiB all of them, of
        larger ones 16 evenly spaced blocks of 4 KiB: a change that misses them all goes unseen."""
        hasher = hashlib.blake2b(digest_size=16)
        for path, header in self.headers.items():
            with path.open("rb") as file:
                hasher.update(file.read(header.data_start))
                for tensor in header.tensors.values():
                    hash_contents(hasher, file, tensor.start, tensor.stop - tensor.start)
        return hasher.hexdigest()


def _is_behind(stored: str, model: ModelConfig) -> bool:
    """Whether the tensor is of a layer that predicts further tokens."""
    match = _LAYER.match(stored)
    return match is not None and int(match[1]) >= model.num_layers and model.family in PREDICTING


def _single(found: dict[str, PlacedTensor], model: ModelConfig) -> Iterator[tuple[str, PlacedTensor]]:
    """Stacks of experts as a tensor of each, and the gate of a shared expert as the matrix of one row."""
    count = 0 if model.experts is None else model.experts.count
    for name, (file, tensor) in found.items():
        if "{}" in name and tensor.shape[0] == count and len(tensor.shape) > 1:
            for expert in range(count):
                yield name.format(expert), PlacedTensor(file, _matrix_of(tensor, expert))
        elif name.endswith(CORRECTION) and tensor.shape == (1, count):  # Ernie's, of one group
            yield name, PlacedTensor(file, _matrix_of(tensor, 0))
        elif name.endswith(_FLAT) and len(tensor.shape) == 2:
            yield name, PlacedTensor(file, replace(tensor, shape=(prod(tensor.shape),)))
        elif name.endswith(".shared_expert_gate.weight") and len(tensor.shape) == 1:
            yield name, PlacedTensor(file, replace(tensor, shape=(1, *tensor.shape)))
        else:
            yield name, PlacedTensor(file, tensor)


def _stack_shape(name: str, tensor: GgufTensor) -> tuple[int, ...]:
    """The shape in which Hugging Face has the stack: kernels [channels, 1, width] are a matrix here."""
    if name.endswith((".conv1d.weight", ".conv.conv.weight")) and len(tensor.shape) == 2:
        return tensor.shape[0], 1, tensor.shape[1]
    return tensor.shape


def _rows_of(tensor: GgufTensor, place: Place) -> GgufTensor:
    """Some rows of a matrix, or of one in a stack, as a tensor of their own: whole blocks, as each row is."""
    if place.matrix is not None:
        tensor = _matrix_of(tensor, place.matrix)
    rows, size = place.rows, (tensor.stop - tensor.start) // tensor.shape[0]
    start, stop = (tensor.start + row * size for row in (rows.start, rows.stop))
    return GgufTensor(tensor.type, (rows.size, *tensor.shape[1:]), start, stop)


def _matrix_of(stack: GgufTensor, number: int) -> GgufTensor:
    """One matrix (or vector) of a stack."""
    size = (stack.stop - stack.start) // stack.shape[0]
    start = stack.start + number * size
    return GgufTensor(stack.type, stack.shape[1:], start, start + size)


def _info(file: Path, tensor: GgufTensor, place: Place | None) -> TensorInfo:
    """Of the tensor, or of those of its rows that `place` names."""
    kind, shape = tensor.type.name, tensor.shape if place is None else place.parameter_shape
    dtype = PLAIN.get(kind, "float32" if kind in QUANTISED else kind)
    size = (tensor.stop - tensor.start) // tensor.shape[0] * shape[0]
    return TensorInfo(shape, dtype, file, kind, size)


def _floats(path: Path, tensor: GgufTensor) -> tuple[float, ...]:
    """The values of a small F32 tensor, without torch."""
    with path.open("rb") as file:
        file.seek(tensor.start)
        return struct.unpack(f"<{prod(tensor.shape)}f", file.read(tensor.stop - tensor.start))


def _copy(file: Path, start: int, shape: tuple[int, ...], taken: list[Span]) -> torch.Tensor:
    """The part `taken` of the bytes [*shape] at `start`, in memory of its own, mapped in piece by piece."""
    import numpy as np
    import torch

    copied = torch.empty([part.size for part in taken], dtype=torch.uint8)
    target = copied.numpy()
    index = tuple(slice(part.start, part.stop) for part in taken[1:])
    rows, stride = taken[0], prod(shape[1:])
    step = max(1, PIECE_BYTES // stride)
    try:
        with file.open("rb") as handle:
            for first in range(rows.start, rows.stop, step):
                last = min(first + step, rows.stop)
                begin, size = start + first * stride, (last - first) * stride
                page = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
                with mmap.mmap(
                    handle.fileno(), begin - page + size, access=mmap.ACCESS_READ, offset=page
                ) as mapped:
                    view = np.frombuffer(mapped, np.uint8, size, begin - page).reshape(-1, *shape[1:])
                    target[first - rows.start : last - rows.start] = view[(slice(None), *index)]
                    del view  # the mapping lives as long as a view of it
    except (OSError, ValueError) as error:  # ValueError: the file has become shorter than the mapping
        raise CheckpointError(f"{file}: cannot be read: {printable(error)}") from error
    return copied
