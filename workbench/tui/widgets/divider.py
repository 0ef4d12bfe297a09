"""A faint line between parts of the screen."""

from __future__ import annotations

from rich.segment import Segment
from textual.strip import Strip

from lockstep.workbench.tui.widgets.painted import LineWidget


class Divider(LineWidget):
    """One line of ─."""

    DEFAULT_CSS = "Divider { height: 1; width: 1fr; }"

    def line(self, y: int) -> Strip:
        """The line."""
        width = self.size.width
        return Strip([Segment("─" * width, self.paint.edge)], width)
