"""Arrays to bytes and back: zstd over byte planes, every size checked before anything is allocated.

Byte planes (all first bytes, then all second bytes, …; the "shuffle" filter of HDF5 and Blosc) bring the
signs and exponents of floats together, which is what compresses in activations and statistics.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.errors import broken

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

#: The longest list that a session may hold (uncompressed bytes).
MAX_LIST_BYTES = 1 << 26
#: The statistics of all taps on all ranks at one step.
MAX_STEP_BYTES = 1 << 26

_FAST, _DENSE = 1, 3  # zstd levels: a step as it comes, a chunk at leisure
_local = threading.local()  # zstd contexts are not safe to share between threads


def _compressor(level: int) -> zstd.ZstdCompressor:
    name = f"compressor{level}"
    if not hasattr(_local, name):
        chosen = zstd.CompressionParameter
        options: dict[int, int] = {chosen.compression_level: level, chosen.checksum_flag: 1}
        setattr(_local, name, zstd.ZstdCompressor(options=options))
    found: zstd.ZstdCompressor = getattr(_local, name)
    return found


def _compressed(compressor: zstd.ZstdCompressor, data: memoryview) -> bytes:
    """One frame that declares its size and carries a checksum."""
    compressor.set_pledged_input_size(data.nbytes)
    return compressor.compress(data, compressor.FLUSH_FRAME)


def _declared(frame: bytes) -> int | None:
    """The size of its content that a frame states, if it does. ZstdError where it is none."""
    return zstd.get_frame_info(frame).decompressed_size


def encode(array: NDArray[Any], *, dense: bool = False) -> bytes:
    """The array's little-endian bytes as byte planes, compressed. Keep shape and dtype elsewhere."""
    return encode_many(array.reshape(1, -1), dense=dense)[0]


def encode_many(arrays: NDArray[Any], *, dense: bool = False) -> list[bytes]:
    """`encode` of each of `arrays` (the first axis), encoded together."""
    count, itemsize = len(arrays), arrays.dtype.itemsize
    flat = np.ascontiguousarray(arrays, dtype=arrays.dtype.newbyteorder("<")).reshape(-1)
    planes = flat.view(np.uint8).reshape(count, flat.size // max(1, count), itemsize)
    rows = np.ascontiguousarray(planes.swapaxes(1, 2)).reshape(count, -1)
    compressor = _compressor(_DENSE if dense else _FAST)
    return [_compressed(compressor, row.data) for row in rows]


def decompress(data: object, nbytes: int, where: str) -> bytes:
    """`data`'s single zstd frame, which must declare and hold exactly `nbytes`."""
    if not isinstance(data, bytes):
        raise broken(where, f"expected a blob, found {type(data).__name__}")
    try:
        declared = _declared(data)
        if declared != nbytes:
            raise broken(where, f"the blob declares {declared} bytes, {nbytes} were expected")
        reader = zstd.ZstdDecompressor()
        raw = reader.decompress(data, nbytes)
    except zstd.ZstdError as error:
        raise broken(where, f"the blob does not decompress ({error})") from error
    if not reader.eof or reader.unused_data:
        raise broken(where, "the blob is cut short, or something follows it")
    return raw


def decode(data: object, dtype: np.dtype[Any], shape: Sequence[int], where: str) -> NDArray[Any]:
    """The inverse of `encode`; `SessionError` unless the blob holds exactly that much."""
    array: NDArray[Any] = decode_many([data], dtype, shape, where)[0]
    return array


def decode_many(
    blobs: Sequence[object], dtype: np.dtype[Any], shape: Sequence[int], where: str
) -> NDArray[Any]:
    """Several arrays of one shape, [len(blobs), *shape]: decoded together, which is far quicker."""
    return from_planes(planes_of(blobs, dtype, shape, where), dtype)


def planes_of(
    blobs: Sequence[object], dtype: np.dtype[Any], shape: Sequence[int], where: str
) -> NDArray[np.uint8]:
    """The byte planes of several arrays of one shape, [len(blobs), itemsize, *shape]: for reading a few
    elements of each without decoding the rest."""
    size = math.prod(shape) * dtype.itemsize
    raw = [decompress(data, size, where) for data in blobs] if len(blobs) == 1 else ()
    planes = np.frombuffer(raw[0], np.uint8) if raw else np.empty(len(blobs) * size, np.uint8)
    for at, data in enumerate(() if raw else blobs):
        planes[at * size : (at + 1) * size] = np.frombuffer(decompress(data, size, where), np.uint8)
    return planes.reshape((len(blobs), dtype.itemsize, *shape))


def from_planes(planes: NDArray[np.uint8], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The elements whose bytes lie along axis 1: [n, itemsize, …] to [n, …]."""
    count, itemsize, *shape = planes.shape
    flat = planes.reshape(count, itemsize, math.prod(shape)).swapaxes(1, 2)
    array: NDArray[Any] = np.ascontiguousarray(flat).view(dtype).reshape(count, *shape)
    return array


def encode_ints(values: Sequence[int]) -> bytes:
    """Integers as compressed int64 differences: consecutive positions and blocks shrink to nothing."""
    if len(values) == 0:
        return b""
    return encode(np.diff(np.asarray(values, np.int64), prepend=np.int64(0)))


def decode_ints(data: object, where: str, most: int = MAX_LIST_BYTES // 8) -> tuple[int, ...]:
    """The inverse of `encode_ints`; `SessionError` for a list that claims more than `most` integers."""
    if data == b"":
        return ()
    length = list_length(data, where)
    if length > most:
        raise broken(where, f"a list of {length} integers, where at most {most} may be")
    deltas = decode(data, np.dtype("<i8"), (length,), where)
    return tuple(np.cumsum(deltas, dtype=np.int64).tolist())


def encode_floats(values: Sequence[float]) -> bytes:
    """Floats exactly, as compressed float64."""
    return encode(np.asarray(values, np.float64)) if len(values) else b""


def decode_floats(data: object, where: str) -> tuple[float, ...]:
    """The inverse of `encode_floats`."""
    if data == b"":
        return ()
    return tuple(decode(data, np.dtype("<f8"), (list_length(data, where),), where).tolist())


def list_length(data: object, where: str) -> int:
    """Elements of 8 bytes that a list's blob declares, if that is a size a list may have."""
    if data == b"":
        return 0
    if not isinstance(data, bytes):
        raise broken(where, f"expected a blob, found {type(data).__name__}")
    try:
        declared = _declared(data)
    except zstd.ZstdError as error:
        raise broken(where, f"the blob is no zstd frame ({error})") from error
    if declared is None:
        raise broken(where, "the blob does not declare its size")
    if declared % 8 or declared > MAX_LIST_BYTES:
        raise broken(where, f"a list of {declared} bytes (at most {MAX_LIST_BYTES}, in eights)")
    return declared // 8
