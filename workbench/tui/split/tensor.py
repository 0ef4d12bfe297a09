"""Part 4 of the split view: any tensor on both sides, and the difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from textual import on
from textual.binding import Binding, BindingType
from textual.widget import Widget

from lockstep.workbench.export.colormap import Scale
from lockstep.workbench.export.table import Table
from lockstep.workbench.tui.panes.tensor_text import coordinate, sheet_axes
from lockstep.workbench.tui.split.maps import (
    MAP_HINTS,
    MapsPart,
    SideMap,
    SideMaps,
    hidden_line,
    strongest,
    under_cursor,
)
from lockstep.workbench.tui.widgets.heatmap import Heatmap
from lockstep.workbench.tui.widgets.key_bar import KeyHint
from lockstep.workbench.tui.widgets.shading import Matrix
from lockstep.workbench.tui.widgets.text_block import TextBlock, TextLine
from lockstep.workbench.views.axes import Axis, strides
from lockstep.workbench.views.compared_tensors import ComparedTensor, compared_tensor
from lockstep.workbench.views.difference import hides
from lockstep.workbench.views.rank_weights import shape_text
from lockstep.workbench.views.sheet import Sheet, arrangements, sheet
from lockstep.workbench.views.tensor import Tensor
from lockstep.workbench.words.numbers import number


class SplitTensor(MapsPart):
    """The tensor of the operation that is looked at."""

    NUMBER = 4
    TITLE = "Tensor"
    HELP = """\
The tensor of one operation on both sides, and ours less theirs on the diverging scale (blue below, orange above).

`enter` on a row of the operations opens it here. Both sides share a scale. The line at the foot gives the figures
of the difference (the largest, relative L2, cosine) and the values under the cursor.

  d    the next map              m    lay it out otherwise
  z    one map alone, or all     { }  previous, next token or head, where one is shown
  a    computes what a side lacks
"""
    HINTS = (
        *MAP_HINTS,
        KeyHint(", .", "layer", "full_stop"),
        KeyHint("{ }", "slice", "right_curly_bracket"),
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "arrange", "Lay out otherwise"),
        Binding("right_curly_bracket", "slice(1)", "Next slice"),
        Binding("left_curly_bracket", "slice(-1)", "Previous slice"),
    ]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: ComparedTensor | None = None
        self._way, self._index = 0, 0
        self._sheets: list[Sheet | None] = []

    def content(self) -> Iterable[Widget]:
        """The maps, and the figures."""
        yield SideMaps(id="tensor-maps")
        yield TextBlock(id="figures")

    def compared(self) -> tuple[Callable[..., ComparedTensor], Sequence[object]]:
        """The tap of the place."""
        return compared_tensor, ()

    def lacking(self) -> Sequence[tuple[str, str]]:
        """The sides that did not capture it."""
        return [] if self.snapshot is None else [(side, self.snapshot.tap) for side in self.snapshot.lacking]

    def answer(self, snapshot: ComparedTensor) -> None:
        """Show it."""
        self.snapshot = snapshot
        self.filled()
        self._draw()

    def _draw(self) -> None:
        found = self.snapshot
        if found is None:
            return
        theirs = None if found.theirs is None else found.theirs.array
        self._sheets = [self._laid(array) for array in (found.ours.array, theirs, found.difference)]
        sides = self._sheets[:2]
        top = strongest([None if one is None else one.elements for one in sides])
        signed = any(
            bool((one.elements[np.isfinite(one.elements)] < 0).any()) for one in sides if one is not None
        )
        reported = [
            self._missing(*side) for side in zip(found.names, (found.ours, found.theirs), strict=True)
        ]
        reported.append([[(found.why_not, "accent")]])
        titles = (*found.names, " − ".join(found.names))
        kind: Scale = "difference" if signed else "magnitude"
        kinds: tuple[Scale, ...] = (kind, kind, "difference")
        maps = []
        for title, laid, scale, missing in zip(titles, self._sheets, kinds, reported, strict=True):
            shared = None if laid is self._sheets[2] else top
            maps.append(SideMap(title, None if laid is None else self._matrix(laid, scale, shared), missing))
        self.query_one(SideMaps).show(maps)
        self._report()

    def _matrix(self, laid: Sheet, scale: Scale, top: float | None) -> Matrix:
        masked = laid.masked or laid.count < laid.values.size
        return Matrix(laid.values, scale, top=top, masked=masked, axes=sheet_axes(laid, self.label))

    def _laid(self, array: NDArray[np.float32] | None) -> Sheet | None:
        """The tensor in the chosen way, by the axes of a side that has such a shape."""
        found = self.snapshot
        if found is None or array is None or not array.size:
            return None
        known = (side.axes for side in (found.ours, found.theirs) if side is not None and side.axes)
        plain = tuple(Axis(f"dim {i}", range(size)) for i, size in enumerate(array.shape))
        axes = next((axes for axes in known if strides(axes) == array.size), plain)
        width, height = self.query_one(SideMaps).room
        ways = arrangements(axes, height)
        way, room = ways[self._way % len(ways)], (width, height)
        return sheet(array, None, axes, way, self._index, room, hides(found.tap))

    def _missing(self, name: str, side: Tensor | None) -> list[TextLine]:
        assert self.snapshot is not None
        if side is None:
            return [[(self.snapshot.why_not, "accent")]]
        reported = f"{name} at step {self.snapshot.step}: {side.note or 'not captured'}"
        how = (
            "a  has the step run again for it"
            if self.live
            else f"record the run with --capture '{side.tap}' for it"
        )
        return [[(reported, "quiet")], [], [(how, "text")]]

    def _report(self) -> None:
        """Three lines: the tensor, how far the sides are apart, what is under the cursor."""
        found = self.snapshot
        assert found is not None
        arrays = [found.ours.array, None if found.theirs is None else found.theirs.array, found.difference]
        shapes = [shape_text(one.shape) for one in arrays if one is not None]
        laid = next((one for one in self._sheets if one is not None), None)
        words = "" if laid is None else f"   {laid.arrangement.words(laid.axes)}"
        if laid is not None and laid.arrangement.sliced is not None:
            axis = laid.axes[laid.arrangement.sliced]
            words += f": {coordinate(axis.name, axis.numbers[laid.index], self.label)} of {len(axis)}"
        head = [(f"{found.tap} ", "strong"), (f"{shapes[0] if shapes else ''}{words}", "quiet")]
        reported: TextLine = [(found.why_not, "accent")]
        if not found.why_not and found.metrics is not None:
            one = found.metrics
            figures = f"max abs {number(one.max_abs)} at {list(one.where)}   rel L2 {number(one.rel_l2)}"
            reported = [("equal" if one.equal else f"{figures}   cos {number(one.cosine, 4)}", "text")]
            reported += hidden_line(found.names, arrays[0], arrays[1], found.tap)
        cursor = self.query_one(SideMaps).cursor
        planes = [None if one is None else one.values for one in self._sheets]
        line = under_cursor(found.names, planes, cursor, found.tap)
        if laid is not None:
            place = ", ".join(self._coordinate(*one) for one in laid.coordinates(*cursor))
            line = [(f"{place}   ", "strong"), *line]
        self.query_one("#figures", TextBlock).show([head, reported, line])

    def _coordinate(self, name: str, at: int) -> str:
        reported = coordinate(name, at, self.label)
        return reported if reported.startswith(name) else f"{name} {reported}"

    @on(Heatmap.Pointed)
    def _pointed(self, event: Heatmap.Pointed) -> None:
        event.stop()
        if self.snapshot is not None:
            self._report()

    def action_arrange(self) -> None:
        """Lay it out otherwise."""
        self._way, self._index = self._way + 1, 0
        self._draw()

    def action_slice(self, by: int) -> None:
        """Another token or head, where one is shown at a time."""
        self._index += by
        self._draw()

    def table(self) -> Table | None:
        """The numbers of the slice that is shown: ours, theirs and the difference, a row an element."""
        found = self.snapshot
        if found is None or found.difference is None or found.ours.array is None:
            return None
        assert found.theirs is not None
        assert found.theirs.array is not None
        planes = [one.values for one in self._sheets if one is not None]
        rows, columns = planes[2].shape
        cells = tuple(
            (row, column, *(float(one[row, column]) for one in planes))
            for row in range(rows)
            for column in range(columns)
        )
        return Table(f"{found.tap}, step {found.step}", ("row", "column", *found.names, "difference"), cells)
