"""The names of the panes with their numbers; the present one marked, those with something wrong too."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip

from workbench.tui.widgets.painted import LineWidget


class PaneTabs(LineWidget):
    """One line: ` 1 Operations  2 Attention …`; short names where it is narrow."""

    DEFAULT_CSS = "PaneTabs { height: 1; width: 1fr; }"

    titles: reactive[tuple[str, ...]] = reactive(())
    short_titles: reactive[tuple[str, ...]] = reactive(())
    active: reactive[int] = reactive(1)
    marked: reactive[frozenset[int]] = reactive(frozenset())

    @dataclass
    class Picked(Message):
        """A tab was clicked."""

        number: int

    def _spans(self) -> list[tuple[int, str]]:
        """Where each tab begins, and its text."""
        full = [f" {i} {title} " for i, title in enumerate(self.titles, 1)]
        if sum(map(cell_len, full)) > self.size.width:
            full = [f" {i} {title}" for i, title in enumerate(self.short_titles, 1)]
        spans, x = [], 0
        for text in full:
            spans.append((x, text))
            x += cell_len(text)
        return spans

    def line(self, y: int) -> Strip:
        """The tabs."""
        styles = self.paint
        segments: list[Segment] = []
        for number, (_, text) in enumerate(self._spans() if y == 0 else [], 1):
            present = number == self.active
            base = styles.accent + Style(bold=True) if present else styles.quiet
            segments.append(Segment(text[:3], styles.wrong if number in self.marked else base))
            segments.append(Segment(text[3:], base))
        return Strip(segments).adjust_cell_length(self.size.width)

    def on_click(self, event: events.Click) -> None:
        """Go to the pane."""
        for number, (x, text) in enumerate(self._spans(), 1):
            if x <= event.x < x + cell_len(text):
                self.post_message(self.Picked(number))
