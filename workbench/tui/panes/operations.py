"""Pane 1: every tap of the present step, its statistics on each rank, agreement, verdict, recent past."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from textual import on
from textual.binding import Binding, BindingType
from textual.reactive import reactive
from textual.widget import Widget

from lockstep.engine.taps.names import layer_of, local_name
from lockstep.sessions.errors import LayoutError
from lockstep.sessions.layouts import parse as parse_layout
from lockstep.sessions.records import STATISTICS
from lockstep.workbench.export.table import Table
from lockstep.workbench.tui.marks import STANDS
from lockstep.workbench.tui.panes.filtered import FilteredPane
from lockstep.workbench.tui.panes.titles import OPERATIONS, titled
from lockstep.workbench.tui.widgets.grid import Grid, GridCell, GridColumn
from lockstep.workbench.tui.widgets.key_bar import KeyHint
from lockstep.workbench.tui.widgets.sparkline import sparkline
from lockstep.workbench.tui.widgets.status_line import Fact
from lockstep.workbench.views.operations import INF, NAN, Operations, operations
from lockstep.workbench.views.sequences import of_all
from lockstep.workbench.views.verdicts import Judged
from lockstep.workbench.words.numbers import count, number

#: The least and the most cells of a name, with what it is indented by.
_SHORTEST, _LONGEST = 18, 26
#: The statistics worth a look over steps, in the order in which the key goes through them.
_SHOWN = ("rms", "absmax", "mean", "min", "max", "zeros")


class OperationsPane(FilteredPane):
    """The model from embedding to logits, a row a tap."""

    NUMBER, TITLE, SHORT = titled(OPERATIONS)
    HELP = """\
Every tap of the present step, from the embedding to the logits.

A row shows one statistic of the tap on each rank, whether ranks that must hold the same bits do
(= or ≠), the tap's layout, the golden reference's verdict, and the statistic over the last steps.
NaN and Inf are counted in place of the statistic; ● marks the first operation that holds any.
▶ is where the ranks stand, ◆ a breakpoint (b or a click here puts it there and takes it away),
◇ a watchpoint (a click takes it away).
In a step that is under way, what has not passed yet is dimmed: (0.999) is the step before's.
Statistics are of the whole batch; ( and ) choose the sequence whose tensor enter opens.

  /      filter by name            t      another statistic
  enter  open the tensor           R      one rank, or all
"""
    HINTS = (
        KeyHint("enter", "tensor", "enter"),
        KeyHint("/", "filter", "slash"),
        KeyHint("t", "statistic", "t"),
    )
    UNDER_WAY = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("t", "statistic", "Another statistic"),
    ]

    statistic: reactive[str] = reactive("rms")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: Operations | None = None
        self._rows: list[int] = []  # a tap, or -1 - layer for the heading of a layer
        self._headings: list[int | None] = []  # of each row, that of its layer
        self._for: tuple[object, ...] = ()
        self._pointed_at = -1  # the tap to which the cursor was moved last

    def content(self) -> Iterable[Widget]:
        """A filter that opens over the grid, and the grid."""
        yield self.filter_field("q_proj or layers.3")
        yield Grid((), marks=0, id="operations")

    def question(self) -> tuple[Callable[..., Operations], Sequence[object]]:
        """The operations of the step."""
        return operations, ()

    def answer(self, snapshot: Operations) -> None:
        """Show them; rows stay in place from step to step."""
        self.snapshot = snapshot
        if snapshot.stats is None:
            self.empty(
                f"No statistics at step {snapshot.step}.\n\nThey were not captured: run with --capture stats"
            )
            return
        self.filled()
        self._lay_out()
        self._report()

    def _lay_out(self) -> None:
        assert self.overview is not None
        key = (self.overview.taps, self.needle)
        led = key != self._for or self.where.tap != self._pointed_at
        if key != self._for:
            self._for = key
            self._rows = _rows(self.overview.operations, self.needle)
            self._headings = _headings(self.overview.taps, self._rows)
        grid = self.query_one(Grid)
        grid.show(len(self._rows), self._cells, columns=self._columns(), headings=self._headings)
        # Only where the place has moved: the user may have gone on since this was asked, or stand on a heading.
        if led and self.where.tap in self._rows:
            grid.cursor = self._rows.index(self.where.tap)
        self._pointed_at = self.where.tap

    def _columns(self) -> list[GridColumn]:
        ranks = self.overview.ranks if self.overview else 1
        shown = range(ranks) if self.where.rank is None else [self.where.rank]
        # Not by the width of the pane, before whose layout an answer may come: where it is narrow columns leave.
        names = map(local_name, self.overview.taps) if self.overview else ()
        longest = max((len(name) + 2 for name in names), default=0)
        title = (self.snapshot and of_all(self.snapshot.sequences)) or "operation"
        return [
            GridColumn("", 2),
            GridColumn(title, min(max(_SHORTEST, longest), _LONGEST), flex=2),
            *(_rank_column(rank, place, self.statistic) for place, rank in enumerate(shown)),
            GridColumn("", 1, drop=3 if ranks == 1 else 0),
            GridColumn("layout", 12, drop=8),
            GridColumn("golden", 11, drop=2),
            GridColumn("over steps", 10, flex=1, drop=5, tail=True),
        ]

    def _cells(self, index: int) -> list[GridCell]:
        """One row, made when it is drawn."""
        snapshot, overview = self.snapshot, self.overview
        assert snapshot is not None
        assert snapshot.stats is not None
        assert overview is not None
        row = self._rows[index]
        if row < 0:
            return [("", "quiet"), (f"layers.{-1 - row}", "strong")]
        name = overview.taps[row]
        filtered = bool(self._for[1])
        label = name if filtered or layer_of(name) is None else f"  {local_name(name)}"
        stands = STANDS if name == self.marks.stands else "●" if row == snapshot.first_broken else " "
        mark = stands + self.marks.stops.get(row, "")
        agreement = snapshot.agreement[row] if row < len(snapshot.agreement) else ""
        ranks = range(snapshot.stats.shape[1]) if self.where.rank is None else [self.where.rank]
        return [
            (mark, "wrong" if stands == "●" else "accent"),
            (label, _label_role(snapshot, row)),
            *(self._statistic_cell(row, rank) for rank in ranks),
            (agreement, "wrong" if agreement == "≠" else "faint"),
            (layout_text(name, overview.layouts[row]), "quiet"),
            verdict_cell(snapshot.judged.get(name)),
            (self._past(row), "trace"),
        ]

    def _statistic_cell(self, tap: int, rank: int) -> GridCell:
        assert self.snapshot is not None
        assert self.snapshot.stats is not None
        row = self.snapshot.stats[tap, rank]
        if not self.snapshot.has_passed(tap):
            if np.isnan(row).all():
                return "not yet", "faint"
            broken = "NaN" if row[NAN] > 0 else "Inf" if row[INF] > 0 else ""
            return f"({broken or number(float(row[STATISTICS.index(self.statistic)]))})", "faint"
        role = "wrong" if tap == self.snapshot.first_broken else "worn"
        if row[NAN] > 0:
            return f"NaN {count(row[NAN])}", role
        if row[INF] > 0:
            return f"Inf {count(row[INF])}", role
        if self.snapshot.checksums is not None and not self.snapshot.checksums[tap].any():
            return "not run", "faint"
        return number(float(row[STATISTICS.index(self.statistic)])), "text"

    def _past(self, tap: int) -> str:
        assert self.snapshot is not None
        past = self.snapshot.past_of(tap)
        if past is None:
            return ""
        rank = self.where.rank or 0
        broken = past[:, rank, NAN] + past[:, rank, INF] > 0
        values = past[:, rank, STATISTICS.index(self.statistic)]
        return sparkline([float("nan") if bad else float(v) for v, bad in zip(values, broken, strict=True)])

    def _report(self) -> None:
        snapshot, overview = self.snapshot, self.overview
        if snapshot is None or overview is None or snapshot.first_broken is None:
            self.post_message(self.Report(()))
            return
        name = overview.taps[snapshot.first_broken]
        self.post_message(
            self.Report(
                (
                    Fact("●", "wrong"),
                    Fact(f"{name} is the first to hold NaN or Inf: what went in was finite", "text"),
                )
            )
        )

    @on(Grid.Pointed)
    def _pointed(self, event: Grid.Pointed) -> None:
        event.stop()
        row = self._rows[event.row]
        if row >= 0:
            # An answer that is under way leaves the cursor here.
            self.where, self._pointed_at = replace(self.where, tap=row), row
            self.post_message(self.Go(tap=row))

    @on(Grid.Marked)
    def _marked(self, event: Grid.Marked) -> None:
        event.stop()
        if self._rows[event.row] >= 0:
            self.post_message(self.ToggleBreak(self._rows[event.row]))

    @on(Grid.Chosen)
    def _chosen(self, event: Grid.Chosen) -> None:
        event.stop()
        if self._rows[event.row] >= 0:
            self.post_message(self.OpenTensor(self._rows[event.row]))

    def filtered(self) -> None:
        """The taps with the needle in their names."""
        if self.snapshot is not None and self.snapshot.stats is not None:
            self._lay_out()

    def action_statistic(self) -> None:
        """Show the next statistic."""
        self.statistic = _SHOWN[(_SHOWN.index(self.statistic) + 1) % len(_SHOWN)]
        self.filtered()

    def table(self) -> Table | None:
        """Every tap, every rank, every statistic."""
        snapshot, overview = self.snapshot, self.overview
        if snapshot is None or snapshot.stats is None or overview is None:
            return None
        rows = tuple(
            (name, overview.layouts[i], rank, *(float(x) for x in snapshot.stats[i, rank]))
            for i, name in overview.operations
            for rank in range(overview.ranks)
        )
        return Table(f"operations of step {snapshot.step}", ("tap", "layout", "rank", *STATISTICS), rows)


def _label_role(snapshot: Operations, tap: int) -> str:
    if tap == snapshot.first_broken:
        return "wrong"
    return "text" if snapshot.has_passed(tap) else "faint"


def _rank_column(rank: int, place: int, statistic: str) -> GridColumn:
    """Where it is narrow the third rank and those after it leave; R shows them one at a time."""
    return GridColumn(
        f"rank {rank} {statistic}", 13, flex=1, drop=10 + place if place > 1 else 0, role=f"rank{rank % 4}"
    )


def _rows(taps: Sequence[tuple[int, str]], needle: str) -> list[int]:
    """Which rows there are: all taps under headings of their layers, or those whose name holds the needle."""
    if needle:
        return [i for i, name in taps if needle in name.lower()]
    rows: list[int] = []
    previous: int | None = None
    for i, name in taps:
        layer = layer_of(name)
        if layer is not None and layer != previous:
            rows.append(-1 - layer)
        previous = layer
        rows.append(i)
    return rows


def _headings(taps: Sequence[str], rows: Sequence[int]) -> list[int | None]:
    """The row of the heading of each row's layer; None outside the layers, and where rows are filtered."""
    found: list[int | None] = []
    heading: int | None = None
    for index, row in enumerate(rows):
        if row < 0:
            heading = index
        elif layer_of(taps[row]) is None:
            heading = None
        found.append(heading)
    return found


def layout_text(name: str, layout: str) -> str:
    """A layout as a column shows it: what is cut, and how many ranks hold the same shard."""
    try:
        parsed = parse_layout(layout)
    except LayoutError:  # a stranger's
        return layout
    if parsed.kind != "shard":
        return layout
    what = "vocab" if name == "logits" else "heads" if ".attn." in name else "cols"
    return f"shard {what}" + (f" ×{parsed.replicas}" if parsed.replicas > 1 else "")


def verdict_cell(judged: Judged | None) -> GridCell:
    """✓ and the figure, or ✗ and whether the error is this operation's own."""
    if judged is None:
        return "", "faint"
    figure = number(judged.figure, 2) if judged.figure is not None else ""
    if judged.verdict == "pass":
        return f"✓ {figure}", "quiet"
    if judged.verdict == "suspect":
        return f"~ {figure}", "text"
    if judged.verdict == "fail":
        return ("✗ inherited", "worn") if judged.inherited else (f"✗ {figure}", "wrong")
    return "· no golden", "faint"
