"""A tensor's sheet in lines of text: what is under the cursor, its figures, and the numbers around the cursor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.tui.widgets.axes import Axes
from lockstep.workbench.tui.widgets.fit import fit
from lockstep.workbench.tui.widgets.plot import bars, squeeze
from lockstep.workbench.tui.widgets.text_block import TextLine
from lockstep.workbench.views.rank_weights import shape_text
from lockstep.workbench.views.sheet import Coordinates, Sheet, Strong
from lockstep.workbench.views.tensor import DIFFERENCE, GOLDEN, REBUILT, Tensor, TensorFigures
from lockstep.workbench.views.tensor_look import TensorLook
from lockstep.workbench.words.numbers import count, number

#: Cells of the least column of words beside the map.
SIDE = 30
#: Cells that a number takes and those before the first, and the rows of numbers.
_CELL, _BEFORE, _ROWS = 10, 14, 5
_SHORT = {"token": "t", "query": "q", "key": "k", "head": "h", "kv head": "kv", "channel": "c"}
#: The label of the token at a position.
Label = Callable[[int], str]


def coordinate(name: str, number_: int, label: Label) -> str:
    """ "22 roof", "head 3"."""
    if name in ("token", "query", "key"):
        return f"{number_} {label(number_)}".rstrip()
    return str(number_) if name in ("channel", "input", "output", "id") else f"{name} {number_}"


def place_words(laid: Sheet, place: Coordinates, label: Label) -> str:
    """A row's or a column's place: of axes with a single element nothing is reported."""
    single = {axis.name for axis in laid.axes if len(axis) == 1}
    reported = [(name, number_) for name, number_ in place if name not in single]
    if len(reported) == 1:
        return coordinate(*reported[0], label)
    return "·".join(str(number_) for _, number_ in reported)


def sheet_axes(laid: Sheet, label: Label) -> Axes:
    """Every row and column by its place; what they count stands in the title."""
    if laid.folded:
        return Axes(lambda r: place_words(laid, laid.first_of(r), label), lambda c: f"+{c}" if c else "")
    return Axes(
        lambda r: place_words(laid, laid.row(r), label), lambda c: place_words(laid, laid.column(c), label)
    )


def title_lines(look: TensorLook, parameter: bool, way: int, label: Label) -> list[TextLine]:
    """What is shown, of whom, and how it is laid out."""
    found, laid = look.tensor, look.sheet
    assert laid is not None
    rank = found.view.startswith("rank")
    words = _view_words(found.view, parameter)
    first: TextLine = [
        (f"{found.tap}  ", "strong"),
        (f"{words}  ", f"rank{int(found.view[5:]) % 4}" if rank else "accent"),
        (f"{shape_text([len(axis) for axis in laid.axes])} {found.dtype}".rstrip(), "text"),
        (f"  [{found.slice}] of the whole" if found.slice else "", "wrong"),
        (f"  {found.layout}", "quiet"),
    ]
    second: list[tuple[str, str]] = [(laid.arrangement.words(laid.axes), "quiet")]
    if (sliced := laid.arrangement.sliced) is not None:
        axis = laid.axes[sliced]
        at = coordinate(axis.name, axis.numbers[laid.index], label)
        second += [(": ", "quiet"), (at, "strong"), (f" of {len(axis)}  ", "quiet"), ("< >", "text")]
    if look.ways > 1:
        second += [(f"   m  {way % look.ways + 1} of {look.ways}", "quiet")]
    return [first, second]


def _view_words(view: str, parameter: bool) -> str:
    if parameter and view.startswith(DIFFERENCE):
        return f"rank {view.split()[1]} less the checkpoint"
    return {REBUILT: "all ranks", DIFFERENCE: "less golden", GOLDEN: "golden's"}.get(view, view)


def pointed_lines(found: Tensor, laid: Sheet, cursor: tuple[int, int], label: Label) -> list[TextLine]:
    """What the element under the cursor is, its value exactly, its bits, and golden's."""
    row, column = (min(at, size - 1) for at, size in zip(cursor, laid.values.shape, strict=True))
    place = laid.coordinates(row, column)
    if not place:
        return [[("past the end", "quiet")]]
    rank = laid.rank(row, column)
    lines: list[TextLine] = [
        [(f"{name:<8}", "quiet"), (coordinate(name, at, label).removeprefix(f"{name} "), "text")]
        for name, at in place
    ]
    if rank is not None:
        lines.append([("rank    ", "quiet"), (str(rank), f"rank{rank % 4}")])
    value = laid.values[row, column]
    if laid.masked and np.isneginf(value):
        return [*lines, [("value   ", "quiet"), ("-∞: masked", "quiet")]]
    role = "strong" if np.isfinite(value) else "wrong"
    lines += [[("value   ", "quiet"), (exact(value), role)], [("bits    ", "quiet"), (bits(value), "quiet")]]
    if laid.beside is not None:
        golden = laid.beside[row, column]
        ours = golden + value if found.view == "difference" else value
        gap = value if found.view == "difference" else ours - golden
        lines += [[("golden  ", "quiet"), (exact(golden), "text")]]
        if found.view != "difference":
            lines += [[("diff    ", "quiet"), (number(float(gap)), "text")]]
    return lines


def exact(value: np.float32) -> str:
    """The shortest text that gives the same float32 again; NaN and Inf as everywhere."""
    return str(np.float32(value)) if np.isfinite(value) else number(float(value))


def bits(value: np.float32) -> str:
    """The float32's bits; a bfloat16's are the upper half."""
    return f"0x{int(np.float32(value).view(np.uint32)):08x}"


def figure_lines(found: TensorFigures, width: int, height: int) -> list[TextLine]:
    """The statistics of what is shown, and how its values are spread where there are lines for it."""
    half = width // 2
    nothing = found.nan + found.inf >= found.count  # no number to measure
    pairs = (
        (("min", found.minimum), ("max", found.maximum)),
        (("mean", found.mean), ("rms", found.rms)),
    )
    lines: list[TextLine] = [
        [
            piece
            for name, value in pair
            for piece in (
                (f"{name:<5}", "quiet"),
                (fit("-" if nothing else number(value, 4), half - 5), "text"),
            )
        ]
        for pair in pairs
    ]
    broken: TextLine = [
        piece
        for name, many in (("NaN", found.nan), ("Inf", found.inf))
        for piece in ((f"{name:<5}", "quiet"), (fit(count(many), half - 5), "wrong" if many else "quiet"))
    ]
    lines += [broken, [("zeros ", "quiet"), (f"{count(found.zeros)} of {count(found.count)}", "quiet")]]
    room = height - len(lines) - 2
    if room > 0 and found.counts:
        drawn = bars(squeeze([c**0.5 for c in found.counts], width), min(4, room))
        low, high = number(found.minimum), number(found.maximum)
        span = min(width, len(found.counts))
        lines += [[], *([(line, "trace")] for line in drawn), [(low + high.rjust(span - len(low)), "quiet")]]
    return lines


def strongest_lines(
    laid: Sheet, found: Sequence[Strong], at: int, texts: Mapping[int, str]
) -> list[TextLine]:
    """The largest values with their places; the one that the cursor was sent to is marked. `texts`: of token ids."""
    single = {axis.name for axis in laid.axes if len(axis) == 1}
    lines: list[TextLine] = []
    for i, one in enumerate(found):
        place = " ".join(
            f"{_SHORT.get(name, name)} {at_}{' ' * (name == 'id')}{texts.get(at_, '') if name == 'id' else ''}"
            for name, at_ in laid.coordinates(one.row, one.column)
            if name not in single
        )
        role = "wrong" if not np.isfinite(one.value) else "strong" if i == at else "text"
        lines.append(
            [("▸" if i == at else " ", "accent"), (f"{number(one.value, 4):>9}  ", role), (place, "quiet")]
        )
    return lines


def number_lines(
    laid: Sheet, cursor: tuple[int, int], width: int, words: Callable[[Coordinates], str]
) -> list[TextLine]:
    """The numbers around a cell (row, column), the cell's marked, in lines of at most `width` cells."""
    values: NDArray[np.float32] = laid.values
    row, column = (min(at, size - 1) for at, size in zip(cursor, values.shape, strict=True))
    across = max(1, (width - _BEFORE) // _CELL)
    top = max(0, min(row - _ROWS // 2, values.shape[0] - _ROWS))
    left = max(0, min(column - across // 2, values.shape[1] - across))
    columns = range(left, min(left + across, values.shape[1]))
    heads = ((f"+{c}" if laid.folded else words(laid.column(c))) for c in columns)
    lines: list[TextLine] = [
        [(" " * _BEFORE, "quiet"), *((fit(head, _CELL - 1, right=True) + " ", "quiet") for head in heads)]
    ]
    for r in range(top, min(top + _ROWS, values.shape[0])):
        name = words(laid.first_of(r) if laid.folded else laid.row(r))
        cells = [_cell(laid, r, c, (r, c) == (row, column)) for c in columns]
        lines.append([(fit(name, _BEFORE - 1) + " ", "quiet"), *cells])
    return lines


def _cell(laid: Sheet, row: int, column: int, here: bool) -> tuple[str, str]:
    value = float(laid.values[row, column])
    nothing = laid.masked and value == -np.inf
    if row * laid.values.shape[1] + column >= laid.count:
        return " " * _CELL, "quiet"
    role = "text" if np.isfinite(value) else "quiet" if nothing else "wrong"
    return f"{'masked' if nothing else number(value, 4):>{_CELL - 1}} ", "present" if here else role
