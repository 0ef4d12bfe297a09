"""Widgets that draw their own lines: the base that lays the widget's ground under them."""

from __future__ import annotations

from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget


def ground(widget: Widget) -> Style:
    """The style of the widget's background; Textual leaves it to those who draw lines to apply it."""
    return Style(bgcolor=widget.background_colors[1].rich_color)


class LineWidget(Widget):
    """A widget of which `line(y)` draws a line; what it leaves without a ground gets the widget's."""

    def line(self, y: int) -> Strip:
        """One line, exactly as wide as the widget."""
        raise NotImplementedError

    def render_line(self, y: int) -> Strip:
        """The line on the widget's ground."""
        return self.line(y).apply_style(ground(self))
