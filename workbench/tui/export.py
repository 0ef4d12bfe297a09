"""A pane as a file: CSV, JSON, HTML of its data; SVG of the screen. Also plain text for the clipboard."""

from __future__ import annotations

import html
import io
from collections.abc import Callable
from pathlib import Path

from workbench.export import csv, json
from workbench.tui.panes.base import Table


class ExportError(ValueError):
    """A file that cannot be written, or a format that there is not."""


def as_text(table: Table) -> str:
    """Tab-separated, a heading first: what a spreadsheet and a person both take."""
    lines = ["\t".join(table.columns)]
    lines += ["\t".join("" if value is None else str(value) for value in row) for row in table.rows]
    return "\n".join(lines)


def as_csv(table: Table) -> str:
    """As all of Lockstep's CSV."""
    out = io.StringIO()
    csv.write(out, table.columns, table.rows)
    return out.getvalue()


def as_json(table: Table) -> str:
    """{"title", "columns", "rows"}."""
    return json.dumps({"title": table.title, "columns": table.columns, "rows": table.rows}, indent=1)


def as_html(table: Table) -> str:
    """One page with one table and nothing else."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape('' if v is None else str(v))}</td>" for v in row) + "</tr>\n"
        for row in table.rows
    )
    style = "body{font:14px system-ui}td,th{padding:2px 12px 2px 0;text-align:left;font-variant-numeric:tabular-nums}"
    title = html.escape(table.title)
    return (
        f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
        f"<h1>{title}</h1><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>\n"
    )


def _data_cell(value: object) -> str:
    return f"<td>{html.escape('' if value is None else str(value))}</td>"


FORMATS: dict[str, Callable[[Table], str]] = {
    ".csv": as_csv,
    ".json": as_json,
    ".html": as_html,
    ".txt": as_text,
}


def write(table: Table | None, file: Path, screenshot: Callable[[], str]) -> None:
    """Write the pane to `file`, in the format that its ending names; `.svg` is a picture of the screen."""
    ending = file.suffix.lower()
    if ending == ".svg":
        text = screenshot()
    elif ending in FORMATS:
        if table is None:
            raise ExportError("there is nothing in this pane to export")
        text = FORMATS[ending](table)
    else:
        raise ExportError(f"{file.name}: the ending must be one of .svg {' '.join(FORMATS)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ExportError(f"cannot write {file}: {error.strerror}") from error
