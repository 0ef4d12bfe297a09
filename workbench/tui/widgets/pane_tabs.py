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

from lockstep.workbench.tui.widgets.painted import LineWidget


class PaneTabs(LineWidget):
    """One line: ` 1 Operations  2 Attention …`; short names where it is narrow. `keys` are those before the titles, the
    numbers where there are none."""

    DEFAULT_CSS = "PaneTabs { height: 1; width: 1fr; }"

    titles: reactive[tuple[str, ...]] = reactive(())
    short_titles: reactive[tuple[str, ...]] = reactive(())
    keys: reactive[tuple[str, ...]] = reactive(())
    active: reactive[int] = reactive(1)
    marked: reactive[frozenset[int]] = reactive(frozenset())

    @dataclass
    class Picked(Message):
        """A tab was clicked."""

        number: int

    def _spans(self) -> list[tuple[int, str, str]]:
        """Where each tab begins, its key and its title."""
        shown = self.keys or tuple(str(i) for i in range(1, len(self.titles) + 1))
        keys = [f" {key} " if key else " " for key in shown]
        full = [(key, f"{title} ") for key, title in zip(keys, self.titles, strict=True)]
        if sum(cell_len(key + title) for key, title in full) > self.size.width:
            full = list(zip(keys, self.short_titles, strict=True))
        spans, x = [], 0
        for key, title in full:
            spans.append((x, key, title))
            x += cell_len(key + title)
        return spans

    def line(self, y: int) -> Strip:
        """The tabs."""
        styles = self.paint
        segments: list[Segment] = []
        for number, (_, key, title) in enumerate(self._spans() if y == 0 else [], 1):
            present = number == self.active
            base = styles.accent + Style(bold=True) if present else styles.quiet
            segments.append(Segment(key, styles.wrong if number in self.marked else base))
            segments.append(Segment(title, base))
        return Strip(segments).adjust_cell_length(self.size.width)

    def on_click(self, event: events.Click) -> None:
        """Go to the pane."""
        for number, (x, key, title) in enumerate(self._spans(), 1):
            if x <= event.x < x + cell_len(key + title):
                self.post_message(self.Picked(number))
