"""A table as a file: CSV, JSON, a page; and as text for the clipboard. One set of writers for pane and command line."""

from __future__ import annotations

import html
import io
from dataclasses import dataclass, field

from lockstep.sessions.text import clean
from lockstep.workbench.export import csv, json
from lockstep.workbench.export.palette import css_variables


@dataclass(frozen=True, slots=True)
class Table:
    """Named columns and rows of plain values."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    notes: tuple[str, ...] = field(default=())


def as_text(table: Table) -> str:
    """Tab-separated, a heading first: what a spreadsheet and a person both take."""
    lines = ["\t".join(table.columns)]
    lines += ["\t".join("" if value is None else _plain(value) for value in row) for row in table.rows]
    return "\n".join(lines)


def as_csv(table: Table) -> str:
    """As all of Lockstep's CSV."""
    out = io.StringIO()
    csv.write(out, table.columns, table.rows)
    return out.getvalue()


def as_json(table: Table) -> str:
    """{"title", "columns", "rows", "notes"}."""
    reported = {"title": table.title, "columns": table.columns, "rows": table.rows, "notes": table.notes}
    return json.dumps(reported, indent=1) + "\n"


def as_html(table: Table | None, title: str, picture: str = "") -> str:
    """One page that needs no network: the picture (an SVG of ours), and the data under it."""
    parts = [f"<figure>{picture}</figure>" if picture else f"<h1>{_escaped(title)}</h1>"]
    if table is not None:
        head = "".join(f'<th scope="col">{_escaped(column)}</th>' for column in table.columns)
        body = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in table.rows)
        caption = f"<caption>{_escaped(table.title)}</caption>"
        parts.append(
            f'<div class="data"><table>{caption}<thead><tr>{head}</tr></thead>\n'
            f"<tbody>\n{body}\n</tbody></table></div>"
        )
        parts += [f"<p>{_escaped(note)}</p>" for note in table.notes]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_escaped(title)}</title>\n'
        f"<style>{css_variables()}{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


_STYLE = """
body { background: var(--ground); color: var(--text); font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.2rem; font-weight: 600; }
figure { margin: 0 0 2rem; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; border-radius: 4px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--quiet); padding-bottom: .4rem; }
th, td { padding: 1px 1.2rem 1px 0; text-align: left; white-space: pre-wrap; vertical-align: top; }
th { color: var(--quiet); font-weight: 500; border-bottom: 1px solid var(--faint); }
td.n { text-align: right; white-space: nowrap; }
.data { overflow-x: auto; }
"""


def _cell(value: object) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    text = "" if value is None else csv.cell(value) if number else _plain(value)
    return f'<td class="n">{_escaped(text)}</td>' if number else f"<td>{_escaped(text)}</td>"


def _plain(value: object) -> str:
    return clean(str(value))


def _escaped(text: str) -> str:
    return html.escape(clean(text))
