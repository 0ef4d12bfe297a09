"""Widgets that draw their own lines, and keep what they drew until it changes."""

from __future__ import annotations

from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from lockstep.workbench.tui.guard import GuardedWidget
from lockstep.workbench.tui.theme import Paint, paint


def ground(widget: Widget) -> Style:
    """The style of the widget's background; Textual leaves it to those who draw lines to apply it."""
    return Style(bgcolor=widget.background_colors[1].rich_color)


def finished(widget: Widget, lines: list[Strip], crop: Region) -> list[Strip]:
    """Lines of the whole width as the app's filters (NO_COLOR) leave them, cut to the columns of `crop`."""
    for line_filter in widget.get_line_filters():
        lines = [line.apply_filter(line_filter, widget.background_colors[1]) for line in lines]
    if crop.column_span != (0, widget.outer_size.width):
        lines = [line.crop(*crop.column_span) for line in lines]
    return lines


class PaintedWidget(GuardedWidget):
    """A widget of which `render_line(y)` draws a line of its content, on the widget's ground; it has no border.
    A container of others draws its ground alone.

    Textual's own way from a line to the screen looks up the widget's colours and styles every segment anew for each
    line that may have changed: half of the time of a frame. Here they are looked up once a frame, and a line that
    stayed the same is the same object, which the compositor has cut to measure before.
    """

    def __init__(self, *children: Widget, **named: Any) -> None:
        self._kept: dict[int, Strip] = {}
        self._looked_up: tuple[object, ...] = ()
        self._styles_on: dict[tuple[str | Style, Style], Style] = {}
        self.paint: Paint
        self.ground = Style()
        self._blank = Strip([])
        super().__init__(*children, **named)

    def refresh(
        self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False
    ) -> PaintedWidget:
        """Draw the regions (of the content) anew at the next frame, or everything."""
        if repaint and regions:
            for y in (y for region in regions for y in region.line_range):
                self._kept.pop(y, None)
        elif repaint:
            self._kept.clear()
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)

    def draw(self, crop: Region) -> list[Strip]:
        """The lines of `crop`, a region of the widget with its padding."""
        self.look_up()
        width, height = self.outer_size
        blank, kept = self._blank, self._kept
        if type(self).render_line is PaintedWidget.render_line:  # a container: the same line all over
            return finished(self, [blank] * crop.height, crop)
        padding = self.gutter
        first, last = padding.top, height - padding.bottom
        lines = []
        for y in crop.line_range:
            line = kept.get(y - first) if first <= y < last else blank
            if line is None:
                line = kept[y - first] = self._framed(self.render_line(y - first), padding.left, width)
            lines.append(line)
        return finished(self, lines, crop)

    def render_line(self, y: int) -> Strip:
        """A line of the content, as wide as the content."""
        return Strip.blank(self.scrollable_content_region.width, self.ground)

    def on_ground(self, role: str | Style, ground: Style) -> Style:
        """The style of a role on a ground."""
        key = (role, ground)
        style = self._styles_on.get(key)
        if style is None:
            style = self._styles_on[key] = ground + self.paint.style(role)
        return style

    def look_up(self) -> None:
        """What all lines of a frame share; what was kept is of no use once it looks otherwise."""
        background = self.background_colors[1]
        look = (self.app.theme, background, self.outer_size, self.scrollable_content_region)
        if look != self._looked_up:
            self._looked_up, self.paint = look, paint(self.app)
            self.ground = ground(self)
            self._blank = Strip.blank(self.outer_size.width, self.ground)
            self._kept.clear()
            self._styles_on.clear()

    def _framed(self, line: Strip, left: int, width: int) -> Strip:
        """A line of the content between its paddings (and before the scrollbar)."""
        if left:
            line = Strip([Segment(" " * left, self.ground), *line], left + line.cell_length)
        return line if line.cell_length == width else line.adjust_cell_length(width, self.ground)


class LineWidget(PaintedWidget):
    """A widget of which `line(y)` draws a line; what it leaves without a ground gets the widget's."""

    def line(self, y: int) -> Strip:
        """One line, exactly as wide as the widget."""
        raise NotImplementedError

    def render_line(self, y: int) -> Strip:
        """The line on the widget's ground."""
        return self.line(y).apply_style(self.ground)
