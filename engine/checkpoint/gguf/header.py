"""The head of a GGUF file (metadata and tensor infos), checked before anything is allocated. Torch-free.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. gguf-py maps a file and believes it; here
every count, length, size and offset is held against the file's size first, and each error names the key or
tensor and the byte offset. Stricter than the format where llama.cpp is: tensors lie in the order of their infos
without holes, at most four dimensions, no array inside an array.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from lockstep.engine.checkpoint.block_types import TYPES, BlockType
from lockstep.engine.checkpoint.gguf.cursor import Cursor
from lockstep.engine.checkpoint.gguf.metadata import UINT32, MetadataArray, Scalar, read_value, type_name
from lockstep.engine.checkpoint.header import is_lfs_pointer, lfs_error, regular_size
from lockstep.engine.errors import CheckpointError
from lockstep.engine.text import printable

MAGIC = b"GGUF"
#: The formats before GGUF, as their first four bytes appear in a file.
OLDER = (b"lmgg", b"fmgg", b"tjgg", b"algg")
VERSIONS = (2, 3)
ALIGNMENT_KEY, DEFAULT_ALIGNMENT = "general.alignment", 32
LEAST_ALIGNMENT, LARGEST_ALIGNMENT = 8, 1 << 20  # a multiple of 8 by the format
MOST_DIMENSIONS = 4
LONGEST_TENSOR_NAME = 63  # bytes: ggml keeps 64 with the closing zero
#: The least bytes that a metadata pair (key length, one letter, type, value) and a tensor info can take.
LEAST_PAIR = 8 + 1 + 4 + 1
LEAST_INFO = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` in torch's order (rows first), its bytes from `start` to `stop` in the file."""

    type: BlockType
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A validated head; `data_start` is where tensor data begins, `size` the file's, both in bytes."""

    version: int
    size: int
    metadata: dict[str, Scalar | MetadataArray]
    tensors: dict[str, GgufTensor]
    alignment: int
    data_start: int


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and validate; CheckpointError states what is wrong with the file, where, with the values."""
    size = regular_size(path)
    try:
        with path.open("rb") as file:
            return _read(Cursor(path, file, size))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read(cursor: Cursor) -> GgufHeader:
    version = _version(cursor)
    tensor_count = cursor.u64("the number of tensors")
    pair_count = cursor.u64("the number of metadata pairs")
    cursor.check_count(pair_count, LEAST_PAIR, "metadata pairs")
    cursor.check_count(tensor_count, LEAST_INFO, "tensors")
    metadata = _metadata(cursor, pair_count)
    alignment = _alignment(cursor, metadata)
    infos = _infos(cursor, tensor_count, alignment)
    data_start = _padded(cursor.position, alignment)
    tensors = _placed(cursor, infos, data_start, alignment)
    return GgufHeader(version, cursor.size, metadata, tensors, alignment, data_start)


def _version(cursor: Cursor) -> int:
    path = cursor.path
    start = cursor.peek(64)
    if is_lfs_pointer(start):
        raise lfs_error(path)
    if start[:4] in OLDER:
        raise CheckpointError(
            f"{path}: an older GGML format ({printable(repr(start[:4]))}), from before GGUF: convert the "
            "original model again with a current llama.cpp"
        )
    if start[:4] != MAGIC:
        raise CheckpointError(
            f"{path}: not a GGUF file: it begins with {printable(repr(start[:4]))}, not {MAGIC!r}"
        )
    cursor.skip(4, "the magic number")
    version = cursor.u32("the version")
    if version == 1:
        raise CheckpointError(
            f"{path}: GGUF version 1 is not supported (2 and 3 are): convert it again with a current llama.cpp"
        )
    if version and not version & 0xFFFF:
        raise CheckpointError(
            f"{path}: a big-endian GGUF file (version {version >> 24} read backwards): not supported; "
            "`gguf-convert-endian` of gguf-py rewrites it"
        )
    if version not in VERSIONS:
        raise CheckpointError(f"{path}: GGUF version {version} is not supported; 2 and 3 are")
    return version


def _metadata(cursor: Cursor, count: int) -> dict[str, Scalar | MetadataArray]:
    metadata: dict[str, Scalar | MetadataArray] = {}
    for index in range(count):
        at = cursor.position
        key = cursor.text(f"the key of metadata pair {index}")
        if not key:
            raise cursor.error(at, f"metadata pair {index} has an empty key")
        if key in metadata:
            raise cursor.error(at, f"metadata key {printable(key)!r} is there twice")
        if key == ALIGNMENT_KEY and (kind := int.from_bytes(cursor.peek(4), "little")) != UINT32:
            raise cursor.error(cursor.position, f"{ALIGNMENT_KEY} has the type {type_name(kind)}, not UINT32")
        metadata[key] = read_value(cursor, key)
    return metadata


def _alignment(cursor: Cursor, metadata: dict[str, Scalar | MetadataArray]) -> int:
    value = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    assert isinstance(value, int), "a UINT32, as was checked when it was read"
    if not LEAST_ALIGNMENT <= value <= LARGEST_ALIGNMENT or value & (value - 1):
        raise CheckpointError(
            f"{cursor.path}: {ALIGNMENT_KEY} is {value}: expected a power of two from {LEAST_ALIGNMENT} to "
            f"{LARGEST_ALIGNMENT}"
        )
    return value


def _infos(cursor: Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    """The tensors, `start` and `stop` counted from where tensor data begins: each where the one before ends."""
    tensors: dict[str, GgufTensor] = {}
    expected = 0
    for index in range(count):
        at = cursor.position
        name = cursor.text(f"the name of tensor {index}")
        if not name or len(name.encode()) > LONGEST_TENSOR_NAME:
            raise cursor.error(
                at,
                f"the name of tensor {index} has {len(name.encode())} bytes, not 1 to {LONGEST_TENSOR_NAME}",
            )
        if name in tensors:
            raise cursor.error(at, f"tensor {printable(name)!r} is there twice")
        tensors[name] = tensor = _info(cursor, name, at)
        if tensor.start % alignment:
            raise cursor.error(
                at, f"tensor {printable(name)!r} has offset {tensor.start}, no multiple of {alignment}"
            )
        if tensor.start != expected:
            raise cursor.error(
                at,
                f"tensor {printable(name)!r} has offset {tensor.start}; the one before it ends at {expected}",
            )
        expected = _padded(tensor.stop, alignment)
    return tensors


def _info(cursor: Cursor, name: str, at: int) -> GgufTensor:
    what = f"tensor {printable(name)!r}"
    dimensions = cursor.u32(f"the dimensions of {what}")
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise cursor.error(at, f"{what} has {dimensions} dimensions, not 1 to {MOST_DIMENSIONS}")
    sizes = [cursor.u64(f"the shape of {what}") for _ in range(dimensions)]
    type_id = cursor.u32(f"the type of {what}")
    offset = cursor.u64(f"the offset of {what}")
    if type_id not in TYPES:
        raise cursor.error(at, f"{what} is of type {type_id}, which GGML does not know")
    kind = TYPES[type_id]
    if 0 in sizes:
        raise cursor.error(at, f"{what} has shape {sizes}: a dimension is zero")
    if sizes[0] % kind.elements:
        raise cursor.error(
            at, f"{what} is {kind.name}, but its rows of {sizes[0]} are no multiple of {kind.elements}"
        )
    nbytes = prod(sizes) // kind.elements * kind.nbytes
    if nbytes > cursor.size:
        raise cursor.error(
            at,
            f"{what} of shape {sizes} takes {nbytes} bytes as {kind.name}; the whole file has {cursor.size}",
        )
    return GgufTensor(kind, tuple(reversed(sizes)), offset, offset + nbytes)


def _placed(
    cursor: Cursor, infos: dict[str, GgufTensor], data_start: int, alignment: int
) -> dict[str, GgufTensor]:
    """The same tensors with offsets from the beginning of the file, which must hold them all."""
    tensors = {
        name: GgufTensor(info.type, info.shape, data_start + info.start, data_start + info.stop)
        for name, info in infos.items()
    }
    for name, tensor in tensors.items():
        if tensor.stop > cursor.size:
            raise CheckpointError(
                f"{cursor.path}: truncated: tensor {printable(name)!r} ends at byte {tensor.stop}, the file has "
                f"{cursor.size}; download it again"
            )
    end = max((tensor.stop for tensor in tensors.values()), default=0)
    if end < cursor.size < _padded(end, alignment):  # a file may end without padding, not within it
        raise CheckpointError(
            f"{cursor.path}: truncated: {cursor.size} bytes, in the padding that ends at "
            f"{_padded(end, alignment)}; download it again"
        )
    return tensors


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
