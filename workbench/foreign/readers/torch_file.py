"""Files of `torch.save`, read without torch: the archive, its records, and the numbers of the tensors in it.

The file is an archive of records that are not packed: `NAME/data.pkl` is the program that `torch_program` follows,
`NAME/data/KEY` the bytes of a storage, which several tensors may share. A tensor's word on its size is held against
those bytes before anything is allocated.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.engine.text import printable
from lockstep.workbench.foreign.passes import ForeignDumpError
from lockstep.workbench.foreign.readers.files import opened, shown
from lockstep.workbench.foreign.readers.number_formats import NUMPY, Numbers, as_numbers
from lockstep.workbench.foreign.readers.torch_program import (
    BrokenProgram,
    RefusedProgram,
    StridedTensor,
    built,
)

#: Bytes of the program: a dump's file names some thousand tensors, each in about 300 bytes.
_MAX_PROGRAM = 64 << 20


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A tensor of the file. `memory` names the storage that it lies in, which others may lie in as well."""

    file: Path
    memory: str
    dtype: str
    _bytes: bytes
    _place: StridedTensor
    _order: str  # of the bytes of an element: "<" or ">"
    _most: int  # bytes of the file

    @property
    def size(self) -> int:
        """How many elements it has."""
        return int(np.prod(self._place.shape, dtype=object)) if self._place.shape else 1

    def numbers(self) -> Numbers:
        """Its numbers, exactly. ForeignDumpError where it is larger than its file, or lies outside its storage."""
        shape, strides, offset = self._place.shape, self._place.strides, self._place.offset
        if self.dtype not in NUMPY:
            raise ForeignDumpError(
                f"{shown(self.file)}: a tensor of {printable(self.dtype, 40)}, which is not read"
            )
        element = np.dtype(self._order + NUMPY[self.dtype])
        if self.size * element.itemsize > self._most:
            raise ForeignDumpError(
                f"{shown(self.file)}: a tensor claims to be {printable(list(shape))} large, which the file has no "
                "bytes for"
            )
        end = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
        if not self.size:
            return as_numbers(self.dtype, np.empty(shape, element))
        if end * element.itemsize > len(self._bytes):
            raise ForeignDumpError(f"{shown(self.file)}: a tensor ends behind the bytes that it lies in")
        flat = np.frombuffer(self._bytes, element, end - offset, offset * element.itemsize)
        steps = [stride * element.itemsize for stride in strides]
        return as_numbers(self.dtype, np.lib.stride_tricks.as_strided(flat, shape, steps, writeable=False))


def load_torch(path: Path) -> object:
    """What `torch.save` wrote, of tensors (`TorchTensor`) and plain values. ForeignDumpError where it would take
    pickle, or where its sizes lie."""
    try:
        with opened(path) as file, zipfile.ZipFile(file) as archive:
            size = os.fstat(file.fileno()).st_size
            _plain_records(archive, size, path)
            return _loaded(archive, path, size)
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        if isinstance(error, RefusedProgram):
            raise ForeignDumpError(
                f"{shown(path)}: holds more than tensors, which only pickle could read, and that can run code: "
                "refused. Save tensors, numbers, strings, lists and dictionaries alone"
            ) from error
        if isinstance(error, BrokenProgram):
            raise ForeignDumpError(
                f"{shown(path)}: cannot be read, or was cut off: {printable(error)}"
            ) from error
        raise ForeignDumpError(
            f"{shown(path)}: is no file of torch.save, or was cut off: {printable(error)}; dump it again"
        ) from error


def _plain_records(archive: zipfile.ZipFile, size: int, path: Path) -> None:
    records = archive.infolist()
    if any(one.compress_type != zipfile.ZIP_STORED for one in records) or size < sum(
        one.file_size for one in records
    ):
        raise ForeignDumpError(f"{shown(path)}: its records claim to be larger than the file; it is not read")


def _loaded(archive: zipfile.ZipFile, path: Path, size: int) -> object:
    records = {one.filename: one for one in archive.infolist()}
    program = next((name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")), None)
    if program is None or records[program].file_size > _MAX_PROGRAM:
        raise BrokenProgram("it has no data.pkl" if program is None else "its data.pkl is too large")
    top = program.removesuffix("data.pkl")
    big = top + "byteorder" in records and archive.read(top + "byteorder") == b"big"
    storages: dict[str, bytes] = {}
    found: dict[
        int, object
    ] = {}  # by identity: what is referred to twice is one thing, however often it is nested

    def with_tensors(value: object) -> object:
        if id(value) not in found:
            found[id(value)] = tensors(value)
        return found[id(value)]

    def tensors(value: object) -> object:
        """The value with the tensors in it found."""
        if isinstance(value, StridedTensor):
            record = f"{top}data/{value.storage.key}"
            if record not in records:
                raise BrokenProgram(f"it has no record {record}")
            if record not in storages:
                storages[record] = archive.read(record)
            return TorchTensor(path, record, value.dtype, storages[record], value, ">" if big else "<", size)
        if isinstance(value, dict):
            return {key: with_tensors(one) for key, one in value.items()}
        if type(value) is list or type(value) is tuple:
            return type(value)(map(with_tensors, value))
        return value

    whole = built(archive.read(program))
    try:
        return tensors(whole)
    except RecursionError as error:
        raise BrokenProgram("its values are nested too deeply") from error
