"""A matrix as colours: two rows of pixels to a line (▀), pooled so that outliers survive, with a cursor.

PaintedWidget on Textual's Line API. The segments of every pair of shades are kept, so a frame costs one look-up
a cell; the lines are handed to the compositor as they are, because restyling 12,000 segments a frame
would cost more than drawing them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip

from workbench.export.pooling import Pixels, pool
from workbench.tui.guard import GuardedWidget
from workbench.tui.theme import paint
from workbench.tui.widgets.painted import finished
from workbench.tui.widgets.shading import Matrix, lines


class Heatmap(GuardedWidget, can_focus=True):
    """A matrix with a cursor. Posts `Pointed` when the cursor moves to another element."""

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
        """Tell the parent."""
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
        row, column = 2 * y, x
        if row < len(self._pixels.rows) and column < len(self._pixels.columns):
            self.cursor = (int(self._pixels.rows[row]), int(self._pixels.columns[column]))

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
        if self.matrix is None or self.matrix.values.size == 0 or not width or not height:
            self._pixels = None
            return [self._blank()] * height
        pixels = self._pixels = pool(self.matrix.values, width, 2 * height, masked=self.matrix.masked)
        blank = self._blank(width - len(pixels.columns))
        drawn = [Strip([*line, *blank], width) for line in lines(pixels, self.matrix, paint(self.app))]
        return self._marked(drawn) + [self._blank()] * (height - len(drawn))

    def _marked(self, drawn: list[Strip]) -> list[Strip]:
        """A dot on every element that stands out; in a cell of two elements it is either of them."""
        assert self.matrix is not None
        for row, column in self.matrix.marks:
            x, y = self._cell_of(row, column)
            cell = drawn[y].crop(x, x + 1)
            style = next((segment.style for segment in cell if segment.style), None) or Style()
            ground = style.bgcolor if cell.text == " " else style.color
            dark = ground is None or sum(ground.get_truecolor()) < 384
            mark = Segment("•", Style(color="white" if dark else "black", bgcolor=ground, bold=True))
            drawn[y] = Strip.join(
                [drawn[y].crop(0, x), Strip([mark], 1), drawn[y].crop(x + 1, drawn[y].cell_length)]
            )
        return drawn

    def _cell_of(self, row: int, column: int) -> tuple[int, int]:
        """The first cell in which an element is drawn."""
        assert self._pixels is not None
        x = int(np.searchsorted(self._pixels.columns, column, "right")) - 1
        y = (int(np.searchsorted(self._pixels.rows, row, "right")) - 1) // 2
        # Where a matrix is drawn larger than itself its element is several cells: mark the first.
        first = int(np.searchsorted(self._pixels.columns, column, "left"))
        return (x if self._pixels.pooled else min(x, first)), y

    def _blank(self, width: int | None = None) -> Strip:
        width = self.size.width if width is None else width
        return (
            Strip([Segment(" " * width, Style(bgcolor=paint(self.app).ground))], width)
            if width
            else Strip([])
        )

    def _with_cursor(self) -> list[Strip]:
        """The lines with the cursor's cell drawn over; only one line is made anew."""
        if self._pixels is None or not self.has_focus:
            return self._lines
        x, y = self._cell_of(*self.cursor)
        if not 0 <= y < len(self._lines) or not 0 <= x < self.size.width:
            return self._lines
        line = self._lines[y]
        marked = Strip.join(
            [line.crop(0, x), Strip([Segment("◆", self._cursor_style)], 1), line.crop(x + 1, self.size.width)]
        )
        return [*self._lines[:y], marked, *self._lines[y + 1 :]]

    @property
    def _cursor_style(self) -> Style:
        return paint(self.app).present

    def watch_has_focus(self, has_focus: bool) -> None:
        """The cursor shows only in the focused heatmap."""
        super().watch_has_focus(has_focus)
        self.refresh()
