"""A few lines of bars for one row of numbers: how a figure goes over depth, or a histogram."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def bars(values: Sequence[float | None], height: int) -> list[str]:
    """`values` ≥ 0 as `height` lines of bars, the greatest as high as there is room; top line first."""
    finite = [v for v in values if v is not None and math.isfinite(v)]
    top = max(finite, default=0.0)
    lines = []
    for line in range(height - 1, -1, -1):
        lines.append("".join(_piece(v, top, line, height) for v in values))
    return lines


def _piece(value: float | None, top: float, line: int, height: int) -> str:
    if value is None or top <= 0:
        return " "
    if not math.isfinite(value):
        return "×"
    eighths = value / top * height * 8 - line * 8
    if value > 0 and line == 0:
        eighths = max(eighths, 1)  # what is there is seen
    return _EIGHTHS[int(min(8, max(0, eighths)))]


def squeeze(values: Sequence[float | None], width: int) -> list[float | None]:
    """At most `width` values, each the greatest of its share."""
    if len(values) <= width:
        return list(values)
    edges = [i * len(values) // width for i in range(width + 1)]
    shares = [values[start:stop] for start, stop in itertools.pairwise(edges)]
    return [max((v for v in share if v is not None), default=None) for share in shares]
