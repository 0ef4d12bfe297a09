"""What numbers may have been rounded to: 16 and 8 bits, integers in groups, tables of levels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.dtypes import small_floats
from lockstep.workbench.diagnosis.operations.facts import rounded
from lockstep.workbench.diagnosis.recording import Array

Matrix = NDArray[np.floating]
#: A matrix rounded; None where its shape does not allow it, or nothing changes.
Rounding = Callable[[Matrix], Matrix | None]


def integers(x: Matrix, bits: int, group: int | None) -> Matrix:
    """Symmetric integers: a scale for each row, or each group of columns in it (0: one for all)."""
    most = 2 ** (bits - 1) - 1
    wide = x.astype(np.float64)
    grouped = wide.reshape(1, -1) if group == 0 else wide.reshape(-1, x.shape[1] if group is None else group)
    scale = np.abs(grouped).max(1, keepdims=True) / most
    scale[scale == 0] = 1.0
    return np.asarray((np.rint(grouped / scale) * scale).reshape(x.shape))


def float8(x: Matrix, mantissa: int, least_exponent: int, largest: float, *, scaled: bool) -> Matrix:
    """Eight-bit floating point; `scaled`: so that the largest fits, one scale for all."""
    wide = x.astype(np.float64)
    scale = float(np.abs(wide).max()) / largest if scaled else 1.0
    wide = np.clip(wide / (scale or 1.0), -largest, largest)
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(wide), 1e-300))), least_exponent)
    step = 2.0 ** (exponent - mantissa)
    return np.asarray(np.rint(wide / step) * step * (scale or 1.0))


def mantissa(x: Matrix, bits: int, *, cut: bool = False) -> Matrix | None:
    """Floating point of so many bits behind the first, of any exponent, rounded to even or cut off; None where `x`
    holds no more."""
    fraction, exponent = np.frexp(x.astype(np.float64))
    scaled = np.ldexp(fraction, bits + 1)
    found = np.ldexp(np.trunc(scaled) if cut else np.rint(scaled), exponent - bits - 1)
    return None if np.array_equal(found, x) else np.asarray(found)


def settled(x: Array, noise: Array, dtype: str) -> tuple[Array, Array]:
    """`x` rounded to a dtype, and by how much more or less it may come out: by a unit where `noise` may move `x` over
    the middle of two numbers."""
    low, high = (rounded(x + sign * noise, dtype).astype(np.float64) for sign in (-1, 1))
    return rounded(x, dtype).astype(np.float64), np.abs(high - low)


def _groups(bits: int, size: int) -> Rounding:
    return lambda x: None if x.shape[1] % size else integers(x, bits, size)


def _zero_points(bits: int, size: int, read_as: int = 0) -> Rounding:
    """Unsigned integers between the least and the largest of each group of columns, as GPTQ and AWQ have them; their
    zero points are read so much larger than they were written."""

    def change(x: Matrix) -> Matrix | None:
        if x.shape[1] % size:
            return None
        groups = x.astype(np.float64).reshape(-1, size)
        least = np.minimum(groups.min(1, keepdims=True), 0)
        most = np.maximum(groups.max(1, keepdims=True), 0)
        step = np.maximum((most - least) / (2**bits - 1), 1e-30)
        zero = np.rint(-least / step)
        return np.asarray(
            ((np.clip(np.rint(groups / step) + zero, 0, 2**bits - 1) - zero - read_as) * step).reshape(
                x.shape
            )
        )

    return change


def _levels(levels: Sequence[float], size: int, *, power: bool = False) -> Rounding:
    """The nearest of so many levels times the largest of each block (of all elements in their order); `power`: times a
    power of two by which the largest fits."""
    table = np.array(sorted({*levels, *(-x for x in levels)} if min(levels) >= 0 else levels))
    middles = (table[1:] + table[:-1]) / 2

    def change(x: Matrix) -> Matrix | None:
        if x.size % size:
            return None
        blocks = x.astype(np.float64).reshape(-1, size)
        scale = np.maximum(np.abs(blocks).max(1, keepdims=True), 1e-30)
        scale = (
            2.0 ** (np.floor(np.log2(scale)) - np.floor(np.log2(table[-1]))) if power else scale / table[-1]
        )
        return np.asarray((table[np.searchsorted(middles, blocks / scale)] * scale).reshape(x.shape))

    return change


def _ggml(name: str) -> Rounding:
    """ggml's own blocks, by its own code."""

    def change(x: Matrix) -> Matrix | None:
        # Imported here: it is part of the extra `engine`, without which nothing is diagnosed, only shown.
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize, quantize

        kind = GGMLQuantizationType[name]
        if x.shape[1] % GGML_QUANT_SIZES[kind][0]:
            return None
        return np.asarray(dequantize(quantize(x.astype(np.float32), kind), kind))

    return change


#: Eight-bit formats: what their positive codes mean, and the largest that is written.
_FORMATS = {
    "e4m3": (small_floats(4, 3, 7), 448.0),
    "e5m2": (small_floats(5, 2, 15), 57344.0),
    "e4m3fnuz": (small_floats(4, 3, 8), 240.0),
    "e5m2fnuz": (small_floats(5, 2, 16), 57344.0),
}


def _reread(written: str, read: str) -> Rounding:
    """Eight-bit floating point that is read as another kind than it was written."""

    def change(x: Matrix) -> Matrix:
        table, most = _FORMATS[written]
        size = np.minimum(np.abs(x.astype(np.float64)), most)
        code = np.searchsorted((table[1:] + table[:-1]) / 2, size)
        return np.asarray(np.sign(x) * _FORMATS[read][0][code])

    return change


def _reread_16_bits(written: str) -> Rounding:
    """One 16-bit dtype that is read as the other one, bit by bit."""

    def change(x: Matrix) -> Matrix:
        kept = np.ascontiguousarray(rounded(x, written))
        if written == "float16":
            return (kept.astype(np.float16).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return (kept.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.float16)

    return lambda x: np.nan_to_num(change(x).astype(np.float64))


def _bits_lost(bits: int, lost: int, size: int) -> Rounding:
    """Symmetric integers in groups, of whose codes (counted from 0) the upper bits are missing."""

    def change(x: Matrix) -> Matrix | None:
        if x.shape[1] % size:
            return None
        groups = x.astype(np.float64).reshape(-1, size)
        half = 2 ** (bits - 1)
        scale = np.maximum(np.abs(groups).max(1, keepdims=True), 1e-30) / (half - 1)
        codes = (np.rint(groups / scale).astype(np.int64) + half) & (2 ** (bits - lost) - 1)
        return np.asarray(((codes - half) * scale).reshape(x.shape))

    return change


#: The levels of NF4 (QLoRA, appendix E) and of the positive numbers of 4-bit floating point (e2m1).
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


#: What numbers may have been rounded to, in words.
ROUNDINGS: Mapping[str, Rounding] = {
    "bfloat16": lambda x: rounded(x, "bfloat16"),
    "float16": lambda x: rounded(x, "float16"),
    "TF32 (10 bits of mantissa)": lambda x: mantissa(x, 10),
    "TF32 (10 bits of mantissa, the rest cut off)": lambda x: mantissa(x, 10, cut=True),
    "float8 (e4m3)": lambda x: float8(x, 3, -6, 448.0, scaled=False),
    "float8 (e4m3, scaled)": lambda x: float8(x, 3, -6, 448.0, scaled=True),
    "float8 (e5m2)": lambda x: float8(x, 2, -14, 57344.0, scaled=False),
    "int8 with a scale per row": lambda x: integers(x, 8, None),
    "int8 with one scale": lambda x: integers(x, 8, 0),
    "int4 with a scale per row": lambda x: integers(x, 4, None),
    **{f"int8 in groups of {size}": _groups(8, size) for size in (16, 32, 64, 128)},
    **{f"int4 in groups of {size}": _groups(4, size) for size in (16, 32, 64, 128)},
}

#: What weights alone may have been rounded to as well.
WEIGHTS: Mapping[str, Rounding] = {
    **{f"4-bit NormalFloat (NF4) in blocks of {size}": _levels(_NF4, size) for size in (64, 128)},
    **{f"4-bit floating point (e2m1) in blocks of {size}": _levels(_E2M1, size) for size in (16, 32, 64)},
    "MXFP4 (e2m1 in blocks of 32 with a power of two)": _levels(_E2M1, 32, power=True),
    **{f"int{bits} with zero points in groups of {size}": _zero_points(bits, size)
       for bits in (4, 8) for size in (32, 64, 128)},
    **{f"ggml's {kind}": _ggml(kind) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")},
}  # fmt: skip


def _without_zero_points(x: Matrix) -> Matrix:
    """Rows that come back as distances from their smallest number."""
    return np.asarray(x - x.min(1, keepdims=True))


def _unsigned_as_signed(x: Matrix) -> Matrix:
    """Bytes above 127 come back 256 steps too small."""
    least = x.min(1, keepdims=True)
    step = np.maximum(np.ptp(x, axis=1, keepdims=True), 1e-30) / 255
    codes = np.rint((x - least) / step)
    return np.asarray(np.where(codes > 127, codes - 256, codes) * step + least)


#: 16-bit dtype -> what it is called where it is read as the other one.
READ_AS_OTHER = {
    written: f"written as {written} and read as {read}"
    for written, read in (("bfloat16", "float16"), ("float16", "bfloat16"))
}
#: Numbers that are written in one format and read in another.
REREAD: Mapping[str, Rounding] = {
    f"written as float8 {written} and read as {read}": _reread(written, read)
    for written in _FORMATS for read in _FORMATS if written != read
} | {name: _reread_16_bits(written) for written, name in READ_AS_OTHER.items()} | {
    "written as integers with a zero point for each row and read without it": _without_zero_points,
    "written as unsigned 8-bit integers with a zero point for each row and read as signed ones": _unsigned_as_signed,
}  # fmt: skip

#: Weights whose integers are put together wrongly.
DAMAGED: Mapping[str, Rounding] = {
    f"{bits}-bit integers in groups of {size}, without their upper {lost} bit{'s' * (lost > 1)}":
        _bits_lost(bits, lost, size)
    for bits, lost in ((5, 1), (6, 2)) for size in (16, 32, 64, 128)
} | {
    f"{bits}-bit integers in groups of {size}, whose zero points are read one too {'high' if by > 0 else 'low'}, as "
    "where two formats count them from 0 and from 1": _zero_points(bits, size, by)
    for bits in (4, 8) for size in (32, 64, 128) for by in (-1, 1)
}  # fmt: skip
