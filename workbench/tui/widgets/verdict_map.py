"""Layers across, operations down: a cell for every judged tap, with a cursor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip

from lockstep.workbench.tui.widgets.fit import fit
from lockstep.workbench.tui.widgets.painted import LineWidget
from lockstep.workbench.views.verdicts import State

#: Cells of the names, and how many there may be where there is room.
_LABEL, _LONGEST = 17, 24
#: What stands for a verdict, and its role.
MARKS: dict[State, tuple[str, str]] = {
    "pass": ("▪", "trace"),
    "suspect": ("▫", "strong"),
    "fail": ("█", "wrong"),
    "inherited": ("▒", "wrong"),
    "absent": ("·", "faint"),
}


@dataclass(frozen=True, slots=True)
class VerdictRow:
    """One operation: its name and (tap, state) of each column; a tap outside the layers is in column 0 alone."""

    name: str
    cells: tuple[tuple[int, State] | None, ...]


class VerdictMap(LineWidget, can_focus=True):
    """The map. Posts `Pointed` when the cursor moves, `Chosen` on enter."""

    DEFAULT_CSS = "VerdictMap { height: 1fr; width: 1fr; }"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1, 0)", "Up", show=False),
        Binding("down,j", "move(1, 0)", "Down", show=False),
        Binding("left", "move(0, -1)", "Previous layer", show=False),
        Binding("right", "move(0, 1)", "Next layer", show=False),
        Binding("enter", "choose", "Open", show=False),
    ]

    rows: reactive[tuple[VerdictRow, ...]] = reactive((), layout=True)
    cursor: reactive[tuple[int, int]] = reactive((0, 0))
    top: reactive[int] = reactive(0)

    @dataclass
    class Pointed(Message):
        """The cursor stands on a tap."""

        tap: int

    @dataclass
    class Chosen(Message):
        """Enter on a tap."""

        tap: int

    @property
    def tap(self) -> int | None:
        """The tap under the cursor."""
        row, column = self.cursor
        if row >= len(self.rows) or column >= len(self.rows[row].cells):
            return None
        cell = self.rows[row].cells[column]
        return cell[0] if cell else None

    def point_at(self, tap: int) -> None:
        """Put the cursor on a tap, silently."""
        for row, line in enumerate(self.rows):
            for column, cell in enumerate(line.cells):
                if cell is not None and cell[0] == tap:
                    self.cursor = (row, column)
                    return

    def watch_cursor(self) -> None:
        """Keep the cursor's row in view where the map is higher than its place."""
        room = self.size.height - 1
        if room > 0:
            self.top = min(max(self.top, self.cursor[0] - room + 1), self.cursor[0])

    def action_move(self, rows: int, columns: int) -> None:
        """To the next cell that is there."""
        row, column = self.cursor
        for _ in range(max(len(self.rows), 1)):
            row, column = row + rows, column + columns
            if not 0 <= row < len(self.rows) or not 0 <= column < len(self.rows[row].cells or ()):
                if not columns and 0 <= row < len(self.rows):
                    column = len(self.rows[row].cells) - 1
                else:
                    return
            if self.rows[row].cells[column] is not None:
                self._go(row, column)
                return

    def _go(self, row: int, column: int) -> None:
        self.cursor = (row, column)
        if self.tap is not None:
            self.post_message(self.Pointed(self.tap))

    def action_choose(self) -> None:
        """Open the tap."""
        if self.tap is not None:
            self.post_message(self.Chosen(self.tap))

    def on_click(self, event: events.Click) -> None:
        """Put the cursor under the mouse."""
        row, column = event.y - 1 + self.top, (event.x - self._label - 1) // self._pitch
        if 0 <= row < len(self.rows) and 0 <= column < len(self.rows[row].cells):
            self._go(row, column)

    @property
    def _label(self) -> int:
        """Cells of the names: of the longest, where the columns keep theirs."""
        columns = max((len(row.cells) for row in self.rows), default=1)
        longest = min(max((len(row.name) for row in self.rows), default=0), _LONGEST)
        return max(_LABEL, longest) if columns * 3 + longest < self.size.width else _LABEL

    @property
    def _pitch(self) -> int:
        """Cells that a layer takes."""
        columns = max((len(row.cells) for row in self.rows), default=1)
        return (
            3
            if columns * 3 + _LABEL < self.size.width
            else 2
            if columns * 2 + _LABEL < self.size.width
            else 1
        )

    def line(self, y: int) -> Strip:
        """Layer numbers, or one operation."""
        styles, pitch, width = self.paint, self._pitch, self.size.width
        segments = [Segment(" " * (self._label + 1))]
        if y == 0:
            columns = max((len(row.cells) for row in self.rows), default=0)
            every = 1 if pitch == 3 else 2 if pitch == 2 and columns <= 10 else 5
            numbers = (
                str(c).ljust(pitch)[:pitch] if c % every == 0 and pitch > 1 else " " * pitch
                for c in range(columns)
            )
            segments += [Segment(number, styles.quiet) for number in numbers]
            return Strip(segments).adjust_cell_length(width)
        row = y - 1 + self.top
        if row >= len(self.rows):
            return Strip.blank(width)
        here = row == self.cursor[0]
        segments = [
            Segment(
                fit(self.rows[row].name, self._label, right=True) + " ",
                styles.strong if here else styles.quiet,
            )
        ]
        for column, cell in enumerate(self.rows[row].cells):
            mark, role = MARKS[cell[1]] if cell else (" ", "faint")
            if (row, column) == self.cursor and self.has_focus:
                segments.append(Segment("◆", styles.present))  # as on every map: a full cell would hide it
            else:
                segments.append(Segment(mark, styles.style(role)))
            segments.append(Segment(" " * (pitch - 1)))
        return Strip(segments).adjust_cell_length(width)
