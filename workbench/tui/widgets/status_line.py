"""One line of facts, the most important ones kept where it is narrow: left facts, a middle, right facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.segment import Segment
from textual.reactive import reactive
from textual.strip import Strip

from lockstep.workbench.tui.widgets.fit import fit
from lockstep.workbench.tui.widgets.painted import LineWidget


@dataclass(frozen=True, slots=True)
class Fact:
    """A piece of the line. Facts with the highest `drop` leave first where there is no room; 0 never does.

    `width` reserves room, so that what stands beside does not jump when a number gets longer. `brief` stands for the
    text where the needed facts have no room together.
    """

    text: str
    role: str = "text"
    drop: int = 0
    width: int = 0
    brief: str = ""

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
        """The line; facts leave whole, and only where even the needed ones have no room are they cut, with …."""
        width = self.size.width
        if y:
            return Strip.blank(width)
        left, right = self.placed(self.left, self.right, width)
        segments = self._segments(left)
        gap = max(1, width - self._length(left) - self._length(right))
        segments += [Segment(" " * gap), *self._segments(right)]
        return Strip(segments).adjust_cell_length(width)

    @classmethod
    def placed(cls, first: Sequence[Fact], last: Sequence[Fact], width: int) -> tuple[list[Fact], list[Fact]]:
        """What of both sides is shown at a width."""
        left, right = list(first), list(last)
        while cls._length(left) + cls._length(right) + 1 > width:
            droppable = [fact for fact in (*left, *right) if fact.drop]
            if not droppable:
                break
            worst = max(droppable, key=lambda fact: fact.drop)
            (left if worst in left else right).remove(worst)
        if cls._length(left) + cls._length(right) + 1 > width:
            left, right = (
                [replace(one, text=one.brief or one.text) for one in side] for side in (left, right)
            )
        over = cls._length(left) + cls._length(right) + (1 if left and right else 0) - width
        for facts in (left, right) if over > 0 else ():
            facts[:], over = _shortened(facts, over)
        return left, right

    @classmethod
    def _length(cls, facts: Sequence[Fact]) -> int:
        return sum(fact.cells for fact in facts) + cls.GAP * max(0, len(facts) - 1) + (1 if facts else 0)

    def _segments(self, facts: Sequence[Fact]) -> list[Segment]:
        segments: list[Segment] = [Segment(" ")] if facts is not None and facts else []
        for index, fact in enumerate(facts):
            if index:
                segments.append(Segment(" " * self.GAP))
            segments.append(Segment(fit(fact.text, fact.cells), self.paint.style(fact.role)))
        return segments


def _shortened(facts: Sequence[Fact], over: int) -> tuple[list[Fact], int]:
    """The longest of the facts as much shorter as is asked for, as far as it goes; and what is left to ask for."""
    shortest = 6
    kept = [replace(fact, width=0) for fact in facts]
    over -= sum(fact.cells - bare.cells for fact, bare in zip(facts, kept, strict=True))
    while over > 0 and (longest := max(kept, key=lambda fact: fact.cells, default=None)) is not None:
        room = max(shortest, longest.cells - over)
        if room >= longest.cells:
            break
        over -= longest.cells - room
        kept[kept.index(longest)] = replace(longest, text=fit(longest.text, room))
    return kept, over
