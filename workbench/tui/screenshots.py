"""What is on screen as a file: a picture of its cells, or its data."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.color import Color
from rich.style import Style
from textual.geometry import Region
from textual.screen import Screen

from lockstep.workbench.export.cells import CellRun, cells_svg
from lockstep.workbench.export.table import Table, as_csv, as_html, as_json, as_text
from lockstep.workbench.tui.theme import Paint, paint
from lockstep.workbench.tui.widgets.grid import Grid

#: What a pane can be written as, the default first: ending, and what it is.
FORMATS = (
    ("svg", "a picture that stays sharp"),
    ("png", "a picture for where SVG is not taken"),
    ("html", "a page: the picture and the data"),
    ("json", "the data, for programs"),
    ("csv", "the data, for a spreadsheet"),
    ("txt", "the data, tab-separated"),
)


class ExportError(ValueError):
    """A file that cannot be written, or a format that there is not."""


@dataclass(frozen=True, slots=True)
class Screenshot:
    """What is to be exported: its title, its data (None: it has none), and the cells it was drawn with."""

    title: str
    table: Table | None
    cells: tuple[tuple[CellRun, ...], ...]
    ground: str

    def picture(self) -> str:
        """The cells as an SVG, the title above them where there is one."""
        return cells_svg(self.cells, self.title, self.ground)


def taken(screen: Screen[Any], region: Region, title: str, table: Table | None = None) -> Screenshot:
    """A region of a screen as it is drawn now."""
    styles = paint(screen.app)
    rows = [_runs(((f" {title}", styles.strong),), styles), ()] if title else []
    for strip in screen._compositor.render_strips()[region.y : region.bottom]:
        cut = strip.crop(region.x, region.right)
        rows.append(_runs(((segment.text, segment.style or Style()) for segment in cut), styles))
    while rows and all(not run.text.strip() and run.background == styles.ground for run in rows[-1]):
        rows.pop()
    grids = [one for one in screen.query(Grid) if one.region and region.contains_region(one.region)]
    if table is not None and (left := sum(grid.unseen for grid in grids)):
        note = f" … {left} more rows are not in this picture: html, json and csv have all"
        rows += [(), _runs(((note, styles.quiet),), styles)]
    return Screenshot(title, table, tuple(rows), styles.ground)


def _runs(segments: Iterable[tuple[str, Style]], styles: Paint) -> tuple[CellRun, ...]:
    return tuple(_run(content, style, styles) for content, style in segments)


def _run(content: str, style: Style, styles: Paint) -> CellRun:
    fore = _hex(style.color, _hex(styles.text.color, "#808080"))
    back = _hex(style.bgcolor, styles.ground)
    if style.reverse:
        fore, back = back, fore
    return CellRun(content, cell_len(content), fore, back, bool(style.bold), bool(style.underline))


def _hex(colour: Color | None, otherwise: str) -> str:
    return otherwise if colour is None or colour.is_default else colour.get_truecolor().hex


def write(shown: Screenshot, file: Path) -> Path:
    """Write what is shown to `file`, in the format that its ending names; returns where it lies.

    A file that is there already is never replaced: the next free name is taken. No directory is made.
    """
    content = _content(shown, file.suffix.lower().lstrip("."))
    file = _free(file.absolute())
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with fresh.open("xb") as out:  # not through a link that somebody has put there
            out.write(content)
        fresh.rename(file)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise ExportError(f"cannot write {file}: {error.strerror}") from error
    return file


def _content(shown: Screenshot, ending: str) -> bytes:
    if ending not in dict(FORMATS):
        known = " ".join(f".{name}" for name, _ in FORMATS)
        raise ExportError(f".{ending}: the name must end in one of {known}")
    if ending == "svg":
        return shown.picture().encode()
    if ending == "png":
        # Not at the top: few sessions need it, and it is a library of its own.
        from lockstep.workbench.export.png import rasterised

        try:
            return rasterised(shown.picture())
        except ValueError as error:
            raise ExportError(str(error)) from error
    if ending == "html":
        return as_html(shown.table, shown.title, shown.picture()).encode()
    if shown.table is None:
        raise ExportError("there is no data in this pane to export: svg and png take its picture")
    writer = {"json": as_json, "csv": as_csv, "txt": as_text}[ending]
    return writer(shown.table).encode()


def _free(file: Path) -> Path:
    """The file's name, or the first with a number that is not taken."""
    names = (file, *(file.with_name(f"{file.stem}-{n}{file.suffix}") for n in range(2, 1000)))
    return next((name for name in names if not name.exists()), file)
