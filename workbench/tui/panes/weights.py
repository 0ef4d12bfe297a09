"""Pane 4: every parameter with each rank's part; the selected one's values, histogram, what stands out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from textual import on, work
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widget import Widget
from textual.widgets import Input

from workbench.export.numbers import number
from workbench.tui.panes.base import Pane, Table
from workbench.tui.snapshots.weights import Measured, Parameter, Weights, measured, weights
from workbench.tui.widgets.grid import Column, Grid, GridCell
from workbench.tui.widgets.heatmap import Heatmap
from workbench.tui.widgets.key_bar import KeyHint
from workbench.tui.widgets.lines import Lines, TextLine
from workbench.tui.widgets.plot import bars
from workbench.tui.widgets.shading import Matrix


class WeightsPane(Pane):
    """The parameters."""

    NUMBER = 4
    TITLE = "Weights"
    HELP = """\
Every parameter of the checkpoint and the part of it that each rank holds.

The selected one below: statistics, a histogram, and its values; a q, k or v bias as a strip, heads down and
channels across. What stands far out is listed with its head, channel and rank. Standing out is not
wrong in itself: Qwen2.5 has k-biases of -14 and -34, exactly as trained.

  /      filter by name, e.g. bias
"""
    HINTS = (KeyHint("/", "filter", "slash"),)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter"),
        Binding("escape", "clear_filter", "All parameters", show=False),
    ]
    DEFAULT_CSS = """
    WeightsPane > Input { height: 1; border: none; padding: 0 1; display: none; background: $raised; }
    WeightsPane > Input.-open { display: block; }
    WeightsPane > Grid { height: 2fr; }
    WeightsPane > #values { height: 3fr; }
    WeightsPane #figures { height: auto; padding: 1 1 0 1; }
    WeightsPane #strip { height: 1fr; margin: 1 1 0 1; }
    WeightsPane #extremes { height: auto; max-height: 8; padding: 1 1 0 1; }
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: Weights | None = None
        self._shown: list[Parameter] = []
        self._measured: Measured | None = None

    def content(self) -> Iterable[Widget]:
        """The list, and the values of the selected parameter."""
        yield Input(placeholder="filter: part of a name, e.g. k_proj.bias", compact=True)
        yield Grid((), id="parameters")
        yield Vertical(Lines(id="figures"), Heatmap(id="strip"), Lines(id="extremes"), id="values")

    def question(self) -> tuple[Callable[..., Weights], Sequence[object]]:
        """All parameters; they do not change with the step, so the first answer is kept."""
        return (lambda source, where: self.snapshot or weights(source, where)), ()

    def answer(self, snapshot: Weights) -> None:
        """Show them."""
        if not snapshot.parameters:
            self.empty(
                f"{snapshot.problem}\n\nIt is named in the session: keep both together to see the weights here."
            )
            return
        self.filled()
        if snapshot is not self.snapshot:
            self.snapshot = snapshot
            self._lay_out()

    def _lay_out(self) -> None:
        assert self.snapshot is not None
        needle = self.query_one(Input).value.strip().lower()
        self._shown = [p for p in self.snapshot.parameters if needle in p.name.lower()]
        ranks = self.overview.ranks if self.overview else 1
        columns = [
            Column("parameter", 30, flex=2),
            Column("shape", 12),
            Column("dtype", 8, drop=20),
            *(Column(f"rank {r}", 14, drop=r + 1 if r > 1 else 0, role=f"rank{r % 4}") for r in range(ranks)),
        ]
        self.query_one(Grid).show(len(self._shown), self._cells, columns=columns)
        self._measure()

    def _cells(self, index: int) -> list[GridCell]:
        parameter = self._shown[index]
        ranks = self.overview.ranks if self.overview else 1
        parts = parameter.parts or ("not a parameter of the model",) * ranks
        return [
            (parameter.name.removeprefix("model."), "text"),
            ("×".join(map(str, parameter.shape)), "quiet"),
            (parameter.dtype, "quiet"),
            *((part, "quiet" if part == "whole" else "text") for part in parts),
        ]

    @work(exclusive=True, group="measure")
    async def _measure(self) -> None:
        """Read the selected parameter's values."""
        cursor = self.query_one(Grid).cursor
        if cursor >= len(self._shown):
            return
        self._measured = await self.reader.ask(measured, self.where, self._shown[cursor].name)
        self._draw()

    def _draw(self) -> None:
        found, heatmap = self._measured, self.query_one(Heatmap)
        figures, extremes = self.query_one("#figures", Lines), self.query_one("#extremes", Lines)
        if found is None:
            figures.show([[("values of this dtype cannot be shown", "quiet")]])
            heatmap.matrix = None
            return
        words = (
            ("min", found.minimum),
            ("max", found.maximum),
            ("mean", found.mean),
            ("std", found.deviation),
        )
        head: list[GridCell] = [(f"{found.name}  ", "strong")]
        for name, value in words:
            head += [(f" {name} ", "quiet"), (number(value), "text")]
        head += [(f"  NaN {found.nan}", "wrong" if found.nan else "quiet"), (f"  {found.sampled}", "quiet")]
        drawn = bars([float(count) ** 0.5 for count in found.counts], 3 if self.size.height > 26 else 1)
        histogram: list[TextLine] = [[(line, "trace")] for line in drawn]
        low, high = number(found.edges[0]), number(found.edges[1])
        axis: TextLine = [(low + high.rjust(len(found.counts) - len(low)), "quiet")]
        figures.show([head, *histogram, axis])
        heatmap.matrix = Matrix(found.matrix)
        told: list[TextLine] = [
            [
                (f"  {number(extreme.value, 4):>9}  ", "strong"),
                (extreme.place, "text"),
                (
                    f"  rank {extreme.rank}" if extreme.rank is not None else "",
                    f"rank{(extreme.rank or 0) % 4}",
                ),
            ]
            for extreme in found.extremes[:6]
        ]
        note: list[TextLine] = [[(found.note, "quiet")]] if found.note else []
        extremes.show([*told, *note])

    @on(Grid.Pointed)
    def _pointed(self, event: Grid.Pointed) -> None:
        event.stop()
        self._measure()

    @on(Heatmap.Pointed)
    def _cell(self, event: Heatmap.Pointed) -> None:
        event.stop()
        if self._measured is None:
            return
        value = self._measured.matrix[event.row, event.column]
        row = "head" if self._measured.is_strip else "row"
        line = [(f"{row} {event.row}  column {event.column}  ", "quiet"), (number(float(value), 4), "strong")]
        self.query_one("#extremes", Lines).show([line])

    def action_filter(self) -> None:
        """Type to filter."""
        field = self.query_one(Input)
        field.add_class("-open")
        self.screen.set_focus(field)  # at once, for the keys that are under way

    def action_clear_filter(self) -> None:
        """All parameters again."""
        field = self.query_one(Input)
        field.value = ""
        field.remove_class("-open")
        self.query_one(Grid).focus()

    @on(Input.Changed)
    def _filtered(self, event: Input.Changed) -> None:
        event.stop()
        if self.snapshot is not None:
            self._lay_out()

    @on(Input.Submitted)
    def _filter_done(self, event: Input.Submitted) -> None:
        event.stop()
        self.query_one(Grid).focus()

    def table(self) -> Table | None:
        """The parameters."""
        if self.snapshot is None or not self.snapshot.parameters:
            return None
        rows = tuple(
            (p.name, "×".join(map(str, p.shape)), p.dtype, *p.parts) for p in self.snapshot.parameters
        )
        ranks = self.overview.ranks if self.overview else 1
        return Table("weights", ("parameter", "shape", "dtype", *(f"rank {r}" for r in range(ranks))), rows)
