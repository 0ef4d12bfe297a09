"""A row of numbers as bars one line high, for a cell of a table or a line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
#: What stands for a number that is not there, and for one that is not finite.
MISSING, BROKEN = " ", "×"


def sparkline(
    values: Sequence[float | None], width: int | None = None, among: Sequence[float | None] = ()
) -> str:
    """`values` as bars from their least to their greatest, or to that of those `among` which they are shown; the last
    `width` of them, padded on the left.

    None is a gap, NaN and Inf are `×`: a statistic that broke must not look like a small one.
    """
    shown = list(values if width is None else values[-width:]) if width != 0 else []
    finite = [value for value in (*shown, *among) if value is not None and math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    bars = "".join(_bar(value, low, high) for value in shown)
    return bars if width is None else bars.rjust(width)


def _bar(value: float | None, low: float, high: float) -> str:
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return BROKEN
    # A statistic that hardly moves is a flat line, not the noise of its last digits blown up.
    span = max(high - low, 0.1 * max(abs(high), abs(low)))
    return BARS[0] if span == 0 else BARS[min(7, int((value - low) / span * 8))]
