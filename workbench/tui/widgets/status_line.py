"""One line of facts, the most important ones kept where it is narrow: left facts, a middle, right facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.segment import Segment
from textual.reactive import reactive
from textual.strip import Strip

from workbench.tui.widgets.fit import fit
from workbench.tui.widgets.painted import LineWidget


@dataclass(frozen=True, slots=True)
class Fact:
    """A piece of the line. Facts with the highest `drop` leave first where there is no room; 0 never does.

    `width` reserves room, so that what stands beside does not jump when a number gets longer.
    """

    text: str
    role: str = "text"
    drop: int = 0
    width: int = 0

    @property
    def cells(self) -> int:
        """How wide it is drawn."""
        return max(self.width, cell_len(self.text))


class StatusLine(LineWidget):
    """`left` from the left edge, `right` to the right edge, two spaces between facts."""

    DEFAULT_CSS = "StatusLine { height: 1; width: 1fr; }"
    GAP = 2

    left: reactive[tuple[Fact, ...]] = reactive(())
    right: reactive[tuple[Fact, ...]] = reactive(())

    def show(self, left: Sequence[Fact], right: Sequence[Fact] = ()) -> None:
        """Show these facts."""
        self.left, self.right = tuple(left), tuple(right)

    def line(self, y: int) -> Strip:
        """The line; facts leave whole, none is cut unless even the needed ones have no room."""
        width = self.size.width
        if y:
            return Strip.blank(width)
        left, right = list(self.left), list(self.right)
        while self._length(left) + self._length(right) + 1 > width:
            droppable = [fact for fact in (*left, *right) if fact.drop]
            if not droppable:
                break
            worst = max(droppable, key=lambda fact: fact.drop)
            (left if worst in left else right).remove(worst)
        segments = self._segments(left)
        gap = max(1, width - self._length(left) - self._length(right))
        segments += [Segment(" " * gap), *self._segments(right)]
        return Strip(segments).adjust_cell_length(width)

    def _length(self, facts: Sequence[Fact]) -> int:
        return sum(fact.cells for fact in facts) + self.GAP * max(0, len(facts) - 1) + (1 if facts else 0)

    def _segments(self, facts: Sequence[Fact]) -> list[Segment]:
        segments: list[Segment] = [Segment(" ")] if facts is not None and facts else []
        for index, fact in enumerate(facts):
            if index:
                segments.append(Segment(" " * self.GAP))
            segments.append(Segment(fit(fact.text, fact.cells), self.paint.style(fact.role)))
        return segments
