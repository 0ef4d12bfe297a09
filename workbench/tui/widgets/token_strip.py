"""The tokens of the present branch, a cell each, always on screen; the cursor is the present step."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip

from workbench.tui.theme import Paint, mix
from workbench.tui.widgets.fit import fit
from workbench.tui.widgets.painted import LineWidget
from workbench.views.token_line import TokenCell, TokenRow

_DIVIDER = "│"
_FORK = "┬"
_TITLE = 18


class TokenStrip(LineWidget):
    """Scrolls by itself so that the cell `at` stays in view. Posts `Picked` on a click."""

    DEFAULT_CSS = "TokenStrip { height: 1; width: 1fr; }"

    tokens: reactive[TokenRow] = reactive(TokenRow())
    at: reactive[int | None] = reactive(None)
    colour: reactive[str] = reactive("probability")  # or "entropy", "divergence"
    title: reactive[str] = reactive("")  # whose tokens, where two branches are shown under each other

    @dataclass
    class Picked(Message):
        """A token was clicked: go to its step (0 for a token of the prompt)."""

        step: int

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._left = 0
        #: The strip above, whose scroll this one follows so that the same step stands under the same step.
        self.leader: TokenStrip | None = None

    def on_click(self, event: events.Click) -> None:
        """Go to the token's step."""
        index = bisect_right(self.tokens.starts, event.x - self._title_width + self._left) - 1
        if 0 <= index < len(self.tokens.cells):
            self.post_message(self.Picked(self.tokens.cells[index].step or 0))

    @property
    def _title_width(self) -> int:
        return _TITLE if self.title else 0

    def line(self, y: int) -> Strip:
        """The title, then the cells that are in view."""
        styles = self.paint
        cells = self._cells(y, self.size.width - self._title_width, styles)
        if not self.title:
            return cells
        title = Segment(fit(f" {self.title}", _TITLE - 1) + " ", styles.quiet)
        return Strip.join([Strip([title], _TITLE), cells])

    def _cells(self, y: int, width: int, styles: Paint) -> Strip:
        """The cost does not grow with the number of tokens."""
        if y or not self.tokens.cells:
            hint = "no tokens yet" if not y else ""
            return Strip([Segment(hint, styles.quiet)]).adjust_cell_length(width)
        self._scroll_to_cursor(width)
        first = max(0, bisect_right(self.tokens.starts, self._left) - 1)
        segments: list[Segment] = []
        for index in range(first, len(self.tokens.cells)):
            if self.tokens.starts[index] >= self._left + width:
                break
            segments += self._cell(index, styles)
        offset = self._left - self.tokens.starts[first]
        strip = Strip(segments).crop(offset, offset + width).adjust_cell_length(width)
        return _with_edges(strip, self._left > 0, self.tokens.starts[-1] > self._left + width + 1, styles)

    def _cell(self, index: int, styles: Paint) -> tuple[Segment, Segment]:
        cell = self.tokens.cells[index]
        divider = Segment(_FORK if cell.fork else _DIVIDER, styles.accent if cell.fork else styles.faint)
        return Segment(cell.label, self._style(cell, index == self.at, styles)), divider

    def _style(self, cell: TokenCell, present: bool, styles: Paint) -> Style:
        if cell.differs:
            return styles.wrong + Style(underline=True, reverse=present)
        if present:
            return styles.present
        if cell.step is None:
            return styles.quiet
        shade = cell.shade(self.colour)
        if shade is not None and math.isnan(shade):
            return styles.wrong
        return styles.text if shade is None else styles.text + Style(bgcolor=tint(shade, self.colour, styles))

    def _scroll_to_cursor(self, width: int) -> None:
        """Keep the present cell in view, moving no more than a third of the width at a time is left over."""
        starts = self.tokens.starts
        if self.leader is not None:
            self.leader._scroll_to_cursor(width)
            self._left = self.leader._left
            return
        if self.at is not None and self.at < len(self.tokens.cells):
            begin, end = starts[self.at], starts[self.at + 1]
            margin = max(0, min(12, width // 4))
            if end + margin > self._left + width:
                self._left = end + margin - width
            if begin - margin < self._left:
                self._left = begin - margin
        self._left = max(0, min(self._left, starts[-1] - width))


def _with_edges(strip: Strip, more_left: bool, more_right: bool, styles: Paint) -> Strip:
    """Mark that tokens go on beyond an edge."""
    width = strip.cell_length
    parts = [
        Strip([Segment("…", styles.faint)], 1) if more_left else strip.crop(0, 1),
        strip.crop(1, width - 1),
        Strip([Segment("…", styles.faint)], 1) if more_right else strip.crop(width - 1, width),
    ]
    return Strip.join(parts)


def tint(shade: float, colour: str, styles: Paint) -> Color:
    """The ground of a token: none where the model was certain (or agreed), clearer the less it was."""
    strength = round(max(0.0, min(1.0, shade)) * 12) / 12 * 0.42
    hue = (styles.wrong if colour == "divergence" else styles.ranks[3]).color
    return mix(styles.ground, hue.name if hue is not None else styles.ground, strength)
