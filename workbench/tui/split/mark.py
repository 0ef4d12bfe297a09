"""The line under two strips of tokens: an arrow at the first that differs, and what stands there."""

from __future__ import annotations

from rich.cells import cell_len
from rich.segment import Segment
from textual.reactive import reactive
from textual.strip import Strip

from lockstep.workbench.tui.widgets.fit import fit
from lockstep.workbench.tui.widgets.painted import LineWidget
from lockstep.workbench.tui.widgets.token_strip import TokenStrip


class DifferenceMark(LineWidget):
    """Follows the scroll of a strip; where the cell is out of sight the words stand at that edge."""

    DEFAULT_CSS = "DifferenceMark { height: 1; width: 1fr; }"

    cell: reactive[int | None] = reactive(None)
    words: reactive[str] = reactive("")

    def __init__(self, strip: TokenStrip, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.strip = strip

    def line(self, y: int) -> Strip:
        """The arrow and the words, to its right or, where there is no room, to its left."""
        width, quiet = self.size.width, self.paint.quiet
        if self.cell is None:
            return Strip([Segment(fit(f" {self.words}", width), quiet)], width)
        x, seen = self.strip.place_of(self.cell)
        arrow = "▲" if seen else "◀" if x <= 0 else "▶"
        x = max(0, min(x, width - 1))
        after, before = width - x - 1, x
        words = self.words
        if cell_len(words) + 1 <= after or after >= before:
            segments = [
                Segment(" " * x),
                Segment(arrow, self.paint.wrong),
                Segment(fit(f" {words}", after), self.paint.wrong),
            ]
        else:
            shown = fit(words, min(before - 1, cell_len(words)))
            space = " " * (before - 1 - cell_len(shown))
            segments = [Segment(f"{space}{shown} ", self.paint.wrong), Segment(arrow, self.paint.wrong)]
        return Strip(segments).adjust_cell_length(width)
