"""The model as a column: a row a layer with its worst verdict; the present layer's operations under it."""

from __future__ import annotations

from dataclasses import dataclass

from textual import on
from textual.message import Message

from lockstep.engine.taps.names import layer_of, local_name
from lockstep.workbench.tui.marks import BREAK, STANDS, WATCH, Marks
from lockstep.workbench.tui.widgets.grid import Grid, GridCell, GridColumn
from lockstep.workbench.views.operations import Operations
from lockstep.workbench.views.overview import Overview
from lockstep.workbench.views.where import Where

#: Cells of a row beside its name: two marks, what is between the columns, the scrollbar.
_BESIDE = 6


class ModelTree(Grid):
    """The layers; the present one is open. Posts `Picked` for a tap."""

    DEFAULT_CSS = "ModelTree { width: 24; min-width: 24; height: 1fr; }"

    @dataclass
    class Picked(Message):
        """A row was picked: its tap, or the first tap of its layer."""

        tap: int

    @dataclass
    class ToggleBreak(Message):
        """Put a breakpoint at a tap (of a layer's row: its first), or take away the one that is there."""

        tap: int

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(
            (GridColumn("", 1), GridColumn("", 1), GridColumn("model", 17, flex=1, tail=True, mark="…")),
            marks=1,
            id=id,
        )
        self.can_focus = False
        self._rows: list[tuple[int, str, bool]] = []  # tap, label, whether it heads a layer
        self._worst: dict[int, str] = {}
        self._present = 0
        self._stops: dict[int, str] = {}

    def update(self, overview: Overview, where: Where, operations: Operations | None, marks: Marks) -> None:
        """Show the model at `where`."""
        layer = layer_of(overview.taps[where.tap]) if where.tap < len(overview.taps) else None
        rows: list[tuple[int, str, bool]] = []
        before: int | None = None
        for index, name in overview.operations:
            here = layer_of(name)
            if here is None:
                rows.append((index, name, False))
            elif here != before:
                rows.append((index, f"{'▾' if here == layer else '▸'} layers.{here}", True))
            if here is not None and here == layer:
                # Where the ranks stand their mark is in the way of the other one.
                stop = marks.stops.get(index, " ") if name == marks.stands else " "
                rows.append((index, f" {stop}{local_name(name)}", False))
            before = here
        self._rows, self._present = rows, where.tap
        # As wide as the longest name of all layers, whichever is open; the stylesheet sets how wide it may be.
        self.styles.width = _BESIDE + max(
            (len(local_name(name)) + 2 for _, name in overview.operations), default=0
        )
        self._worst = _worst(overview, operations)
        self._stops = _stops(overview, marks)
        self.show(len(rows), self._cells)
        self.cursor = next(
            (i for i, (tap, _, head) in enumerate(rows) if tap == where.tap and not head), self.cursor
        )

    def _cells(self, index: int) -> list[GridCell]:
        tap, label, heads = self._rows[index]
        wrong = self._worst.get(-1 - tap if heads else tap, "")
        present = tap == self._present and not heads
        role = "accent" if present else "text" if heads or not label.startswith(" ") else "quiet"
        stop = self._stops.get(-1 - tap if heads else tap, "")
        return [(wrong, "wrong"), (stop, "accent"), (label, role)]

    @on(Grid.Pointed)
    def _pointed(self, event: Grid.Pointed) -> None:
        event.stop()
        self.post_message(self.Picked(self._rows[event.row][0]))

    @on(Grid.Marked)
    def _marked(self, event: Grid.Marked) -> None:
        event.stop()
        self.post_message(self.ToggleBreak(self._rows[event.row][0]))


def _stops(overview: Overview, marks: Marks) -> dict[int, str]:
    """The mark of each tap, and (at -1 - its first tap) of each layer: where the ranks stand, else a breakpoint, else a
    watchpoint."""
    found: dict[int, str] = {}
    first_of: dict[int | None, int] = {}
    for index, name in enumerate(overview.taps):
        layer = layer_of(name)
        head = -1 - first_of.setdefault(layer, index)
        mark = STANDS if name == marks.stands else marks.stops.get(index, "")
        if mark:
            found[index] = mark
            if layer is not None:
                found[head] = min(mark, found.get(head, mark), key=_PRECEDENCE.index)
    return found


#: Of the marks of a layer the first of these is its heading's.
_PRECEDENCE = (STANDS, BREAK, WATCH)


def _worst(overview: Overview, operations: Operations | None) -> dict[int, str]:
    """The mark of each tap, and (at -1 - its first tap) of each layer: ● where something is wrong."""
    marks: dict[int, str] = {}
    if operations is None:
        return marks
    first_of: dict[int | None, int] = {}
    for index, name in overview.operations:
        layer = layer_of(name)
        first_of.setdefault(layer, index)
        found = operations.judged.get(name)
        failed = found is not None and found.verdict == "fail"
        desync = index < len(operations.agreement) and operations.agreement[index] == "≠"
        if failed or desync or operations.broken(index):
            inherited = found is not None and found.inherited
            marks[index] = (
                "·" if inherited or (index != operations.first_broken and not failed and not desync) else "●"
            )
            if layer is not None:
                head = -1 - first_of[layer]
                marks[head] = "●" if marks[index] == "●" or marks.get(head) == "●" else "·"
    return marks
