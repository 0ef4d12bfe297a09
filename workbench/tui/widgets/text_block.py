"""A block of styled lines: figures, legends, small diagrams. Scrolls where there are more than fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, chop_cells
from rich.segment import Segment
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from lockstep.workbench.tui.widgets.fit import fit
from lockstep.workbench.tui.widgets.grid import GridCell
from lockstep.workbench.tui.widgets.painted import PaintedWidget

#: One line: pieces of text, each with its role.
TextLine = Sequence[GridCell]


def wrapped(text: str, role: str, width: int) -> list[TextLine]:
    """A text as lines of at most `width` cells; none for none."""
    return folded([(text, role)], max(20, width)) if text.strip() else []


def folded(line: TextLine, width: int) -> list[TextLine]:
    """A line as lines of at most `width` cells, broken between words; a word that is wider is broken itself."""
    rows: list[list[GridCell]] = [[]]
    used = 0
    for text, role in line:
        for word in re.findall(r"\s+|\S+", text):
            cells = cell_len(word)
            if used and used + cells > width:
                rows.append([])
                used = 0
            if word.isspace() and not used and len(rows) > 1:
                continue
            for part in chop_cells(word, max(2, width)):
                if used and used + cell_len(part) > width:
                    rows.append([])
                    used = 0
                rows[-1].append((part, role))
                used += cell_len(part)
    return list(rows)


def cut(line: TextLine, width: int) -> TextLine:
    """A line in at most `width` cells; where it is longer it ends in …."""
    if sum(cell_len(text) for text, _ in line) <= width:
        return line
    kept: list[GridCell] = []
    room = width
    for text, role in line:
        if cell_len(text) >= room:
            return [*kept, (fit(f"{text} ", room), role)]  # there is more, even where the piece has room
        kept.append((text, role))
        room -= cell_len(text)
    return kept


def flow(facts: Iterable[TextLine], width: int, gap: int = 3) -> list[TextLine]:
    """Facts beside each other on as many lines as they need; a fact that is wider than a line is folded. Empty ones are
    left out."""
    lines: list[list[GridCell]] = []
    used = width
    for fact in facts:
        length = sum(cell_len(text) for text, _ in fact)
        if lines and length and used + gap + length <= width:
            lines[-1] += [(" " * gap, "quiet"), *fact]
            used += gap + length
        elif length:
            lines += [[*line] for line in folded(fact, width)]
            used = sum(cell_len(text) for text, _ in lines[-1])
    return list(lines)


class TextBlock(ScrollView, PaintedWidget):
    """Shows the lines it is given, and is as high as they are many. A line that is too long ends in …; with `fold` it
    goes on in the next one."""

    DEFAULT_CSS = "TextBlock { height: auto; width: 1fr; overflow-x: hidden; padding: 0 1; }"

    def __init__(self, *, fold: bool = False, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._fold, self._folded_at = fold, 0
        self._given: tuple[TextLine, ...] = ()
        self._lines: tuple[TextLine, ...] = ()

    def show(self, lines: Sequence[TextLine]) -> None:
        """Show these lines."""
        self._given = tuple(lines)
        self._lay_out(self._folded_at)

    def _lay_out(self, width: int) -> None:
        """The lines as they are at a width; 0: not known yet."""
        before, self._folded_at = len(self._lines), width
        self._lines = self._given
        if self._fold and width:
            self._lines = tuple(row for line in self._given for row in folded(line, width))
        self.virtual_size = Size(1, len(self._lines))
        self.refresh(layout=len(self._lines) != before)

    def on_resize(self) -> None:
        """Fold anew."""
        if self._fold and self._folded_at != self.scrollable_content_region.width:
            self._lay_out(self.scrollable_content_region.width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """As high as there are lines."""
        if self._fold and width:
            return sum(len(folded(line, width)) for line in self._given)
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
            Segment(text, self.on_ground(role, self.ground))
            for text, role in cut(self._lines[index], width)
            if text
        ]
        return Strip(segments).adjust_cell_length(width, self.ground)
