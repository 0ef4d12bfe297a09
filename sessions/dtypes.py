"""The dtypes of a session's tensors, and how large a tensor may be."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

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


def widen(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """bfloat16 bits as the float32 of the same value; anything else as it is."""
    if dtype != "bfloat16":
        return array
    bits: NDArray[np.uint32] = np.left_shift(array, np.uint32(16), dtype=np.uint32)
    return bits.view(np.float32)


def small_floats(exponent: int, mantissa: int, bias: int) -> NDArray[np.float64]:
    """What the positive codes, from 0 on, of a floating point number of so many bits mean, those of infinities and NaN
    as numbers."""
    code = np.arange(1 << (exponent + mantissa))
    power, fraction = code >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
    return np.where(power == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (power - bias))


def rounded(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The nearest numbers that `dtype` can hold, ties to even; as float32, of float64 as float64."""
    if dtype == "float64":
        return array.astype(np.float64, copy=False)
    single = array.astype(np.float32, copy=False)
    if dtype == "float32":
        return single
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return single.astype(np.float16).astype(np.float32)
    bits = single.view(np.uint32)
    lowest = (bits >> np.uint32(16)) & np.uint32(1)
    kept = (bits + np.uint32(0x7FFF) + lowest) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(single), kept.view(np.float32), single)
