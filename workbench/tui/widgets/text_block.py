"""A block of styled lines: figures, legends, small diagrams. Scrolls where there are more than fit."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.segment import Segment
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from workbench.tui.widgets.fit import fit
from workbench.tui.widgets.grid import GridCell
from workbench.tui.widgets.painted import PaintedWidget

#: One line: pieces of text, each with its role.
TextLine = Sequence[GridCell]


def wrapped(text: str, role: str, width: int) -> list[TextLine]:
    """A text as lines of at most `width` characters; none for none."""
    return [[(line, role)] for line in textwrap.wrap(text, max(20, width))]


def flow(facts: Iterable[TextLine], width: int, gap: int = 3) -> list[TextLine]:
    """Facts beside each other on as many lines as they need; a fact stays together, one that is wider than a line is
    cut and says so. Empty ones are left out."""
    lines: list[list[GridCell]] = []
    used = 0
    for fact in facts:
        length = sum(cell_len(text) for text, _ in fact)
        if not length:
            continue
        if lines and used + gap + length <= width:
            lines[-1] += [(" " * gap, "quiet"), *fact]
            used += gap + length
        else:
            lines.append(
                [*fact] if length <= width else [(fit("".join(t for t, _ in fact), width), fact[0][1])]
            )
            used = length
    return list(lines)


class TextBlock(ScrollView, PaintedWidget):
    """Shows the lines it is given; `fit` makes it as high as they are many."""

    DEFAULT_CSS = "TextBlock { height: auto; width: 1fr; overflow-x: hidden; padding: 0 1; }"

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._lines: tuple[TextLine, ...] = ()

    def show(self, lines: Sequence[TextLine]) -> None:
        """Show these lines."""
        taller = len(lines) != len(self._lines)
        self._lines = tuple(lines)
        self.virtual_size = Size(1, len(lines))
        self.refresh(layout=taller)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """As high as there are lines."""
        return len(self._lines)

    @property
    def text(self) -> str:
        """The lines as plain text."""
        return "\n".join("".join(text for text, _ in line) for line in self._lines)

    def render_line(self, y: int) -> Strip:
        """One line."""
        index, width = y + round(self.scroll_offset.y), self.scrollable_content_region.width
        if index >= len(self._lines):
            return Strip.blank(width, self.ground)
        segments = [
            Segment(text, self.on_ground(role, self.ground)) for text, role in self._lines[index] if text
        ]
        return Strip(segments).adjust_cell_length(width, self.ground)
