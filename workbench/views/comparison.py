"""Two branches token for token: cells of the same step are equally wide, the first difference is known."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.cells import cell_len

from workbench.tui.widgets.token_strip import Cell, Tokens
from workbench.views.token_line import TokenLine


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both lines, laid out alike; `first` is the first step whose tokens differ, None: none so far."""

    ours: TokenLine
    theirs: TokenLine
    first: int | None


def compare(ours: TokenLine, theirs: TokenLine) -> Comparison:
    """Lay two lines of the same prompt out under each other; every differing token of ours is marked."""
    left, right = list(ours.tokens.cells), list(theirs.tokens.cells)
    first: int | None = None
    for i in range(min(len(left), len(right))):
        a, b = left[i], right[i]
        differs = i >= ours.prompt and a.label != b.label
        if differs and first is None:
            first = i - ours.prompt
        width = max(cell_len(a.label), cell_len(b.label))
        left[i], right[i] = _padded(a, width, differs and i - ours.prompt == first), _padded(b, width, False)
    return Comparison(replace(ours, tokens=Tokens.of(left)), replace(theirs, tokens=Tokens.of(right)), first)


def _padded(cell: Cell, width: int, differs: bool) -> Cell:
    return replace(cell, label=cell.label + " " * (width - cell_len(cell.label)), differs=differs)
