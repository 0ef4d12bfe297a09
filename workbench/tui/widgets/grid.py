"""A table that draws only the rows in view, however many there are, on Textual's Line API."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from lockstep.workbench.tui.widgets.fit import fit, fit_ends
from lockstep.workbench.tui.widgets.painted import PaintedWidget

#: The most rows that are kept as they were drawn.
_ROWS_KEPT = 512

#: One cell: its text and a role of the paint ("text", "quiet", "wrong", "accent", "rank0" …) or a style.
GridCell = tuple[str, str | Style]


@dataclass(frozen=True, slots=True)
class GridColumn:
    """A column: `width` cells (the least, where it is flexible); `drop` > 0 leaves where it is narrow, the
    highest first."""

    title: str
    width: int
    right: bool = False
    flex: int = 0
    drop: int = 0
    role: str = "quiet"
    tail: bool = False  # where it does not fit, its end is shown: the newest of a row of bars, or of tokens
    mark: str = ""  # what stands for the part of it that is cut
    ends: bool = False  # where it does not fit, its middle is cut
    spill: bool = False  # where it does not fit, it runs on over the empty cells after it


@dataclass
class RowMessage(Message):
    """Something was done with a row of a grid."""

    grid: Grid
    row: int

    @property
    def control(self) -> Grid:
        """The grid, for `@on` selectors."""
        return self.grid


class Grid(ScrollView, PaintedWidget, can_focus=True):
    """Rows by number: `show(count, row)` with `row(i)` the cells of row i. Posts `Pointed` and `Chosen`."""

    DEFAULT_CSS = """
    Grid { height: 1fr; width: 1fr; scrollbar-size-vertical: 1; overflow-x: hidden; scrollbar-gutter: stable; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home", "move(-1000000000)", "First", show=False),
        Binding("end", "move(1000000000)", "Last", show=False),
        Binding("enter", "choose", "Open", show=False),
    ]

    cursor: reactive[int] = reactive(0, repaint=False)  # two rows are drawn anew, not all

    class Pointed(RowMessage):
        """The cursor stands on another row, put there by the user."""

    class Chosen(RowMessage):
        """Enter or a second click on a row."""

    class Marked(RowMessage):
        """A click into the column of marks of a row."""

    def __init__(
        self,
        columns: Sequence[GridColumn],
        *,
        header: bool = True,
        marks: int | None = None,
        id: str | None = None,
        classes: str | None = None,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self.columns = tuple(columns)
        self.header = int(header)
        self.count = 0
        self.marks = marks  # the column in which a click puts a mark and takes it away
        self._row: Callable[[int], Sequence[GridCell]] = lambda index: ()
        self._headings: Sequence[int | None] = ()
        self._passed: Container[int] = ()
        #: Rows as they were drawn last, by their number, each with all that it was drawn from.
        self._drawn_rows: dict[int, tuple[tuple[object, ...], Strip]] = {}
        self._room, self._widths = 0, [0]

    def show(
        self,
        count: int,
        row: Callable[[int], Sequence[GridCell]],
        *,
        columns: Sequence[GridColumn] | None = None,
        headings: Sequence[int | None] = (),
        passed: Container[int] = (),
    ) -> None:
        """Show `count` rows; the cursor and the scroll stay where they are, as far as there are rows. `headings[i]` is
        the row that heads row i: it stays on top while what it heads scrolls under it. The cursor passes over the rows
        `passed`, after each of which there is one that it stands on."""
        if columns is not None:
            self.columns = tuple(columns)
        self._row, self._headings, self._passed = row, headings, passed
        if count != self.count:
            self.count = count
            self.virtual_size = Size(1, count + self.header)
        self.cursor = self.validate_cursor(self.cursor)
        self.refresh()

    @property
    def unseen(self) -> int:
        """How many rows are out of sight, above and below."""
        room, below = self.size.height - self.header, self.count - round(self.scroll_offset.y)
        return self.count - max(0, min(room, below))

    def validate_cursor(self, cursor: int) -> int:
        """A row that exists."""
        return min(max(0, cursor), max(0, self.count - 1))

    def watch_cursor(self, old: int, new: int) -> None:
        """Keep the cursor in view."""
        self.refresh_row(old)
        self.refresh_row(new)
        self._reveal()

    def watch_has_focus(self, has_focus: bool) -> None:
        """The cursor is quiet where the keys go elsewhere."""
        super().watch_has_focus(has_focus)
        self.refresh_row(self.cursor)

    def _reveal(self) -> None:
        top, room = round(self.scroll_offset.y), self.size.height - self.header
        if room <= 0:
            return
        if self.cursor < top or (self.cursor == top and self._pinned(top) is not None):
            under = (
                0 if self._pinned(self.cursor) is None else 1
            )  # its heading is drawn over the line above it
            self.scroll_to(y=self.cursor - under, animate=False, force=True)
        elif self.cursor >= top + room:
            self.scroll_to(y=self.cursor - room + 1, animate=False, force=True)

    def _pinned(self, top: int) -> int | None:
        """The heading that is drawn in place of the row on top, None where that is none's or is itself one."""
        heading = self._headings[top] if top < len(self._headings) else None
        return None if heading == top else heading

    def _row_at(self, y: int) -> int:
        """The row that is drawn on a line."""
        top = round(self.scroll_offset.y)
        pinned = self._pinned(top) if y == self.header else None
        return y - self.header + top if pinned is None else pinned

    def on_resize(self) -> None:
        """A smaller window must not hide the cursor."""
        self._reveal()

    def point(self, row: int) -> None:
        """Put the cursor on a row as the user would."""
        row = self.validate_cursor(row)
        if row in self._passed:
            row += 1 if row > self.cursor or row == 0 else -1
        if row != self.cursor and self.count:
            self.cursor = row
            self.post_message(self.Pointed(self, row))

    def action_move(self, rows: int) -> None:
        """Move the cursor."""
        self.point(self.cursor + rows)

    def action_page(self, pages: int) -> None:
        """Move the cursor by a screenful."""
        self.point(self.cursor + pages * max(1, self.size.height - self.header - 1))

    def action_choose(self) -> None:
        """Open the row."""
        if self.count:
            self.post_message(self.Chosen(self, self.cursor))

    def on_click(self, event: events.Click) -> None:
        """A click puts the cursor on a row; a second one opens it. In the column of marks it asks for a mark."""
        row = self._row_at(event.y)
        if event.y < self.header or row >= self.count:
            return
        if self.marks is not None and self._column_at(event.x) == self.marks:
            self.post_message(self.Marked(self, row))
            return
        if row == self.cursor and event.chain > 1:
            self.action_choose()
        self.point(row)

    def _column_at(self, x: int) -> int:
        """The column under a cell, the blank after it included."""
        ends = accumulate(width + 1 if width else 0 for width in self._widths)
        return next((i for i, end in enumerate(ends) if x < end), len(self._widths))

    def refresh_row(self, row: int) -> None:
        """Draw one row anew."""
        y = row - round(self.scroll_offset.y) + self.header
        if self.header <= y < self.size.height:
            self.refresh(Region(0, y, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        """The header, or a row; cells are cut and padded to their columns."""
        if y < self.header:
            return self._strip([(column.title, column.role) for column in self.columns], self.ground)
        index = self._row_at(y)
        if index >= self.count:
            return Strip.blank(self._room, self.ground)
        ground = self.ground
        if index == self.cursor:
            ground = self.paint.cursor if self.has_focus else self.paint.raised
        cells = self._row(index)
        drawn_from = (self.paint, ground, self._room, *self._widths, *cells)
        known = self._drawn_rows.get(index)
        if known is None or known[0] != drawn_from:
            if len(self._drawn_rows) > _ROWS_KEPT:
                self._drawn_rows.clear()
            known = self._drawn_rows[index] = drawn_from, self._strip(cells, ground)
        return known[1]

    def _strip(self, cells: Sequence[GridCell], ground: Style) -> Strip:
        segments: list[Segment] = []
        for (text, role), column, room in zip(cells, self.columns, self._rooms(cells), strict=False):
            if room:
                if column.tail and len(text) > room:
                    text = column.mark + text[len(column.mark) - room :]
                elif column.ends:
                    text = fit_ends(text, room)
                segments.append(
                    Segment(fit(text, room, right=column.right) + " ", self.on_ground(role, ground))
                )
        return Strip(segments).adjust_cell_length(self._room, ground)

    def _rooms(self, cells: Sequence[GridCell]) -> list[int]:
        """What each cell of a row gets: its column's width, and that of the empty ones that it runs on over."""
        rooms = [*self._widths]
        for place, column in enumerate(self.columns[: len(cells)]):
            after = place + 1
            while column.spill and after < len(cells) and not cells[after][0]:
                rooms[place] += rooms[after] + (rooms[after] > 0)
                rooms[after] = 0
                after += 1
        return rooms

    def is_cut(self, row: int, column: int) -> bool:
        """Whether a cell has more text than room."""
        cells = self._row(row)
        return cell_len(cells[column][0]) > self._rooms(cells)[column]

    def look_up(self) -> None:
        """What each column gets: some leave where it is narrow, the flexible share what is left over."""
        super().look_up()
        room = self._room = self.scrollable_content_region.width
        kept = list(range(len(self.columns)))
        while sum(self.columns[i].width + 1 for i in kept) > room:
            droppable = [i for i in kept if self.columns[i].drop]
            if not droppable:
                break
            kept.remove(max(droppable, key=lambda i: self.columns[i].drop))
        spare = max(0, room - sum(self.columns[i].width + 1 for i in kept))
        shares = sum(self.columns[i].flex for i in kept) or 1
        self._widths = [
            column.width + spare * column.flex // shares if i in kept else 0
            for i, column in enumerate(self.columns)
        ]
