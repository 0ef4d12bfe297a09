"""Part 3 of the split view: the candidates of both sides beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from textual.widget import Widget

from lockstep.workbench.export.table import Table
from lockstep.workbench.tui.split.part import SplitPart
from lockstep.workbench.tui.widgets.grid import Grid, GridCell, GridColumn
from lockstep.workbench.tui.widgets.text_block import TextBlock, TextLine
from lockstep.workbench.views.compared_logits import ComparedLogits, RankedOn, compared_logits
from lockstep.workbench.words.numbers import chance, number
from lockstep.workbench.words.plain_text import finite


class SplitLogits(SplitPart):
    """Both choices, a row a token."""

    NUMBER = 3
    TITLE = "Logits"
    HELP = """\
The candidates for the next token of both sides: ours by rank, then those that only the other side has.

The move is from our rank to theirs. D is the Kullback–Leibler divergence of our choice from theirs in nats, as far
as the recorded candidates show: the true one is no less. ▸ is the token that the side chose.
"""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: ComparedLogits | None = None

    def content(self) -> Iterable[Widget]:
        """What it comes to, and the tokens."""
        yield TextBlock(id="apart")
        yield Grid((), id="tokens-compared")

    def compared(self) -> tuple[Callable[..., ComparedLogits], Sequence[object]]:
        """The step's candidates."""
        return compared_logits, ()

    def answer(self, snapshot: ComparedLogits) -> None:
        """Show them."""
        self.snapshot = snapshot
        if not snapshot.rows:
            self.empty(f"No candidates were recorded at step {snapshot.step}.")
            return
        self.filled()
        self.query_one(TextBlock).show(self._lines(snapshot))
        ours, theirs = snapshot.names
        columns = (
            GridColumn("", 2),
            GridColumn("token", 12, flex=2),
            GridColumn(f"{ours} #", 10, right=True, flex=1),
            GridColumn("p", 13, right=True),
            GridColumn(f"{theirs} #", 10, right=True, flex=1),
            GridColumn("p", 13, right=True),
            GridColumn("move", 7, right=True),
            GridColumn("logit", 9, right=True, drop=2),
            GridColumn("logit", 9, right=True, drop=2),
        )
        self.query_one(Grid).show(len(snapshot.rows), self._cells, columns=columns)

    def _lines(self, found: ComparedLogits) -> list[TextLine]:
        ours, theirs = found.names
        if found.why_not:
            return [[(found.why_not, "accent")]]
        apart = found.divergence
        line: TextLine = [(f"{found.overlap} candidates on both sides", "quiet")]
        if apart is not None:
            reported = "NaN: the logits of a side are NaN" if apart != apart else f"≥ {number(apart)} nats"
            line = [
                (f"D({ours}‖{theirs}) {reported}", "text" if finite(apart) else "wrong"),
                ("   ", "quiet"),
                *line,
            ]
        return [line]

    def _cells(self, index: int) -> list[GridCell]:
        assert self.snapshot is not None
        row = self.snapshot.rows[index]
        sides = (row.ours, row.theirs)
        chosen = "".join("▸" if side is not None and side.candidate.chosen else " " for side in sides)
        moved = row.moved
        move = "" if moved is None else "same" if not moved else f"↑ {moved}" if moved > 0 else f"↓ {-moved}"
        parted = chosen.strip() and chosen != "▸▸"
        return [
            (chosen, "wrong" if parted else "accent"),
            (row.label, "strong" if chosen.strip() else "text"),
            *_side_cells(row.ours),
            *_side_cells(row.theirs),
            (move, "faint" if not moved else "text"),
            *((_logit(side), "quiet") for side in sides),
        ]

    def table(self) -> Table | None:
        """Every candidate of both sides."""
        if self.snapshot is None:
            return None
        ours, theirs = self.snapshot.names
        rows = tuple(
            (row.token, row.label, *_figures(row.ours), *_figures(row.theirs)) for row in self.snapshot.rows
        )
        columns = (
            "id",
            "token",
            *(f"{name} {what}" for name in (ours, theirs) for what in ("rank", "p", "logit")),
        )
        return Table(f"{ours} beside {theirs}: candidates of step {self.snapshot.step}", columns, rows)


def _side_cells(side: RankedOn | None) -> tuple[GridCell, GridCell]:
    if side is None:
        return ("-", "faint"), ("", "faint")
    known = side.candidate.probability
    return (str(side.rank + 1), "quiet"), (
        chance(known),
        "text" if known is None or finite(known) else "wrong",
    )


def _logit(side: RankedOn | None) -> str:
    return "" if side is None else number(side.candidate.logit, 4)


def _figures(side: RankedOn | None) -> tuple[object, object, object]:
    return (
        (None, None, None) if side is None else (side.rank, side.candidate.probability, side.candidate.logit)
    )
