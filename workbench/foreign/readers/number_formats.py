"""Numbers of dtypes that numpy has no type for, as arrays that it has."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.dtypes import small_floats

#: The numbers of a tensor, and its dtype by name: bfloat16 as uint16.
Numbers = tuple[str, NDArray[Any]]

#: torch's dtypes -> what the bytes of an element are to numpy.
NUMPY = {
    "float64": "f8", "float32": "f4", "float16": "f2", "bfloat16": "u2", "int64": "i8", "int32": "i4", "int16": "i2",
    "int8": "i1", "uint8": "u1", "uint16": "u2", "uint32": "u4", "uint64": "u8", "bool": "u1",
    "float8_e4m3fn": "u1", "float8_e4m3fnuz": "u1", "float8_e5m2": "u1", "float8_e5m2fnuz": "u1",
    "float8_e8m0fnu": "u1",
}  # fmt: skip


def as_numbers(dtype: str, found: NDArray[Any]) -> Numbers:
    """An array of such bytes -> a copy with the numbers in it, exactly."""
    array = np.array(found, found.dtype.newbyteorder("="), order="C")
    if dtype == "bool":
        return "bool", array.astype(np.bool_)
    if dtype.startswith("float8"):
        return "float32", _eight_bits(dtype)[array]
    return dtype, array


@cache
def _eight_bits(dtype: str) -> NDArray[np.float32]:
    """The 256 values of an eight-bit float: those of OCP's MX formats ("fn": no infinities), and AMD's and Graphcore's
    ("uz": one zero, and NaN in the place of the other)."""
    if dtype == "float8_e8m0fnu":
        return np.append(2.0 ** (np.arange(255) - 127.0), np.nan).astype(np.float32)
    mantissa_bits = 3 if "e4m3" in dtype else 2
    exponent_bits = 7 - mantissa_bits
    bias = (1 << (exponent_bits - 1)) - (0 if dtype.endswith("uz") else 1)
    sizes = small_floats(exponent_bits, mantissa_bits, bias)
    values = np.concatenate([sizes, -sizes])
    if dtype.endswith("uz"):
        values[128] = np.nan
    elif dtype == "float8_e4m3fn":
        values[[127, 255]] = np.nan
    else:  # e5m2 has what larger floats have
        for sign, first in ((1, 0x7C), (-1, 0xFC)):
            values[first : first + 4] = [sign * np.inf, np.nan, np.nan, np.nan]
    return values.astype(np.float32)
