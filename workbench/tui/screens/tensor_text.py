"""A tensor's slice in lines of text: its figures, and the numbers around a cell."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workbench.export.numbers import count, number
from workbench.tui.widgets.plot import bars, squeeze
from workbench.tui.widgets.text_block import TextLine
from workbench.views.tensor import tensor_figures

#: Cells that a number takes, and the rows of numbers.
_CELL, _ROWS = 10, 5


def figure_lines(values: NDArray[np.float32]) -> list[TextLine]:
    """The statistics of a matrix, and how its values are spread."""
    found = tensor_figures(values)
    lines: list[TextLine] = []
    for name, value in (
        ("min", found.minimum),
        ("max", found.maximum),
        ("mean", found.mean),
        ("rms", found.rms),
    ):
        lines.append([(f"{name:<7}", "quiet"), (number(value, 4), "text")])
    for name, many in (("NaN", found.nan), ("Inf", found.inf)):
        lines.append([(f"{name:<7}", "quiet"), (count(many), "wrong" if many else "quiet")])
    lines.append([("zeros  ", "quiet"), (f"{count(found.zeros)} of {count(found.count)}", "quiet")])
    lines.append([])
    lines += [[(line, "trace")] for line in bars(squeeze([c**0.5 for c in found.counts], 28), 4)]
    return [*lines, [(f"{number(found.minimum)} … {number(found.maximum)}", "quiet")]]


def number_lines(values: NDArray[np.float32], cursor: tuple[int, int], width: int) -> list[TextLine]:
    """The numbers of a matrix around a cell (row, column), the cell's marked, in lines of at most `width` cells."""
    row, column = cursor
    across = max(1, (width - 8) // _CELL)
    top = max(0, min(row - _ROWS // 2, values.shape[0] - _ROWS))
    left = max(0, min(column - across // 2, values.shape[1] - across))
    columns = range(left, min(left + across, values.shape[1]))
    lines: list[TextLine] = [[(" " * 7, "quiet"), *((f"{c:>{_CELL}}", "quiet") for c in columns)]]
    for r in range(top, min(top + _ROWS, values.shape[0])):
        cells = [
            (f"{number(float(values[r, c]), 4):>{_CELL}}", _role(values[r, c], (r, c) == (row, column)))
            for c in columns
        ]
        lines.append([(f"{r:>6} ", "quiet"), *cells])
    return lines


def _role(value: float, here: bool) -> str:
    if here:
        return "present"
    return "text" if np.isfinite(value) else "wrong"
