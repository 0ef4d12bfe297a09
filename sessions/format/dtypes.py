"""What tensors a session holds: their dtypes, how large they may be, and the hash that names a tensor's content."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sessions.errors import broken
from sessions.format.json_text import parse_json

#: The largest tensor that a session may hold (uncompressed bytes).
MAX_TENSOR_BYTES = 1 << 30
MAX_DIMS = 8

#: The engine's dtype names, and the numpy type each is stored as. bfloat16 travels as its bits.
STORED_AS: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "bool": np.dtype("?"),
    **{f"float{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
    **{f"int{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
}


def stored(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """`array` as its dtype is stored. `ValueError` when it is not of the declared dtype, or too large."""
    kind = STORED_AS.get(dtype)
    if kind is None:
        raise ValueError(f"a session cannot hold dtype {dtype!r}; it knows {', '.join(sorted(STORED_AS))}")
    if array.dtype.newbyteorder("<") != kind:
        raise ValueError(f"a {dtype} tensor has to come as numpy {kind.name}, not {array.dtype}")
    if array.nbytes > MAX_TENSOR_BYTES or array.ndim > MAX_DIMS:
        raise ValueError(
            f"a tensor of shape {array.shape} ({array.nbytes} bytes) is more than a session holds "
            f"({MAX_TENSOR_BYTES} bytes, {MAX_DIMS} dimensions); capture a slice of it"
        )
    return np.asarray(array, dtype=kind, order="C")


def tensor_hash(array: NDArray[Any], dtype: str) -> bytes:
    """blake2b-128 of dtype, shape and bytes: the tensor's name in the session. Takes a `stored` array."""
    digest = hashlib.blake2b(f"{dtype}{json.dumps(array.shape)}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


def parse_shape(text: object, dtype: object, where: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """A blob's declared dtype and shape, refused when they claim more than a tensor may have."""
    kind = STORED_AS.get(dtype) if isinstance(dtype, str) else None
    if kind is None:
        raise broken(where, f"unknown dtype {str(dtype)[:40]!r}")
    shape = parse_json(text, where)
    if (
        not isinstance(shape, list)
        or not all(type(n) is int and n >= 0 for n in shape)
        or len(shape) > MAX_DIMS
    ):
        raise broken(where, f"{str(text)[:80]!r} is no shape")
    if math.prod(shape) * kind.itemsize > MAX_TENSOR_BYTES:
        raise broken(where, f"shape {str(shape)[:80]} claims more than {MAX_TENSOR_BYTES} bytes")
    return kind, tuple(shape)


def widen(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """bfloat16 bits as the float32 of the same value; anything else as it is."""
    if dtype != "bfloat16":
        return array
    return np.left_shift(array.astype(np.uint32), 16, dtype=np.uint32).view(np.float32)
