"""A faint line between parts of the screen."""

from __future__ import annotations

from rich.segment import Segment
from textual.strip import Strip

from workbench.tui.widgets.line import LineWidget


class Rule(LineWidget):
    """One line of ─."""

    DEFAULT_CSS = "Rule { height: 1; width: 1fr; }"

    def line(self, y: int) -> Strip:
        """The line."""
        width = self.size.width
        return Strip([Segment("─" * width, self.paint.faint)], width)
