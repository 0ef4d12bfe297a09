"""Tensors by content: what a blob declares of its tensor, and the hash that names it."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.dtypes import MAX_DIMS, MAX_TENSOR_BYTES, STORED_AS
from lockstep.sessions.errors import broken
from lockstep.sessions.format.json_text import parse_json

#: Characters of a shape's text: more than MAX_DIMS numbers need.
_LONGEST_SHAPE = 200


def tensor_hash(array: NDArray[Any], dtype: str) -> bytes:
    """blake2b-128 of dtype, shape and bytes: the tensor's name in the session. Takes a `stored` array."""
    digest = hashlib.blake2b(f"{dtype}{list(array.shape)}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


def parse_shape(text: object, dtype: object, where: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """A blob's declared dtype and shape, refused when they claim more than a tensor may have."""
    kind = STORED_AS.get(dtype) if isinstance(dtype, str) else None
    if kind is None:
        raise broken(where, f"unknown dtype {str(dtype)[:40]!r}")
    shape = parse_json(text[:_LONGEST_SHAPE] if isinstance(text, str) else text, where)
    if (
        not isinstance(shape, list)
        or not all(type(n) is int and n >= 0 for n in shape)
        or len(shape) > MAX_DIMS
    ):
        raise broken(where, f"{str(text)[:80]!r} is no shape")
    # A dimension of 0 makes room for no other: numpy refuses those whose product is beyond its integers.
    if math.prod(max(n, 1) for n in shape) * kind.itemsize > MAX_TENSOR_BYTES:
        raise broken(where, f"shape {str(shape)[:80]} claims more than {MAX_TENSOR_BYTES} bytes")
    return kind, tuple(shape)
