"""Variants of a linear layer that computes with fewer bits than the engine says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from workbench.diagnosis.operations.facts import UNIT, product, rounded
from workbench.diagnosis.operations.site import Site
from workbench.diagnosis.recording import Array
from workbench.diagnosis.variants.replay import Linear
from workbench.diagnosis.variants.variant import Variant

Matrix = NDArray[np.floating]


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


def _groups(bits: int, size: int) -> Callable[[Matrix], Matrix | None]:
    return lambda x: None if x.shape[1] % size else integers(x, bits, size)


#: What numbers may have been rounded to, in words.
ROUNDINGS: Mapping[str, Callable[[Matrix], Matrix | None]] = {
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


def rounded_operands(site: Site) -> Iterator[Variant]:
    """Weights, inputs or both were rounded to fewer bits."""
    linear = Linear.of(site)
    if linear is None or not linear.x.size or not linear.weight.size:
        return
    name = site.weights["weight"]
    inputs = {
        to: x.astype(np.float64) for to, change in ROUNDINGS.items() if (x := change(linear.x)) is not None
    }
    weights = {to: w for to, change in ROUNDINGS.items() if (w := change(linear.weight)) is not None}
    for to, weight in weights.items():
        for what, x in (("", None), (" and inputs", inputs.get(to))):
            predicted = linear.replay(weight=weight, x=x)
            if predicted is not None:
                text = f"{name}{what} are rounded to {to}"
                yield Variant(
                    "low_precision_weight", "precision", text, {"weight": name, "to": to}, predicted
                )
    for to, given in inputs.items():
        predicted = linear.replay(x=given)
        if predicted is not None:
            yield Variant(
                "low_precision_input", "precision", f"its input is rounded to {to}", {"to": to}, predicted
            )


def rounded_result(site: Site) -> Iterator[Variant]:
    """The whole product ran at a lower precision than the engine says: operands and result are rounded."""
    linear = Linear.of(site)
    if linear is None:
        return
    for dtype in ("bfloat16", "float16", "float32"):
        if UNIT[dtype] <= site.facts.unit:
            continue
        out = (
            product(rounded(linear.x, dtype).astype(np.float64), rounded(linear.weight, dtype)) + linear.bias
        )
        for how, value in (("the product", out), ("the result", linear.expected)):
            predicted = rounded(value, dtype).astype(np.float64)
            yield Variant("low_precision", "precision", f"{how} is rounded to {dtype}", {"dtype": dtype}, predicted,
                          tolerance=UNIT[dtype])  # fmt: skip
