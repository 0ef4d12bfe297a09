"""Ours, theirs and the difference as maps: beside each other, or one at a time where it is narrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.reactive import reactive

from lockstep.workbench.tui.split.part import SplitPart
from lockstep.workbench.tui.widgets.grid import GridCell
from lockstep.workbench.tui.widgets.heatmap import Heatmap
from lockstep.workbench.tui.widgets.key_bar import KeyHint
from lockstep.workbench.tui.widgets.painted import PaintedWidget
from lockstep.workbench.tui.widgets.shading import Matrix
from lockstep.workbench.tui.widgets.status_line import Fact, StatusLine
from lockstep.workbench.tui.widgets.text_block import TextBlock, TextLine, wrapped
from lockstep.workbench.views.difference import hidden_by_one, hides
from lockstep.workbench.words.numbers import number

#: Cells from which the three stand beside each other.
_BESIDE = 90
DIFFERENCE = 2

#: What the keys of the maps do, for the footer.
MAP_HINTS = (KeyHint("d", "next map", "d"), KeyHint("z", "one or all", "z"))


@dataclass(frozen=True, slots=True, eq=False)
class SideMap:
    """One of the three: its title, its matrix, or why there is none."""

    title: str
    matrix: Matrix | None
    missing: Sequence[TextLine] = ()


#: A side's matrix, or the difference of both.
Plane = NDArray[np.float32] | None


def under_cursor(
    names: Sequence[str], planes: Sequence[Plane], cursor: tuple[int, int], tap: str
) -> TextLine:
    """The value of each plane at (row, column), after the name of its side; `-` where it has none."""
    values = [None if plane is None else _value(plane, cursor) for plane in planes]
    hidden = [hides(tap) and value == -np.inf for value in values[:2]]
    line: list[GridCell] = []
    for place, (name, value) in enumerate(zip((*names, "difference"), values, strict=True)):
        reported = number(value, 4), "text" if value is None or np.isfinite(value) else "wrong"
        if hidden[place] if place < DIFFERENCE else all(hidden):
            reported = ("hidden by the mask", "quiet") if place < DIFFERENCE else ("none", "quiet")
        elif place == DIFFERENCE and value == np.inf and any(hidden):
            reported = f"hidden by {names[hidden.index(True)]} alone", "wrong"
        line += [(f"{name} ", "quiet"), (f"{reported[0]}   ", reported[1])]
    return line


def _value(plane: NDArray[np.float32], cursor: tuple[int, int]) -> float | None:
    inside = all(i < size for i, size in zip(cursor, plane.shape, strict=True))
    return float(plane[cursor]) if inside else None


def hidden_line(names: Sequence[str], ours: Plane, theirs: Plane, tap: str) -> TextLine:
    """How many scores one side alone hides, and which; nothing where there are none."""
    if ours is None or theirs is None:
        return []
    counts = hidden_by_one(ours, theirs, tap)
    reported = [f"{name} alone hides {count}" for name, count in zip(names, counts, strict=True) if count]
    return [(f"   ∞ {', '.join(reported)} of {ours.size} scores", "wrong")] if reported else []


def strongest(planes: Sequence[Plane]) -> float | None:
    """The largest finite magnitude of some planes, for a scale that they share; None for none."""
    found = [float(np.abs(one[np.isfinite(one)]).max(initial=0)) for one in planes if one is not None]
    return max(found, default=0.0) or None


class SideMaps(PaintedWidget):
    """Three maps with one cursor. `front` is the one that has it, and the only one where one stands alone."""

    DEFAULT_CSS = """
    SideMaps { layout: horizontal; height: 1fr; width: 1fr; }
    SideMaps > Vertical { height: 1fr; width: 1fr; padding: 0 1; }
    SideMaps > Vertical > TextBlock { display: none; padding: 1 0; }
    SideMaps > Vertical.-missing > TextBlock { display: block; }
    SideMaps > Vertical.-missing > Heatmap { display: none; }
    SideMaps.-alone > Vertical { display: none; }
    SideMaps.-alone > Vertical.-front { display: block; }
    """

    front: reactive[int] = reactive(DIFFERENCE)
    #: What the user asked for; None: as there is room.
    alone: reactive[bool | None] = reactive(None)

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._maps: Sequence[SideMap] = ()

    def compose(self) -> ComposeResult:
        """Title, map and what stands in its place, for each."""
        for _ in range(3):
            yield Vertical(StatusLine(), Heatmap(), TextBlock())

    @property
    def columns(self) -> list[Vertical]:
        """The three, from left to right."""
        return list(self.query_children(Vertical).results(Vertical))

    @property
    def room(self) -> tuple[int, int]:
        """The pixels that a map has, about: without its labels."""
        width = self.size.width if self.has_class("-alone") else self.size.width // 3
        return max(8, width - 12), max(4, 2 * (self.size.height - 3))

    @property
    def heatmap(self) -> Heatmap:
        """The map in front."""
        return self.columns[self.front].query_one(Heatmap)

    @property
    def cursor(self) -> tuple[int, int]:
        """The element under the cursor."""
        return self.heatmap.cursor

    def show(self, maps: Sequence[SideMap]) -> None:
        """Show these three."""
        self._maps = maps
        for column, one in zip(self.columns, maps, strict=True):
            column.set_class(one.matrix is None, "-missing")
            column.query_one(Heatmap).matrix = one.matrix
        self._lay_out()

    def next_map(self) -> None:
        """The next of the three to the front."""
        self.front = (self.front + 1) % 3

    def toggle_alone(self) -> None:
        """One alone, or all beside each other."""
        self.alone = not self.has_class("-alone")

    def watch_front(self) -> None:
        """The cursor goes along."""
        if self.is_mounted:
            had_focus = any(column.query_one(Heatmap).has_focus for column in self.columns)
            self._lay_out()
            if had_focus:
                self.heatmap.focus()

    def watch_alone(self) -> None:
        """Lay out anew."""
        if self.is_mounted:
            self._lay_out()

    def on_resize(self, event: events.Resize) -> None:
        """Where it is narrow one stands alone."""
        self._lay_out()

    def _lay_out(self) -> None:
        alone = self.size.width < _BESIDE if self.alone is None else self.alone
        self.set_class(alone, "-alone")
        width = self.size.width if alone else self.size.width // 3
        for place, (column, one) in enumerate(zip(self.columns, self._maps, strict=False)):
            front = place == self.front
            column.set_class(front, "-front")
            rest = [other.title for other in self._maps if other is not one] if alone else []
            facts = [Fact(one.title, "accent" if front else "strong")]
            column.query_one(StatusLine).show(facts, [Fact("  ".join(rest), "quiet", drop=1)] if rest else ())
            lines: list[TextLine] = []
            for line in one.missing:
                text = "".join(part for part, _ in line)
                lines += wrapped(text, str(line[0][1]) if line else "quiet", width - 4) or [[]]
            column.query_one(TextBlock).show(lines)

    @on(Heatmap.Pointed)
    def _pointed(self, event: Heatmap.Pointed) -> None:
        """One cursor: the others follow the one that has the keys."""
        if not event.heatmap.has_focus:
            event.stop()
            return
        for place, column in enumerate(self.columns):
            other = column.query_one(Heatmap)
            if other is event.heatmap:
                self.front = place
            else:
                other.cursor = (event.row, event.column)


class MapsPart(SplitPart):
    """A part that shows three maps, and a few lines on what is under their cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "map", "Next map"),
        Binding("z", "alone", "One map or all"),
    ]
    DEFAULT_CSS = "MapsPart > TextBlock { height: 3; }"

    def action_map(self) -> None:
        """The next of the three maps."""
        self.query_one(SideMaps).next_map()

    def action_alone(self) -> None:
        """One map alone, or all."""
        self.query_one(SideMaps).toggle_alone()
