"""Text in an exact number of terminal cells."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size


def fit(text: str, width: int, *, right: bool = False) -> str:
    """`text` in exactly `width` cells: cut with an ellipsis or padded. Counts wide characters as two."""
    if width <= 0:
        return ""
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, width - 1) + "…"
    padding = " " * (width - length)
    return padding + text if right else text + padding


def fit_ends(text: str, width: int) -> str:
    """The same of a name whose beginning and end distinguish it from others: what is cut is its middle."""
    if cell_len(text) <= width or width < 5:
        return fit(text, width)
    tail = text[-(width // 2) :]
    return set_cell_size(text, width - 1 - cell_len(tail)) + "…" + tail
