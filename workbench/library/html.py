"""Results in a notebook: HTML that is readable on a light and on a dark ground, whatever the page's style sheet."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence

from markupsafe import Markup

from lockstep.sessions.text import clean
from lockstep.workbench.debugger.answers import cell
from lockstep.workbench.export.svg import Picture, el, standalone

#: Between the colours of the light and the dark ground.
_COLOURS = {"match": "#2f9e5b", "diverged": "#e5533d", "inconclusive": "#c08a1e"}
#: A notebook may drop a style sheet, and one of ours would reach its other cells: each element has its style.
_CELL = "text-align: left; vertical-align: top; padding: 2px 12px 2px 0; border: 0; background: none; color: inherit"
_ROWS = "border-collapse: collapse; margin: 4px 0 10px; font-size: 13px; color: inherit"
_LINE = "border-bottom: 1px solid rgba(128, 128, 128, 0.4)"
#: Rows of a table that are shown.
MOST_ROWS = 60


def block(*parts: Markup) -> str:
    """The whole of what a result shows."""
    return str(el("div", *parts, style="color: inherit"))


def heading(text: str, verdict: str = "") -> Markup:
    """A line that sums up, in the colour of its verdict."""
    colour = _COLOURS.get(verdict, "inherit")
    return el("p", clean(text), style=f"font-weight: 600; margin: 4px 0; color: {colour}")


def paragraph(text: str) -> Markup:
    """A line of prose."""
    return el("p", clean(text), style="margin: 4px 0; color: inherit")


def lines(pairs: Iterable[tuple[str, str]]) -> Markup:
    """Labels and what stands under each."""
    rows = [
        el(
            "tr",
            el("th", label, style=f"{_CELL}; opacity: 0.7; font-weight: 400"),
            el("td", clean(words), style=_CELL),
        )
        for label, words in pairs
    ]
    return el("table", el("tbody", *rows), style=_ROWS)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> Markup:
    """Rows under headings, as many as can be read."""
    head = el("tr", *(el("th", clean(name), style=f"{_CELL}; {_LINE}") for name in columns))
    body = [el("tr", *(el("td", clean(cell(one)), style=_CELL) for one in row)) for row in rows[:MOST_ROWS]]
    if (more := len(rows) - MOST_ROWS) > 0:
        body.append(el("tr", el("td", f"and {more} more", style=_CELL, colspan=len(columns))))
    reported = [el("caption", clean(caption), style="text-align: left; opacity: 0.7")] if caption else []
    return el("table", *reported, el("thead", head), el("tbody", *body), style=_ROWS)


def svg(picture: Picture) -> str:
    """A picture as SVG with a ground of its own."""
    return standalone(picture).partition("?>\n")[2]


def image(picture: Picture) -> Markup:
    """A picture in a page. As an image it can neither run a script nor change the page's styles."""
    data = base64.b64encode(svg(picture).encode()).decode()
    return el(
        "img", src=f"data:image/svg+xml;base64,{data}", alt=clean(picture.label), style="max-width: 100%"
    )
