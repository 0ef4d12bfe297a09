"""A few lines of bars for one row of numbers: how a figure goes over depth, or a histogram."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from itertools import groupby

from lockstep.workbench.tui.widgets.grid import GridCell

_EIGHTHS = " ▁▂▃▄▅▆▇█"
#: The four levels of a line, from the top: of a curve, and of what it is held against.
_CURVE, _FLOOR = "⠉⠒⠤⣀", "⠁⠂⠄⡀"


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


def curve(
    values: Sequence[float | None], floors: Sequence[float | None], height: int
) -> list[list[GridCell]]:
    """`values` as a curve over the `floors` that they are held against, four levels to a line; top line first. What is
    not finite is `×` on the top line."""
    known = [v for v in (*values, *floors) if v is not None and math.isfinite(v)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    levels = 4 * height - 1

    def level(value: float | None) -> int | None:
        if value is None:
            return None
        return round((high - value) / ((high - low) or 1.0) * levels) if math.isfinite(value) else -1

    pairs = [(level(v), level(f)) for v, f in zip(values, floors, strict=True)]
    lines = []
    for line in range(height):
        cells = [_point(line, *pair) for pair in pairs]
        lines.append(
            [("".join(text for text, _ in run), role) for role, run in groupby(cells, lambda c: c[1])]
        )
    return lines


def _point(line: int, value: int | None, floor: int | None) -> GridCell:
    """The cell of the line: the value before its floor."""
    if value == -1 and line == 0:
        return "×", "wrong"
    if value is not None and value >= 0 and value // 4 == line:
        return _CURVE[value % 4], "text"
    if floor is not None and floor >= 0 and floor // 4 == line:
        return _FLOOR[floor % 4], "quiet"
    return " ", "quiet"


def squeeze(values: Sequence[float | None], width: int) -> list[float | None]:
    """At most `width` values, each the greatest of its share."""
    if len(values) <= width:
        return list(values)
    edges = [i * len(values) // width for i in range(width + 1)]
    shares = [values[start:stop] for start, stop in itertools.pairwise(edges)]
    return [greatest(share) for share in shares]


def greatest(values: Sequence[float | None]) -> float | None:
    """The greatest that is known; NaN before any number: what broke must be seen."""
    known = [v for v in values if v is not None]
    return next((v for v in known if math.isnan(v)), max(known, default=None))
