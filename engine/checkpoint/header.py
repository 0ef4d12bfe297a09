"""The header of a safetensors file, checked before anything is allocated or mapped. Torch-free.

Format (https://github.com/huggingface/safetensors#format): eight bytes of little-endian header length, a JSON
object `name -> {dtype, shape, data_offsets}`, then the tensors' bytes without holes or overlaps. The library
checks the same, but reports only "invalid"; here every error carries the numbers that disagree.
"""

from __future__ import annotations

import json
import stat
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, TypeGuard

from lockstep.engine.checkpoint.source import DTYPE_BITS
from lockstep.engine.errors import CheckpointError
from lockstep.engine.plain_files import kind_of
from lockstep.engine.text import printable

#: The library's own limit on a header.
LONGEST_HEADER = 100_000_000
MOST_DIMENSIONS = 8
LFS_POINTER = b"version https://git-lfs.github.com/spec/"

#: safetensors' dtype codes in torch's names.
DTYPES: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F6_E2M3": "float6_e2m3",
    "F6_E3M2": "float6_e3m2",
    "F4": "float4_e2m1",
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file; `start` and `stop` are byte offsets from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header: the file's size in bytes, the raw header (length prefix included), its tensors."""

    size: int
    raw: bytes
    entries: dict[str, TensorEntry]


def read_header(path: Path) -> Header:
    """Read and validate; CheckpointError states what is wrong with the file, with the values."""
    size = regular_size(path)
    try:
        with path.open("rb") as file:
            return header_of(path, size, file)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def header_of(path: Path, size: int, file: BinaryIO) -> Header:
    """The header of a file that is open already; `path` is its name in what is reported."""
    raw = _raw_header(path, size, file.read(8 + len(LFS_POINTER)), file)
    return Header(size, raw, _entries(path, _parse(path, raw[8:]), len(raw), size))


def regular_size(path: Path) -> int:
    """The size of a file in bytes; CheckpointError where it is no regular file: opening a pipe would wait for its
    writer, and a device never ends."""
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: {kind_of(status.st_mode)}, not a file: put the file itself there")
    return status.st_size


def is_lfs_pointer(start: bytes) -> bool:
    """Whether a file that starts so is git-LFS's stand-in for the real one."""
    return start.startswith(LFS_POINTER)


def lfs_error(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: a git-LFS pointer, not the file itself: run `git lfs pull` in {path.parent}"
    )


def _raw_header(path: Path, size: int, start: bytes, file: BinaryIO) -> bytes:
    if is_lfs_pointer(start):
        raise lfs_error(path)
    if size < 8:
        raise CheckpointError(
            f"{path}: truncated: {size} bytes, too few for a safetensors header; download it again"
        )
    (length,) = struct.unpack("<Q", start[:8])
    if length > size - 8:
        raise CheckpointError(
            f"{path}: the header claims {length} bytes but only {size - 8} follow: "
            "truncated, or not a safetensors file; download it again"
        )
    if length > LONGEST_HEADER:
        raise CheckpointError(
            f"{path}: the header claims {length} bytes; at most {LONGEST_HEADER} are allowed: "
            "damaged; download it again"
        )
    file.seek(0)
    raw = file.read(8 + length)
    if len(raw) != 8 + length:
        raise CheckpointError(
            f"{path}: truncated while it was being read: wait until it is written, and try again"
        )
    return raw


def _parse(path: Path, text: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"{printable(key)!r} is there twice")
            found[key] = value
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        problem = printable(error)
        raise CheckpointError(
            f"{path}: the header is not valid JSON ({problem}): damaged; download it again"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object: damaged; download it again")
    header.pop("__metadata__", None)
    return header


def _entries(path: Path, header: dict[str, object], data_start: int, size: int) -> dict[str, TensorEntry]:
    entries = {name: _entry(path, name, value, data_start) for name, value in header.items()}
    position, before = data_start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != position:
            what = "overlaps" if entry.start < position else "leaves a hole after"
            raise CheckpointError(
                f"{path}: {printable(name)} starts at byte {entry.start} and {what} {before}, "
                f"which ends at {position}: damaged; download it again"
            )
        position, before = entry.stop, printable(name)
    if position != size:
        problem = "truncated" if size < position else "followed by bytes that belong to no tensor"
        raise CheckpointError(
            f"{path}: {problem}: the header describes {position} bytes, the file has {size}; "
            "download it again"
        )
    return entries


def _entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    def error(problem: str) -> CheckpointError:
        return CheckpointError(f"{path}: {printable(name)}: {problem}: damaged header; download it again")

    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise error("dtype, shape or data_offsets is missing")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise error(f"unknown dtype {printable(repr(code))}")
    if not _whole_numbers(shape) or len(shape) > MOST_DIMENSIONS:
        raise error(f"the shape {printable(repr(shape))} is not a list of at most {MOST_DIMENSIONS} sizes")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise error(f"data_offsets {printable(repr(offsets))} is not [start, stop]")
    bits = prod(shape) * DTYPE_BITS[DTYPES[code]]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise error(
            f"{code} {shape} takes {bits / 8:g} bytes, data_offsets {offsets} give {offsets[1] - offsets[0]}"
        )
    return TensorEntry(DTYPES[code], tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _whole_numbers(value: object) -> TypeGuard[list[int]]:
    """A list of ints from 0 to 2^63-1 (JSON's true is no number)."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
