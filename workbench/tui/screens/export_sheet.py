"""The sheet on which the format and the file of an export are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Input, Static

from lockstep.sessions.text import clean
from lockstep.workbench.tui.screens.dialog import Dialog
from lockstep.workbench.tui.screenshots import FORMATS
from lockstep.workbench.tui.widgets.field import Field
from lockstep.workbench.tui.widgets.grid import Grid, GridCell, GridColumn


class Formats(Grid, inherit_bindings=False):
    """The list of formats: letters choose one, so j and k do not move."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", "Up", show=False),
        Binding("down", "move(1)", "Down", show=False),
        Binding("enter", "choose", "Write", show=False),
    ]


class ExportScreen(Dialog[Path | None]):
    """As what, and under which name. The format that was taken last is offered first."""

    CSS_PATH = "../styles/export.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Leave"),
        *(Binding(ending[0], f"take('{ending}')", what) for ending, what in FORMATS),
    ]
    _last: ClassVar[str] = FORMATS[0][0]

    def __init__(self, stem: str, has_data: bool) -> None:
        super().__init__()
        self._stem, self._has_data = stem, has_data

    def compose(self) -> ComposeResult:
        """The formats, and the name."""
        with Vertical(id="export") as sheet:
            sheet.border_title = "export"
            sheet.border_subtitle = "a letter chooses   enter writes   tab the name   esc leaves"
            yield Formats(_COLUMNS, header=False, id="formats")
            yield Static(f"in {clean(str(Path.cwd()))}", id="to", markup=False)
            yield Field(id="file", compact=True)

    def on_mount(self) -> None:
        """The last format, and the name it would have."""
        grid = self.query_one(Grid)
        grid.show(len(FORMATS), self._cells)
        grid.cursor = [ending for ending, _ in FORMATS].index(ExportScreen._last)
        self._propose()
        grid.focus()

    def _cells(self, row: int) -> list[GridCell]:
        ending, what = FORMATS[row]
        able = self._has_data or ending in ("svg", "png", "html")
        return [
            (ending[0], "strong" if able else "faint"),
            (ending, "text" if able else "faint"),
            (what if able else "there is no data here", "quiet" if able else "faint"),
        ]

    def _propose(self) -> None:
        field = self.query_one(Input)
        field.value = f"{self._stem}.{FORMATS[self.query_one(Grid).cursor][0]}"
        field.cursor_position = len(field.value)

    @on(Grid.Pointed)
    def _pointed(self, event: Grid.Pointed) -> None:
        event.stop()
        self._propose()

    @on(Grid.Chosen)
    def _chosen(self, event: Grid.Chosen) -> None:
        event.stop()
        self._write()

    @on(Input.Submitted)
    def _named(self, event: Input.Submitted) -> None:
        event.stop()
        self._write()

    def action_take(self, ending: str) -> None:
        """A format's letter: the cursor on that format. Enter writes."""
        self.query_one(Grid).cursor = [known for known, _ in FORMATS].index(ending)
        self._propose()

    def _write(self) -> None:
        ExportScreen._last = FORMATS[self.query_one(Grid).cursor][0]
        name = self.query_one(Input).value.strip()
        self.dismiss(Path(name) if name else None)


_COLUMNS = (GridColumn("", 2), GridColumn("", 5), GridColumn("", 30, flex=1))
