"""The steps of a sequence over the width of the screen: how likely each token, how sure the choice, what went wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.reactive import reactive
from textual.strip import Strip

from lockstep.workbench.tui.widgets.painted import LineWidget
from lockstep.workbench.tui.widgets.plot import bars, greatest
from lockstep.workbench.tui.widgets.token_strip import TokenStrip
from lockstep.workbench.views.sentinel_watch import Watch
from lockstep.workbench.views.sentinels import NAMES, SentinelKind
from lockstep.workbench.views.token_line import TokenLine
from lockstep.workbench.views.where import Where

_LABEL = 13
_HEIGHT = 2
_WIDEST = 6
#: The mark of each sentinel, the gravest first: where several fire in a cell it is the first that is seen.
_MARKS: dict[SentinelKind, str] = {
    "nan": "×", "desync": "≠", "cache": "!", "inf": "∞", "golden": "✗", "repetition": "↻", "stop": "■",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepFigures:
    """By step: the probability of the token and a figure of the choice, 0 to 1 (None: not known, NaN: no number); the
    sentinels as far as they have been `scanned`. `title` names the sequence where there are several."""

    chances: Sequence[float | None] = ()
    figures: Sequence[float | None] = ()
    figure: str = "entropy"
    histories: tuple[tuple[SentinelKind, bytes], ...] = ()
    scanned: int = 0
    at: int = 0
    title: str = ""


class StepTimeline(LineWidget):
    """Bars, a line of marks, and the present step under them. Posts `TokenStrip.Picked` on a click."""

    DEFAULT_CSS = f"StepTimeline {{ height: {2 * _HEIGHT + 2}; width: 1fr; }}"

    steps: reactive[StepFigures] = reactive(StepFigures())

    def show(self, line: TokenLine, where: Where, colour: str, watch: Watch | None, title: str) -> None:
        """Show the steps of a sequence; in place of the entropy the divergence where tokens are coloured by it."""
        cells = line.tokens.cells[line.prompt :]
        surprise = [cell.shade("probability") for cell in cells]
        figure = "divergence" if colour == "divergence" else "entropy"
        self.steps = StepFigures(
            tuple(None if one is None else 1 - one for one in surprise),
            tuple(cell.shade(figure) for cell in cells),
            figure,
            () if watch is None else tuple((kind, watch.histories[kind].steps) for kind in _MARKS),
            0 if watch is None else watch.scanned,
            where.step,
            title,
        )

    def _share(self) -> int:
        """How many steps share a column."""
        room = max(1, self.size.width - _LABEL - 1)
        return max(1, -(-len(self.steps.chances) // room))

    def _wide(self) -> int:
        """How many columns a step has where there is room for more than one."""
        return max(1, min(_WIDEST, (self.size.width - _LABEL - 1) // max(1, len(self.steps.chances))))

    def line(self, y: int) -> Strip:
        """A line of bars, the line of marks, or the step's number under them."""
        if y < _HEIGHT:
            return self._bars("probability" * (y == 0), self.steps.chances, y, least=True)
        if y < 2 * _HEIGHT:
            return self._bars(self.steps.figure * (y == _HEIGHT), self.steps.figures, y - _HEIGHT)
        return self._marks() if y == 2 * _HEIGHT else self._foot()

    def _bars(self, label: str, values: Sequence[float | None], y: int, *, least: bool = False) -> Strip:
        """One line of a row of bars; of the steps that share a column the greatest is seen, or the `least`."""
        share, styles = self._share(), self.paint
        shares = [values[i : i + share] for i in range(0, len(values), share)]
        shown = [_least(each) if least else greatest(each) for each in shares]
        drawn = bars([*shown, 1.0], _HEIGHT)[y][:-1]
        present, wide = self.steps.at // share, self._wide()
        cells = [
            (
                (cell * (wide - 1)).ljust(wide) if wide > 1 else cell,
                styles.wrong if cell == "×" else styles.accent if i == present else styles.trace,
            )
            for i, cell in enumerate(drawn)
        ]
        return self._joined(label, cells)

    def _marks(self) -> Strip:
        """A cell for each column: the gravest sentinel that fired there, `·` where none did."""
        share, styles, total = self._share(), self.paint, len(self.steps.chances)
        cells = []
        for first in range(0, total, share):
            fired = (
                _MARKS[kind] for kind, steps in self.steps.histories if 1 in steps[first : first + share]
            )
            clear = "·" if first < self.steps.scanned else " "
            mark = next(fired, clear)
            cells.append((mark.ljust(self._wide()), styles.faint if mark == clear else styles.wrong))
        return self._joined("sentinels", cells)

    def _foot(self) -> Strip:
        """The present step under its column, and at the right what the marks mean that are seen."""
        styles, width = self.paint, self.size.width
        marker = f"▲ step {self.steps.at}" + (f"   {self.steps.title}" if self.steps.title else "")
        left = min(self.steps.at // self._share() * self._wide(), max(0, width - _LABEL - len(marker)))
        line = Strip([Segment(" " * (_LABEL + left)), Segment(marker, styles.accent)])
        seen = [f"{_MARKS[kind]} {NAMES[kind]}" for kind, steps in self.steps.histories if 1 in steps]
        legend = "   ".join(seen) + " "
        gap = width - line.cell_length - len(legend)
        if seen and gap > 0:
            line = Strip([*line, Segment(" " * gap), Segment(legend, styles.quiet)])
        return line.adjust_cell_length(width)

    def _joined(self, label: str, cells: Sequence[tuple[str, Style]]) -> Strip:
        segments = [Segment(f" {label:<{_LABEL - 1}}", self.paint.quiet)]
        segments += [
            Segment("".join(text for text, _ in run), style)
            for style, run in groupby(cells, key=lambda cell: cell[1])
        ]
        return Strip(segments).adjust_cell_length(self.size.width)

    def on_click(self, event: events.Click) -> None:
        """Go to the step."""
        step = (event.x - _LABEL) // self._wide() * self._share()
        if 0 <= step < len(self.steps.chances):
            self.post_message(TokenStrip.Picked(None, step))


def _least(values: Sequence[float | None]) -> float | None:
    """The least that is known; NaN before any number: what broke must be seen."""
    known = [v for v in values if v is not None]
    return next((v for v in known if math.isnan(v)), min(known, default=None))
