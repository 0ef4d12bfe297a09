"""What stands around a map: labels of its rows and columns, and a line with the colours' values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from lockstep.workbench.export.colormap import SHADES, Scale, shades
from lockstep.workbench.export.pooling import INF, NAN, Pixels
from lockstep.workbench.tui.theme import Paint
from lockstep.workbench.tui.widgets.fit import fit
from lockstep.workbench.words.numbers import number

#: Below this many cells a map has no room for labels.
_NARROW, _LOW = 24, 5
#: The widest labels of rows, the least room of a column's label, and the labels that are measured.
_WIDEST, _LEAST, _MEASURED = 18, 10, 64
_STRIDES = (1, 2, 3, 4, *(factor * 10**power for power in range(7) for factor in (5, 10, 20)))
_BAR, _LEAST_BAR = 12, 4  # cells of a scale, and where its words need the room


@dataclass(frozen=True, slots=True, eq=False)
class Axes:
    """The label of each row and column of a matrix ("" for none), what rows and columns are, what the numbers are."""

    row: Callable[[int], str]
    column: Callable[[int], str]
    rows: str = ""
    columns: str = ""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Margin:
    """The cells that labels take: `left` of the map, `top` above it, `bottom` below it."""

    left: int = 0
    top: int = 0
    bottom: int = 0


def margin(axes: Axes | None, shape: tuple[int, int], width: int, height: int) -> Margin:
    """The cells that labels take of a widget of `width` × `height` cells."""
    if axes is None or height < _LOW:
        return Margin()
    if width < _NARROW:
        return Margin(0, 0, 1)
    beside = max(_longest(axes.row, shape[0]), cell_len(_named(axes)))
    return Margin(min(beside, _WIDEST, width // 4) + 1, 1, 1)


def _longest(label: Callable[[int], str], count: int) -> int:
    """The width of the longest label, or of the longest of some, spread evenly."""
    return max((cell_len(label(i)) for i in range(0, count, max(1, count // _MEASURED))), default=0)


def row_labels(axes: Axes, pixels: Pixels, width: int) -> list[str]:
    """A label for every line of two pixels: of the first row that begins on it, "" where none does."""
    lines, last, labels = -(-len(pixels.rows) // 2), -1, []
    for row in (row_of_line(pixels.rows, y) for y in range(lines)):
        labels.append(fit(axes.row(row) if row > last else "", width - 1) + " ")
        last = row
    return labels


def row_of_line(rows: NDArray[np.intp], y: int) -> int:
    """The row that a line of two pixels stands for: the first one that begins on it, else the one that goes on."""
    upper, lower = int(rows[2 * y]), int(rows[2 * y : 2 * y + 2][-1])
    return lower if y and rows[2 * y - 1] == upper else upper


def column_labels(axes: Axes, pixels: Pixels, width: int, pinned: int | None = None) -> tuple[str, range]:
    """One line of `width` cells: the labels of as many columns as there is room for, each above its first cell; and the
    cells of the label of the `pinned` column, which stands whole and for which others make room."""
    columns = pixels.columns
    count = int(columns[-1]) + 1
    longest = min(_longest(axes.column, count) + 1, _LEAST)
    stride = next((one for one in _STRIDES if one * len(columns) / count >= longest), count)
    labels: list[tuple[int, str]] = []
    starts = [first_cell(columns, column) for column in range(0, count, stride)]
    for index, (start, end) in enumerate(zip(starts, [*starts[1:], max(width, len(columns))], strict=True)):
        label, room = axes.column(index * stride), end - start - 1
        if room >= min(cell_len(label), _LEAST // 2):
            labels.append((start, fit(label, min(room, cell_len(label)))))
    cells = range(0)
    if pinned is not None:
        label = axes.column(pinned)
        label = fit(label, min(cell_len(label), width))
        start = max(0, min(first_cell(columns, pinned), width - cell_len(label)))
        cells = range(start, start + cell_len(label))
        others = [one for one in labels if one[0] > cells.stop or one[0] + cell_len(one[1]) < start]
        labels = sorted([*others, (start, label)])
    line = ""
    for start, label in labels:
        line += " " * (start - cell_len(line)) + label
    return fit(line, width), cells


def first_cell(edges: NDArray[np.intp], element: int) -> int:
    """The first pixel of an element; the one that it shares with others where they are pooled."""
    last = int(np.searchsorted(edges, element, "right")) - 1
    return int(np.searchsorted(edges, edges[last], "left"))


def middle_cell(edges: NDArray[np.intp], element: int) -> int:
    """The pixel in the middle of those that show an element."""
    last = int(np.searchsorted(edges, element, "right")) - 1
    return (int(np.searchsorted(edges, edges[last], "left")) + last) // 2


def corner(axes: Axes, width: int) -> str:
    """What rows and columns are, for the corner between their labels."""
    return fit(_named(axes), width - 1) + " "


def _named(axes: Axes) -> str:
    return f"{axes.rows}↓ {axes.columns}→" if axes.rows or axes.columns else ""


def scale_line(
    scale: Scale, limit: float, styles: Paint, width: int, *, unit: str = "", notes: tuple[str, ...] = ()
) -> list[Segment]:
    """The colours from the least to the greatest value with both numbers, the unit, and what is to be known of the
    map; what does not fit into `width` cells ends in `…`."""
    ground = Style(bgcolor=styles.ground)
    low, high = f"{number(0.0 if scale == 'magnitude' else -limit)} ", f" {number(limit)}"
    reported = "".join(f"  {part}" for part in (unit, *notes) if part)
    cells = min(_BAR, max(2, width // 4))
    lacking = max(0, len(low) + cells + len(high) + cell_len(reported) - width)
    bar = scale_bar(scale, styles, max(min(cells, _LEAST_BAR), cells - lacking))  # words before colours
    room = max(0, width - len(low) - len(bar) - len(high))
    return [
        Segment(low, ground + styles.quiet),
        *bar,
        Segment(high, ground + styles.quiet),
        Segment(fit(reported, room), ground + styles.quiet),
    ]


def scale_bar(scale: Scale, styles: Paint, width: int) -> list[Segment]:
    """The colours from the least to the greatest value."""
    ramp = shades(scale, styles.dark)
    return [Segment(" ", Style(bgcolor=ramp[i * (SHADES - 1) // max(1, width - 1)])) for i in range(width)]


def notes_of(pixels: Pixels, shape: tuple[int, int]) -> tuple[str, ...]:
    """What is to be known of a map as it is drawn: how many elements a pixel stands for (it shows the largest in
    magnitude), and what its glyphs mean."""
    found = []
    if pixels.pooled:
        rows, columns = (-(-size // len(edges)) for size, edges in zip(shape, _edges(pixels), strict=True))
        found.append(f"max-pooled {rows} × {columns}")
    found += ["× NaN"] * bool((pixels.kind == NAN).any()) + ["∞ Inf"] * bool((pixels.kind == INF).any())
    return tuple(found)


def _edges(pixels: Pixels) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    return pixels.rows, pixels.columns
