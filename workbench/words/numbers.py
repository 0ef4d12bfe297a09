"""Numbers as text, on screen, in reports and in what commands print: of even width in columns, NaN and ∞ the same
everywhere."""

from __future__ import annotations

import math


def number(value: float | None, digits: int = 3) -> str:
    """`value` in at most seven or so cells: 3.41, 820, 1.2e-5, NaN, ∞; `-` where there is none."""
    if value is None:
        return "-"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    size = abs(value)
    if size == 0:
        return "0"
    if 1e-2 <= size < 10**digits:
        decimals = max(0, digits - 1 - math.floor(math.log10(size)))
        return f"{value:.{min(decimals, digits)}f}"
    if digits <= 4 <= size < 1e5 and float(value).is_integer():
        return f"{value:.0f}"
    return power(value, digits - 2)


def scalar(value: float) -> str:
    """A number that stands alone, to six significant digits; what is no finite number as `number` has it."""
    return f"{value:.6g}" if math.isfinite(value) else number(value)


def cell(value: float) -> str:
    """A number in a table of which nobody knows whether it counts or measures: four digits, none after a whole one."""
    whole = math.isfinite(value) and value == int(value) and abs(value) < 1e15
    return f"{value:.0f}" if whole else number(value, 4)


def fixed(value: float | None, decimals: int) -> str:
    """`value` with so many decimals; what is no finite number as `number` has it."""
    return number(value) if value is None or not math.isfinite(value) else f"{value:.{decimals}f}"


def chance(probability: float | None) -> str:
    """A probability between 0 and 1, with four decimals; a smaller one than they show in powers of ten: 2.5e-5."""
    if probability is None or not 0 < probability < 0.001:
        return fixed(probability, 4) if probability != 0 else "0"
    return power(probability, 1)


def times(ratio: float) -> str:
    """How many times larger something is, to two significant digits: 9.1, 120, 210,000."""
    if not 10 <= ratio < 1e7:
        return number(ratio, 2) if ratio < 10 else number(ratio)
    return f"{float(f'{ratio:.2g}'):,.0f}"


def power(value: float, decimals: int = 0) -> str:
    """`value` in powers of ten without padding: 3e-7, 1.2e5."""
    mantissa, _, exponent = f"{value:.{max(0, decimals)}e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def count(value: float) -> str:
    """A count with thousands set apart: 1 681. In a stranger's session it may be no number."""
    return number(value) if not math.isfinite(value) else f"{int(value):,}".replace(",", " ")
