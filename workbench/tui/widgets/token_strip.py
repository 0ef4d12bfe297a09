"""The tokens of the present branch, a cell each, a line a sequence, always on screen; the cursor: the present step."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip

from lockstep.workbench.tui.theme import Paint, mix
from lockstep.workbench.tui.widgets.fit import fit
from lockstep.workbench.tui.widgets.painted import LineWidget
from lockstep.workbench.views.token_line import TokenCell, TokenRow

_DIVIDER = "│"
_FORK = "┬"
#: The least room of a title with a branch's name, and the most of any.
_TITLE = 18


@dataclass(frozen=True, slots=True)
class StripLine:
    """One line: the tokens, and the cell of the present step. `title`: whose they are, where there are several lines;
    `seq`: the sequence that a click chooses; `led`: it scrolls with the line above, so that the same step stands under
    the same step."""

    tokens: TokenRow = field(default_factory=TokenRow)
    at: int | None = None
    title: str = ""
    seq: int | None = None
    chosen: bool = True
    led: bool = False


#: What is there before anything is known, of which not even that there are no tokens is reported.
_UNKNOWN = StripLine()


class TokenStrip(LineWidget):
    """Each line scrolls by itself so that its cell `at` stays in view. Posts `Picked` on a click."""

    DEFAULT_CSS = "TokenStrip { height: 1; width: 1fr; }"

    lines: reactive[tuple[StripLine, ...]] = reactive((_UNKNOWN,))
    colour: reactive[str] = reactive("probability")  # or "entropy", "divergence"

    @dataclass
    class Picked(Message):
        """A line was clicked: choose its sequence (None: it stays), and go to the step of the token that was clicked (0
        for a token of the prompt, None beside the tokens)."""

        seq: int | None
        step: int | None

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._left: dict[int | None, int] = {}  # by sequence: cells to the left of the window

    def watch_lines(self) -> None:
        """The strip is as high as it has lines."""
        if self.styles.height is None or self.styles.height.value != len(self.lines):
            self.styles.height = len(self.lines)

    def on_click(self, event: events.Click) -> None:
        """Choose the line's sequence, and go to the token's step."""
        if event.y >= len(self.lines):
            return
        line, x = self.lines[event.y], event.x - self._title_width
        index = bisect_right(line.tokens.starts, x + self._left.get(line.seq, 0)) - 1
        there = x >= 0 and 0 <= index < len(line.tokens.cells)
        self.post_message(self.Picked(line.seq, (line.tokens.cells[index].step or 0) if there else None))

    @property
    def _title_width(self) -> int:
        longest = max(cell_len(line.title) for line in self.lines)
        if not longest:
            return 0
        return _TITLE if any(line.led for line in self.lines) else min(_TITLE, longest + 3)

    def place_of(self, index: int) -> tuple[int, bool]:
        """The column at which a cell of the first line begins, and whether it is in view; 0 or the width where not."""
        line, room = self.lines[0], self._title_width
        width = self.size.width - room
        self._scroll_to_cursor(line, width)
        x = line.tokens.starts[min(index, len(line.tokens.starts) - 1)] - self._left.get(line.seq, 0)
        seen = 0 <= x < width
        return (x + room if seen else 0 if x < 0 else self.size.width), seen

    def line(self, y: int) -> Strip:
        """The title, then the cells that are in view."""
        if y >= len(self.lines):
            return Strip.blank(self.size.width)
        line, styles, room = self.lines[y], self.paint, self._title_width
        if line.led:
            self._scroll_to_cursor(self.lines[y - 1], self.size.width - room)
        else:
            self._scroll_to_cursor(line, self.size.width - room)
        cells = self._cells(line, self.size.width - room, styles)
        if not room:
            return cells
        several = len({one.seq for one in self.lines}) > 1
        mark = "▸" if several and line.chosen and not line.led else " "
        role = styles.accent if mark == "▸" else styles.quiet
        return Strip.join([Strip([Segment(fit(f"{mark}{line.title}", room - 1) + " ", role)], room), cells])

    def _cells(self, line: StripLine, width: int, styles: Paint) -> Strip:
        """The cost does not grow with the number of tokens."""
        row, left = line.tokens, self._left.get(line.seq, 0)
        if not row.cells:
            text = "" if line is _UNKNOWN else "no tokens yet"
            return Strip([Segment(text, styles.quiet)]).adjust_cell_length(width)
        first = max(0, bisect_right(row.starts, left) - 1)
        segments: list[Segment] = []
        for index in range(first, len(row.cells)):
            if row.starts[index] >= left + width:
                break
            segments += self._cell(row.cells[index], index == line.at, line.chosen, styles)
        offset = left - row.starts[first]
        strip = Strip(segments).crop(offset, offset + width).adjust_cell_length(width)
        return _with_edges(strip, left > 0, row.starts[-1] > left + width + 1, styles)

    def _cell(self, cell: TokenCell, present: bool, chosen: bool, styles: Paint) -> tuple[Segment, Segment]:
        divider = Segment(_FORK if cell.fork else _DIVIDER, styles.accent if cell.fork else styles.edge)
        return Segment(cell.label, self._style(cell, present, chosen, styles)), divider

    def _style(self, cell: TokenCell, present: bool, chosen: bool, styles: Paint) -> Style:
        if cell.differs:
            return styles.wrong + Style(underline=True, reverse=present)
        if present:
            return styles.present if chosen else styles.accent
        if cell.step is None:
            return styles.quiet
        shade = cell.shade(self.colour)
        if shade is not None and math.isnan(shade):
            return styles.wrong
        return styles.text if shade is None else styles.text + Style(bgcolor=tint(shade, self.colour, styles))

    def _scroll_to_cursor(self, line: StripLine, width: int) -> None:
        """Keep the present cell in view, moving no more than a third of the width at a time is left over."""
        starts, left = line.tokens.starts, self._left.get(line.seq, 0)
        if line.at is not None and line.at < len(line.tokens.cells):
            begin, end = starts[line.at], starts[line.at + 1]
            margin = max(0, min(12, width // 4))
            if end + margin > left + width:
                left = end + margin - width
            if begin - margin < left:
                left = begin - margin
        self._left[line.seq] = max(0, min(left, starts[-1] - width))


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
