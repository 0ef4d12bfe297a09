"""A matrix as colours: two rows of pixels to a line (▀), pooled so that outliers survive, with a cursor; around it the
labels of its axes and the scale, where the matrix has them.

PaintedWidget on Textual's Line API. The segments of every pair of shades are kept, so a frame costs one look-up
a cell; the lines are handed to the compositor as they are, because restyling 12,000 segments a frame
would cost more than drawing them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip

from lockstep.workbench.export.pooling import Pixels, pool
from lockstep.workbench.tui.guard import GuardedWidget
from lockstep.workbench.tui.theme import paint
from lockstep.workbench.tui.widgets.axes import (
    Axes,
    Margin,
    column_labels,
    corner,
    first_cell,
    margin,
    middle_cell,
    notes_of,
    row_labels,
    row_of_line,
    scale_line,
)
from lockstep.workbench.tui.widgets.fit import fit
from lockstep.workbench.tui.widgets.painted import finished
from lockstep.workbench.tui.widgets.shading import Matrix, lines, strongest


class Heatmap(GuardedWidget, can_focus=True):
    """A matrix with a cursor, as large as there is room. Posts `Pointed` when the cursor moves to another element."""

    DEFAULT_CSS = "Heatmap { height: 1fr; width: 1fr; }"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1, 0)", "Up", show=False),
        Binding("down", "move(1, 0)", "Down", show=False),
        Binding("left", "move(0, -1)", "Left", show=False),
        Binding("right", "move(0, 1)", "Right", show=False),
        Binding("home", "move(0, -1000000000)", "First column", show=False),
        Binding("end", "move(0, 1000000000)", "Last column", show=False),
        Binding("pageup", "move(-16, 0)", "16 rows up", show=False),
        Binding("pagedown", "move(16, 0)", "16 rows down", show=False),
    ]

    matrix: reactive[Matrix | None] = reactive(None, layout=False)
    cursor: reactive[tuple[int, int]] = reactive((0, 0))

    @dataclass
    class Pointed(Message):
        """The cursor stands on another element."""

        heatmap: Heatmap
        row: int
        column: int

        @property
        def control(self) -> Heatmap:
            """The heatmap, for `@on` selectors."""
            return self.heatmap

    def __init__(
        self, matrix: Matrix | None = None, *, id: str | None = None, classes: str | None = None
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._pixels: Pixels | None = None
        self._margin = Margin()
        self._lines: list[Strip] = []
        self._drawn_for: tuple[object, ...] = ()
        self.set_reactive(Heatmap.matrix, matrix)

    @property
    def pooled(self) -> bool:
        """Whether a pixel stands for more than one element at the present size."""
        return self._pixels is not None and self._pixels.pooled

    def watch_matrix(self) -> None:
        """Keep the cursor within the new matrix."""
        self.cursor = self.validate_cursor(self.cursor)

    def validate_cursor(self, cursor: tuple[int, int]) -> tuple[int, int]:
        """The nearest element that exists."""
        if self.matrix is None or self.matrix.values.size == 0:
            return (0, 0)
        rows, columns = self.matrix.values.shape
        return (min(max(cursor[0], 0), rows - 1), min(max(cursor[1], 0), columns - 1))

    def watch_cursor(self, old: tuple[int, int], new: tuple[int, int]) -> None:
        """Notify the parent."""
        if old != new:
            self.post_message(self.Pointed(self, *new))

    def action_move(self, rows: int, columns: int) -> None:
        """Move the cursor by elements."""
        self.cursor = (self.cursor[0] + rows, self.cursor[1] + columns)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Hovering with the button held drags the cursor; a plain hover leaves it where the keys put it."""
        if event.button:
            self._point(event.x, event.y)

    def on_click(self, event: events.Click) -> None:
        """Put the cursor under the mouse."""
        self._point(event.x, event.y)

    def _point(self, x: int, y: int) -> None:
        if self._pixels is None:
            return
        y, x = y - self._margin.top, x - self._margin.left
        if 0 <= 2 * y < len(self._pixels.rows) and 0 <= x < len(self._pixels.columns):
            self.cursor = (row_of_line(self._pixels.rows, y), int(self._pixels.columns[x]))

    def draw(self, crop: Region) -> list[Strip]:
        """The lines of `crop`, drawn anew when the matrix, the size, the theme or the cursor changed."""
        key = (self.matrix, self.size, self.app.theme, self.app.no_color)
        if key != self._drawn_for:
            self._lines = self._draw()
            self._drawn_for = key
        return finished(self, self._with_cursor()[crop.y : crop.bottom], crop)

    def _draw(self) -> list[Strip]:
        """Every line of the widget, without the cursor."""
        width, height = self.size
        matrix = self.matrix
        if matrix is None or matrix.values.size == 0 or not width or not height:
            self._pixels = None
            return [self._blank()] * height
        rows, columns = matrix.values.shape
        space = self._margin = margin(matrix.axes, (rows, columns), width, height)
        inner = width - space.left
        pixels = self._pixels = pool(
            matrix.values, inner, 2 * (height - space.top - space.bottom), masked=matrix.masked
        )
        blank = self._blank(inner - len(pixels.columns))
        drawn = self._marked(
            [Strip([*line, *blank], inner) for line in lines(pixels, matrix, paint(self.app))]
        )
        if matrix.axes is not None and space.bottom:
            drawn = self._framed(drawn, matrix.axes, pixels)
        return drawn + [self._blank()] * (height - len(drawn))

    def _framed(self, drawn: list[Strip], axes: Axes, pixels: Pixels) -> list[Strip]:
        """The labels of the columns above the map, those of the rows beside it, the scale below."""
        assert self.matrix is not None
        styles, left, width = paint(self.app), self._margin.left, self.size.width
        quiet = Style(bgcolor=styles.ground) + styles.quiet
        if left:
            beside = [Strip([Segment(label, quiet)], left) for label in row_labels(axes, pixels, left)]
            drawn = [Strip.join([label, line]) for label, line in zip(beside, drawn, strict=True)]
            above = corner(axes, left) + column_labels(axes, pixels, width - left)[0]
            drawn = [Strip([Segment(above, quiet)], width), *drawn]
        limit = self.matrix.top or strongest(pixels)
        notes = notes_of(pixels, self.matrix.values.shape)
        scale = scale_line(self.matrix.scale, limit, styles, width, unit=axes.unit, notes=notes)
        return [*drawn, Strip(scale).adjust_cell_length(width, Style(bgcolor=styles.ground))]

    def _marked(self, drawn: list[Strip]) -> list[Strip]:
        """A dot on every element that stands out; in a cell of two elements it is either of them."""
        assert self.matrix is not None
        for row, column in self.matrix.marks:
            x, y = self._cell_of(row, column)
            cell = drawn[y].crop(x, x + 1)
            style = next((segment.style for segment in cell if segment.style), None) or Style()
            ground = style.bgcolor if cell.text == " " else style.color
            dark = ground is None or sum(ground.get_truecolor()) < 384
            mark = Style(color="white" if dark else "black", bgcolor=ground, bold=True)
            drawn[y] = _over(drawn[y], x, "•", mark)
        return drawn

    def _cell_of(self, row: int, column: int) -> tuple[int, int]:
        """The cell of the map in the middle of those in which an element is drawn."""
        assert self._pixels is not None
        return middle_cell(self._pixels.columns, column), middle_cell(self._pixels.rows, row) // 2

    def _blank(self, width: int | None = None) -> Strip:
        width = self.size.width if width is None else width
        return (
            Strip([Segment(" " * width, Style(bgcolor=paint(self.app).ground))], width)
            if width
            else Strip([])
        )

    def _with_cursor(self) -> list[Strip]:
        """The lines with the cursor's cell drawn over, and its labels; only those lines are made anew."""
        if self._pixels is None or not self.has_focus:
            return self._lines
        x, y = self._cell_of(*self.cursor)
        left, top = self._margin.left, self._margin.top
        if not 0 <= y < len(self._lines) - top or not 0 <= x < self.size.width - left:
            return self._lines
        shown = [*self._lines]
        shown[top + y] = _over(shown[top + y], left + x, "◆", self._cursor_style)
        axes = self.matrix.axes if self.matrix is not None else None
        if axes is not None and left:
            style = Style(bgcolor=paint(self.app).ground) + paint(self.app).accent
            first = top + first_cell(self._pixels.rows, self.cursor[0]) // 2
            shown[first] = _over(shown[first], 0, fit(axes.row(self.cursor[0]), left - 1), style)
            above, cells = column_labels(axes, self._pixels, self.size.width - left, self.cursor[1])
            shown[0] = _over(
                shown[0], left, above, Style(bgcolor=paint(self.app).ground) + paint(self.app).quiet
            )
            label = Strip([Segment(above)]).crop(cells.start, cells.stop).text
            shown[0] = _over(shown[0], left + cells.start, label, style)
        return shown

    @property
    def _cursor_style(self) -> Style:
        return paint(self.app).present

    def watch_has_focus(self, has_focus: bool) -> None:
        """The cursor shows only in the focused heatmap."""
        super().watch_has_focus(has_focus)
        self.refresh()


def _over(line: Strip, x: int, text: str, style: Style) -> Strip:
    """The line with `text` over it from cell `x` on."""
    end = x + cell_len(text)
    return Strip.join(
        [line.crop(0, x), Strip([Segment(text, style)], end - x), line.crop(end, line.cell_length)]
    )
