"""Part 1 of the split view: the operations of a step on both sides, those that differ beyond rounding first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from textual import on
from textual.widget import Widget

from lockstep.workbench.export.table import Table
from lockstep.workbench.tui.split.part import SplitPart
from lockstep.workbench.tui.widgets.grid import Grid, GridCell, GridColumn
from lockstep.workbench.tui.widgets.key_bar import KeyHint
from lockstep.workbench.tui.widgets.text_block import TextBlock
from lockstep.workbench.views.compared_step import ComparedStep, ComparedTap, Difference, compared_step
from lockstep.workbench.words.numbers import number

_MARKS: dict[Difference, tuple[str, str]] = {
    "beyond": ("≠", "wrong"),
    "bits": ("≈", "accent"),
    "rounding": ("≈", "quiet"),
    "equal": ("=", "faint"),
    "unknown": (" ", "faint"),
}


class SplitOperations(SplitPart):
    """A row a tap, with the statistic that has moved most."""

    NUMBER = 1
    TITLE = "Operations"
    SHORT = "Ops"
    HELP = """\
Every operation of the step on both sides. What differs beyond rounding stands on top, in the order in which it
runs, the first one marked ●; then what differs in bits (≈), then what is equal (=).

Rounding is what the noise floor leaves room for that `golden` has measured at this step on either side, else a
fixed tolerance; the line above the rows names it.

Where both sides hold the tensor it is compared itself: its relative L2 error. Elsewhere checksums show whether
it is equal, and the statistic that has moved most is shown. A golden reference has no statistics: what `golden`
judged is shown. Nothing is compared where different tokens went in.
"""
    HINTS = (KeyHint("enter", "tensor", "enter"),)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: ComparedStep | None = None

    def content(self) -> Iterable[Widget]:
        """What it comes to, and the rows."""
        yield TextBlock(id="headline")
        yield Grid(_COLUMNS, id="compared")

    def compared(self) -> tuple[Callable[..., ComparedStep], Sequence[object]]:
        """The step's operations."""
        return compared_step, ()

    def answer(self, snapshot: ComparedStep) -> None:
        """Show them; the cursor goes with the operation that is looked at, at first to the first difference."""
        fresh = (
            self.snapshot is None
            or self.snapshot.step != snapshot.step
            or self.snapshot.names != snapshot.names
        )
        self.snapshot = snapshot
        self.filled()
        reported = (
            snapshot.headline,
            "wrong" if snapshot.first is not None else "accent" if snapshot.why_not else "text",
        )
        self.query_one(TextBlock).show([[reported], [(snapshot.rounding, "quiet")]])
        grid, (ours, theirs) = self.query_one(Grid), snapshot.names
        grid.show(len(snapshot.rows), self._cells, columns=_columns(ours, theirs))
        at = [row.tap for row in snapshot.rows]
        grid.cursor = at.index(self.where.tap) if not fresh and self.where.tap in at else 0
        self._look_at_chosen()

    def _cells(self, index: int) -> list[GridCell]:
        assert self.snapshot is not None
        row = self.snapshot.rows[index]
        mark, role = _MARKS[row.difference]
        first = row.tap == self.snapshot.first
        figure = "text" if row.difference == "beyond" else "quiet"
        rank = "" if row.rank is None or self._ranks == 1 else f" r{row.rank}"
        shown = row.ours is not None or row.theirs is not None
        return [
            ("●" if first else mark, role),
            (row.name, "wrong" if first else "text" if row.difference == "beyond" else "quiet"),
            (f"{row.statistic}{rank}" if shown else "", "quiet"),
            (number(row.ours) if shown else "", figure),
            (number(row.theirs) if shown else "", figure),
            ("" if row.rel_l2 is None else number(row.rel_l2, 2), figure),
            (row.note, "quiet"),
        ]

    @property
    def _ranks(self) -> int:
        return self.overview.ranks if self.overview is not None else 1

    @property
    def chosen(self) -> ComparedTap | None:
        """The row under the cursor."""
        if self.snapshot is None or not self.snapshot.rows:
            return None
        return self.snapshot.rows[self.query_one(Grid).cursor]

    @on(Grid.Chosen)
    def _opened(self, event: Grid.Chosen) -> None:
        event.stop()
        if self.chosen is not None:
            self.post_message(self.OpenTensor(self.chosen.tap))

    @on(Grid.Pointed)
    def _pointed(self, event: Grid.Pointed) -> None:
        event.stop()
        self._look_at_chosen()

    def _look_at_chosen(self) -> None:
        if self.chosen is not None and self.chosen.tap != self.where.tap:
            self.where = replace(self.where, tap=self.chosen.tap)
            self.post_message(self.Go(tap=self.chosen.tap))

    def table(self) -> Table | None:
        """Every row."""
        if self.snapshot is None:
            return None
        ours, theirs = self.snapshot.names
        rows = tuple(
            (
                row.name,
                row.difference,
                row.statistic,
                row.rank,
                row.ours,
                row.theirs,
                row.rel_l2,
                row.max_abs,
                row.note,
            )
            for row in self.snapshot.rows
        )
        columns = ("tap", "difference", "statistic", "rank", ours, theirs, "rel_l2", "max_abs", "note")
        return Table(f"{ours} beside {theirs}, step {self.snapshot.step}", columns, rows)


def _columns(ours: str, theirs: str) -> tuple[GridColumn, ...]:
    return (
        GridColumn("", 1),
        GridColumn("operation", 24, flex=2),
        GridColumn("moved", 9),
        GridColumn(ours, 14, right=True, flex=1),
        GridColumn(theirs, 14, right=True, flex=1),
        GridColumn("rel L2", 7, right=True),
        GridColumn("", 10, flex=3, drop=1),
    )


_COLUMNS = _columns("", "")
