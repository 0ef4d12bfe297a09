"""A checkpoint's weights as numpy reads them: of safetensors read without torch, of GGUF and of MXFP4
blocks dequantised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.checkpoint.files import gguf_file
from lockstep.engine.checkpoint.gguf.source import GgufSource
from lockstep.engine.checkpoint.header import TensorEntry, read_header
from lockstep.engine.checkpoint.resolve import open_checkpoint, open_stored
from lockstep.engine.checkpoint.stacks import Place, fitting, stored_in
from lockstep.sessions.dtypes import rounded, widen
from lockstep.workbench.diagnosis.operations.misreadings import Misreading, misreadings

#: How the file's dtypes lie in numpy, which has no bfloat16.
_STORED = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Rows and columns of a matrix as it lies in a file, read when they are asked for: its first element is at byte
    `start`, and a row has `width`. `held` is the dtype to which an engine rounds them."""

    file: Path
    start: int
    dtype: str
    width: int
    span: range
    held: str
    columns: slice | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """As of the array."""
        return len(self.span), len(range(self.width)[self.columns or slice(None)])

    def part(self, span: slice | None, columns: slice | None) -> StoredMatrix:
        """Some of its rows and columns; None: all."""
        return replace(self, span=self.span if span is None else self.span[span], columns=columns)

    def chunks(self, rows: int) -> Iterator[NDArray[Any]]:
        """All of it, so many rows at a time, in float32 (float64 where it is held in that)."""
        return (self._read(self.span[i : i + rows]) for i in range(0, len(self.span), rows))

    def rows(self, ids: Sequence[int]) -> NDArray[Any]:
        """Some rows. IndexError where it has fewer."""
        if any(not 0 <= i < len(self.span) for i in ids):
            raise IndexError(f"there are {len(self.span)} rows, not {max(ids)}")
        none = self._read(self.span[:0])
        return np.concatenate([none, *(self._read(self.span[i : i + 1]) for i in ids)])

    def _read(self, rows: range) -> NDArray[Any]:
        kind = np.dtype(_STORED[self.dtype])
        offset = self.start + rows.start * self.width * kind.itemsize
        raw = np.fromfile(self.file, kind, len(rows) * self.width, offset=offset)
        found = rounded(widen(raw.reshape(len(rows), self.width), self.dtype), self.held)
        return found if self.columns is None else found[:, self.columns]


class CheckpointWeights:
    """A reader of single weights by their checkpoint names; None for those that the checkpoint lacks.

    The output head of a tied model is its embedding. CheckpointError and ConfigError as `open_checkpoint`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._model, source = open_checkpoint(path)
        with source:
            self._gguf = gguf_file(path) is not None
            self._infos = {} if self._gguf else {name: source.info(name) for name in source.names()}
        if self._gguf:
            return
        with open_stored(path, self._model) as whole:  # stacks as they lie in the files
            self._stored = {name: whole.info(name) for name in whole.names()}
        self._headers = {file: read_header(file) for file in {info.file for info in self._stored.values()}}
        self._stacked = stored_in(self._model)

    def __call__(self, name: str) -> NDArray[Any] | None:
        """The whole weight."""
        if self._is_dequantised(name):
            return _dequantised(self._path, name)
        name, place = self._place(name)
        if name not in self._stored:
            return None
        file, entry = self._entry(name)
        kind, shape, start = np.dtype(_STORED[entry.dtype]), entry.shape, entry.start
        if place is not None and place.matrix is not None:
            shape = shape[1:]
            start += place.matrix * prod(shape) * kind.itemsize
        raw = np.fromfile(file, kind, prod(shape), offset=start)
        found = widen(raw.reshape(shape), entry.dtype)
        return found if place is None else place.within(found)

    def matrix(self, name: str, held: str) -> StoredMatrix | None:
        """A matrix of which single rows can be read, as an engine holds it in a dtype; None where it does not lie in a
        file as it is used."""
        if self._is_dequantised(name):
            return None
        stored, place = self._place(name)
        if place is not None or stored not in self._stored:
            return None
        file, entry = self._entry(stored)
        if len(entry.shape) != 2:
            return None
        rows, width = entry.shape
        return StoredMatrix(file, entry.start, entry.dtype, width, range(rows), held)

    def _is_dequantised(self, name: str) -> bool:
        name = self._tied(name)
        return self._gguf or (name in self._infos and bool(self._infos[name].encoding))

    def _tied(self, name: str) -> str:
        head = name == "lm_head.weight" and name not in self._infos
        return "model.embed_tokens.weight" if head and self._model.tie_embeddings else name

    def _place(self, name: str) -> tuple[str, Place | None]:
        """What the tensor that holds a weight is called, and where in it that lies; None: it is the weight."""
        name = self._tied(name)
        place = self._stacked.get(name)
        if place is not None:
            there = self._stored.get(place.tensor)
            place = fitting(place, None if there is None else there.shape, self._model)
        return (name if place is None else place.tensor), place

    def _entry(self, name: str) -> tuple[Path, TensorEntry]:
        info = self._stored[name]
        return info.file, self._headers[info.file].entries[info.stored_as or name]


def _dequantised(path: Path, name: str) -> NDArray[Any] | None:
    """A weight that is stored in blocks, in the layout of Hugging Face."""
    model, source = open_checkpoint(path)
    with source:
        if name == "lm_head.weight" and model.tie_embeddings:
            name = "model.embed_tokens.weight"
        return source.read(name).float().numpy() if name in source.names() else None


def checkpoint_misreadings(path: Path) -> Callable[[str], list[tuple[Misreading, NDArray[Any]]]]:
    """What single weights become under the known mistakes of loaders, by their checkpoint names. None of safetensors,
    which hold what is used."""

    if gguf_file(path) is None:
        return lambda name: []

    def read(name: str) -> list[tuple[Misreading, NDArray[Any]]]:
        model, source = open_checkpoint(path)
        with source:
            if not isinstance(source, GgufSource) or name not in source.names():
                return []
            return list(misreadings(source, model, name))

    return read
