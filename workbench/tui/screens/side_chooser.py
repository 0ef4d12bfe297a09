"""Which other branch, or the golden reference, to put beside the present branch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical

from lockstep.workbench.tui.screens.dialog import Dialog
from lockstep.workbench.tui.widgets.grid import Grid, GridCell, GridColumn
from lockstep.workbench.views.sides import Other, OtherSide


class SideChooser(Dialog[Other | None]):
    """A row a side; enter chooses, escape leaves."""

    CSS_PATH = "../styles/split.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "Back")]

    def __init__(self, title: str, sides: Sequence[OtherSide]) -> None:
        super().__init__()
        self._title, self._sides = title, sides

    def compose(self) -> ComposeResult:
        """The list."""
        columns = (GridColumn("beside", 20, flex=1), GridColumn("", 30, flex=2))
        with Vertical(id="sheet") as sheet:
            sheet.border_title = self._title
            sheet.border_subtitle = "enter chooses   esc closes"
            yield Grid(columns, id="sides")

    def on_mount(self) -> None:
        """Fill it."""
        grid = self.query_one(Grid)
        grid.show(len(self._sides), self._cells)
        grid.focus()

    def _cells(self, index: int) -> list[GridCell]:
        side = self._sides[index]
        return [(side.name, "text"), (side.summary, "quiet")]

    @on(Grid.Chosen)
    def _chosen(self, event: Grid.Chosen) -> None:
        event.stop()
        self.dismiss(self._sides[event.row].other)
