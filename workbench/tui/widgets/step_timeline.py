"""The steps of the branch over the width of the screen: how certain the model was, where it stopped."""

from __future__ import annotations

from dataclasses import dataclass

from rich.segment import Segment
from textual import events
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip

from workbench.tui.widgets.painted import LineWidget
from workbench.tui.widgets.plot import bars, greatest
from workbench.views.token_line import TokenLine
from workbench.views.where import Where

_LABEL = 12
_HEIGHT = 3


class StepTimeline(LineWidget):
    """Bars of what the tokens are coloured by; the present step marked. Posts `Picked` on a click."""

    DEFAULT_CSS = "StepTimeline { height: 4; width: 1fr; }"

    steps: reactive[tuple[float | None, ...]] = reactive(())
    at: reactive[int] = reactive(0)
    colour: reactive[str] = reactive("probability")

    @dataclass
    class Picked(Message):
        """A step was clicked."""

        step: int

    def show(self, line: TokenLine, where: Where, colour: str) -> None:
        """Show a branch at a step, by what its tokens are coloured."""
        self.steps = tuple(cell.shade(colour) for cell in line.tokens.cells[line.prompt :])
        self.at, self.colour = where.step, colour

    def _bins(self) -> int:
        """How many steps share a column."""
        room = max(1, self.size.width - _LABEL - 1)
        return max(1, -(-len(self.steps) // room))

    def line(self, y: int) -> Strip:
        """A line of bars, or the steps' numbers under them."""
        styles, width, share = self.paint, self.size.width, self._bins()
        shown = [greatest(self.steps[i : i + share]) for i in range(0, len(self.steps), share)]
        present = self.at // share
        if y < _HEIGHT:
            drawn = bars([*shown, 1.0], _HEIGHT)[y][:-1]
            label = ("surprise" if self.colour == "probability" else self.colour, "", "")[y]
            segments = [
                Segment(f" {label:<{_LABEL - 1}}", styles.quiet),
                Segment(drawn[:present], styles.trace),
            ]
            segments += [
                Segment(drawn[present : present + 1], styles.accent),
                Segment(drawn[present + 1 :], styles.trace),
            ]
            return Strip(segments).adjust_cell_length(width)
        marker = f"▲ step {self.at}"
        left = min(present, max(0, width - _LABEL - len(marker)))
        return Strip([Segment(" " * (_LABEL + left)), Segment(marker, styles.accent)]).adjust_cell_length(
            width
        )

    def on_click(self, event: events.Click) -> None:
        """Go to the step."""
        step = (event.x - _LABEL) * self._bins()
        if 0 <= step < len(self.steps):
            self.post_message(self.Picked(step))
