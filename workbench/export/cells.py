"""Cells of a terminal as an SVG that needs no font of its own and no network: text in runs of whole cells, blocks as
rectangles, so that a heatmap has no seams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from lockstep.sessions.text import clean
from lockstep.workbench.export.svg import el

#: A cell in units of the picture: a monospaced font of 14 is 8.4 wide.
WIDTH, HEIGHT, FONT = 8.4, 18.0, 14.0
_PADDING = 12.0
_BASE = 0.76  # of the height: where letters stand

_STYLE = (
    "text { font: 14px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace; }"
    " .b { font-weight: 700; } .u { text-decoration: underline; }"
    " rect { shape-rendering: crispEdges; }"
)
#: Blocks as (left, top, right, bottom) in shares of a cell.
_BLOCKS: dict[str, tuple[float, float, float, float]] = {
    "▀": (0, 0, 1, 0.5),
    **{chr(0x2580 + n): (0, 1 - n / 8, 1, 1) for n in range(1, 9)},
    **{chr(0x2588 + n): (0, 0, 1 - n / 8, 1) for n in range(1, 8)},
    "▐": (0.5, 0, 1, 1),
}
_SHADES = {"░": 0.25, "▒": 0.5, "▓": 0.75}
_DRAWN = {*_BLOCKS, *_SHADES, " "}


@dataclass(frozen=True, slots=True)
class CellRun:
    """Text of one style: `cells` wide, colours as `#rrggbb`."""

    text: str
    cells: int
    foreground: str
    background: str
    bold: bool = False
    underline: bool = False


def cells_svg(rows: Sequence[Sequence[CellRun]], title: str, ground: str) -> str:
    """A picture of the rows on `ground`."""
    width = max((sum(run.cells for run in row) for row in rows), default=1) * WIDTH + 2 * _PADDING
    height = len(rows) * HEIGHT + 2 * _PADDING
    parts = [part for y, row in enumerate(rows) for part in _row(row, _PADDING + y * HEIGHT, ground)]
    document = el(
        "svg",
        el("title", clean(title, limit=200)),
        el("style", Markup(_STYLE)),
        el("rect", width="100%", height="100%", fill=ground),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        role="img",
    )
    return f"{document}\n"


def _row(row: Sequence[CellRun], y: float, ground: str) -> Iterable[Markup]:
    x = _PADDING
    for run in row:
        if run.background != ground:
            yield _rect(x, y, run.cells * WIDTH, HEIGHT, run.background)
        if run.text.strip():
            drawn = set(run.text) <= _DRAWN
            yield from _blocks(run, x, y) if drawn else (_text(run, x, y),)
        x += run.cells * WIDTH


def _text(run: CellRun, x: float, y: float) -> Markup:
    """Letters, fitted into their cells whatever the font; blanks that do not collapse."""
    text = run.text.rstrip(" ")
    cells = run.cells - (len(run.text) - len(text))
    left = len(text) - len(text.lstrip(" "))
    kind = " ".join(name for name, on in (("b", run.bold), ("u", run.underline)) if on)
    return el(
        "text", clean(text[left:]).replace(" ", "\u00a0"), x=x + left * WIDTH, y=y + _BASE * HEIGHT,
        fill=run.foreground, class_=kind or None, textLength=(cells - left) * WIDTH, lengthAdjust="spacingAndGlyphs",
    )  # fmt: skip


def _blocks(run: CellRun, x: float, y: float) -> Iterable[Markup]:
    """Bars and half cells; neighbours that are alike are one rectangle."""
    for block, group in groupby(enumerate(run.text), key=lambda pair: pair[1]):
        if block == " ":
            continue
        left, top, right, bottom = _BLOCKS.get(block, (0, 0, 1, 1))
        cells = [index for index, _ in group]
        height = (bottom - top) * HEIGHT
        for start, many in ((cells[0], len(cells)),) if (left, right) == (0, 1) else ((c, 1) for c in cells):
            place = x + (start + left) * WIDTH, y + top * HEIGHT
            yield _rect(*place, (many - 1 + right - left) * WIDTH, height, run.foreground, _SHADES.get(block))


def _rect(x: float, y: float, width: float, height: float, fill: str, opacity: float | None = None) -> Markup:
    return el("rect", x=x, y=y, width=width, height=height, fill=fill, fill_opacity=opacity)
