"""Copy and export: what a screen shows, to the clipboard or as a file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textual.screen import Screen

from lockstep.workbench.export.table import Table, as_text
from lockstep.workbench.tui import screenshots
from lockstep.workbench.tui.screens.export_sheet import ExportScreen
from lockstep.workbench.tui.screenshots import Screenshot


@dataclass(frozen=True, slots=True)
class Exporter:
    """Exports from one screen. `picture` gives what is shown and a file's name for it without the ending, `table` its
    data; both None while there is nothing. `report(text, wrong)` shows what was done."""

    screen: Screen[Any]
    picture: Callable[[], tuple[Screenshot, str] | None]
    table: Callable[[], Table | None]
    report: Callable[[str, bool], None]

    def copy(self) -> None:
        """The data to the clipboard, tab-separated."""
        table = self.table()
        if table is None:
            self.report("there is nothing here to copy", False)
            return
        self.screen.app.copy_to_clipboard(as_text(table))
        self.report(f"copied {len(table.rows)} rows of {table.title}", False)

    def ask(self) -> None:
        """Ask as what and where to, then write it."""
        found = self.picture()
        if found is None:
            self.report("there is nothing here to export", False)
            return
        what, stem = found

        def chosen(file: Path | None) -> None:
            if file is not None:
                self._write(what, file)

        self.screen.app.push_screen(ExportScreen(stem, what.table is not None), chosen)

    def write(self, name: str) -> None:
        """To a file whose ending names the format; without a name, ask."""
        found = self.picture()
        if not name or found is None:
            self.ask()
        else:
            self._write(found[0], Path(name))

    def _write(self, what: Screenshot, file: Path) -> None:
        self.screen.run_worker(self._written(what, file), group="export")

    async def _written(self, what: Screenshot, file: Path) -> None:
        """Off the event loop."""
        try:
            written = await asyncio.to_thread(screenshots.write, what, file.expanduser())
        except screenshots.ExportError as error:
            self.report(str(error), True)
        else:
            self.report(f"wrote {written}", False)
