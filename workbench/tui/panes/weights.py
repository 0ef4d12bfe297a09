"""Pane 4: every parameter with each rank's part; the selected one's values, histogram, what stands out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from textual import on, work
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widget import Widget

from lockstep.sessions.meta import WeightShare
from lockstep.workbench.export.table import Table
from lockstep.workbench.tui.panes.filtered import FilteredPane
from lockstep.workbench.tui.panes.titles import WEIGHTS, titled
from lockstep.workbench.tui.widgets.axes import Axes
from lockstep.workbench.tui.widgets.grid import Grid, GridCell, GridColumn
from lockstep.workbench.tui.widgets.heatmap import Heatmap
from lockstep.workbench.tui.widgets.key_bar import KeyHint
from lockstep.workbench.tui.widgets.plot import bars
from lockstep.workbench.tui.widgets.shading import Matrix
from lockstep.workbench.tui.widgets.text_block import TextBlock, TextLine, flow, wrapped
from lockstep.workbench.views.rank_weights import shape_text
from lockstep.workbench.views.weights import Parameter, Weights, weights
from lockstep.workbench.words.numbers import number

if TYPE_CHECKING:
    from lockstep.workbench.views.tensor import TensorFigures
    from lockstep.workbench.views.weight_values import ParameterValues

#: From this height on there is room for a histogram, and for figures on two lines.
_TALL = 20


class WeightsPane(FilteredPane):
    """The parameters."""

    NUMBER, TITLE, SHORT = titled(WEIGHTS)
    OF_STEP = False
    HELP = """\
Every parameter of the checkpoint and the part of it that each rank holds: = bit for bit what the checkpoint
has there, ≠ something else, once the ranks were asked (the checkpoint is read again for it).

The selected one below: statistics, a histogram, and its values; a q, k or v bias as a strip, heads down and
channels across, blue below zero and orange above. What stands far out is marked and listed with its head,
channel and rank. Standing out is not wrong in itself: Qwen2.5 has k-biases of -14 and -34, exactly as trained.

  /      filter by name, e.g. bias        a      hold what the ranks have against the checkpoint
  u      the next that differs            enter  its values: checkpoint, each rank's, the difference
"""
    HINTS = (
        KeyHint("a", "compare", "a"),
        KeyHint("/", "filter", "slash"),
        KeyHint("u", "next ≠", "u"),
        KeyHint("enter", "tensor", "enter"),
    )
    EMPTY_KEYS = frozenset({"a"})
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("u", "next_different", "Next that differs"),
    ]
    DEFAULT_CSS = """
    WeightsPane > #held { height: auto; max-height: 3; }
    WeightsPane > Grid { height: 2fr; }
    WeightsPane > #values { height: 3fr; }
    WeightsPane #figures { height: auto; padding: 1 1 0 1; }
    WeightsPane #strip { height: 1fr; min-height: 5; margin: 1 1 0 1; }
    WeightsPane #extremes { height: auto; max-height: 8; padding: 1 1 0 1; }
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: Weights | None = None
        self._shown: list[Parameter] = []
        self._measured: ParameterValues | None = None

    def content(self) -> Iterable[Widget]:
        """The list, and the values of the selected parameter."""
        yield TextBlock(fold=True, id="held")
        yield self.filter_field("k_proj.bias")
        yield Grid((), id="parameters")
        yield Vertical(TextBlock(id="figures"), Heatmap(id="strip"), TextBlock(id="extremes"), id="values")

    def question(self) -> tuple[Callable[..., Weights], Sequence[object]]:
        """All parameters; the checkpoint's do not change, what the ranks hold may on every branch."""
        return weights, ()

    def lacks(self) -> str:
        """The comparison of the ranks with the checkpoint."""
        return "info weights"

    def answer(self, snapshot: Weights) -> None:
        """Show them."""
        if not snapshot.parameters:
            self.empty(
                f"{snapshot.problem}\n\nIt is named in the session: keep both together to see the weights here.",
                "a  keeps in the session what the ranks hold",
            )
            return
        self.filled()
        if snapshot != self.snapshot:
            self.snapshot = snapshot
            self._lay_out()

    def _summary_line(self, snapshot: Weights) -> TextLine:
        """How what the ranks hold compares with the checkpoint, in one line."""
        if not snapshot.compared:
            return [
                ("what the ranks hold was not compared with the checkpoint   ", "quiet"),
                ("a", "strong"),
                (" compares", "quiet"),
            ]
        shares = sum(max(len(p.parts), len(p.held)) for p in snapshot.parameters if p.held)
        wrong = shares - sum(share.equal for p in snapshot.parameters for share in p.held.values())
        if not wrong:
            return [
                ("= ", "text"),
                (f"every one of {shares} shares is equal to the checkpoint, bit for bit", "text"),
            ]
        return [
            (f"≠ {wrong} of {shares} shares are not what the checkpoint has", "wrong"),
            ("   u  the next", "quiet"),
        ]

    def _lay_out(self) -> None:
        assert self.snapshot is not None
        needle = self.needle
        self._shown = [p for p in self.snapshot.parameters if needle in p.name.lower()]
        self.query_one("#held", TextBlock).show([self._summary_line(self.snapshot)])
        ranks = self.overview.ranks if self.overview else 1
        columns = [
            GridColumn("", 1),
            GridColumn("parameter", 30, flex=2, ends=True),
            GridColumn("shape", 12),
            GridColumn("dtype", 8, drop=20),
            *(
                GridColumn(f"rank {r}", 16, drop=r + 1 if r > 1 else 0, role=f"rank{r % 4}")
                for r in range(ranks)
            ),
        ]
        self.query_one(Grid).show(len(self._shown), self._cells, columns=columns)
        self._measure()

    def _cells(self, index: int) -> list[GridCell]:
        parameter = self._shown[index]
        ranks = self.overview.ranks if self.overview else 1
        parts = parameter.parts or ("not a parameter of the model",) * ranks
        return [
            (
                "≠" if parameter.differs else "=" if parameter.held else "",
                "wrong" if parameter.differs else "faint",
            ),
            (parameter.name.removeprefix("model."), "wrong" if parameter.differs else "text"),
            (shape_text(parameter.shape), "quiet"),
            (parameter.dtype, "quiet"),
            *(_share(part, rank, parameter) for rank, part in enumerate(parts)),
        ]

    @work(exclusive=True, group="measure")
    async def _measure(self) -> None:
        """Read the selected parameter's values."""
        cursor = self.query_one(Grid).cursor
        if cursor >= len(self._shown):
            return
        # Imported here: the first paint waits for no reader of checkpoints.
        from lockstep.workbench.views.weight_values import parameter_values

        self._measured = await self.reader.ask(parameter_values, self._shown[cursor].name)
        self._draw()

    def _draw(self) -> None:
        found, heatmap = self._measured, self.query_one(Heatmap)
        figures, extremes = self.query_one("#figures", TextBlock), self.query_one("#extremes", TextBlock)
        if found is None:
            figures.show([[("values of this dtype cannot be shown", "quiet")]])
            heatmap.matrix = None
            return
        seen = found.figures
        words = (("min", seen.minimum), ("max", seen.maximum), ("mean", seen.mean), ("std", seen.deviation))
        broken = (("NaN", seen.nan), ("Inf", seen.inf))
        facts: list[TextLine] = [
            [(f"{found.name} ", "strong")],
            *([(f"{name} {count}", "wrong")] for name, count in broken if count),
            *([(f"{name} ", "quiet"), (number(value), "text")] for name, value in words),
            [("" if seen.nan else " NaN 0", "quiet")],
            [(found.sampled, "quiet")],
        ]
        # Where there is no room for two lines, what is broken is not what is cut.
        room = self.size.width - 4 if self.size.height >= _TALL else 1000
        histogram = _histogram(seen, self.size.height)
        figures.show([*flow(facts, room, gap=1), *self._shares(found.name), *histogram])
        far = found.is_strip and {extreme.index for extreme in found.extremes}
        down, across = found.matrix.shape
        rows, columns = ("head", "channel") if found.is_strip else ("row", "column")
        heatmap.matrix = Matrix(
            found.matrix,
            "difference" if found.is_strip else "magnitude",
            marks=frozenset(divmod(index, across) for index in far or ()),
            axes=Axes(str, str, rows, columns, f"{down} × {across}"),
        )
        reported: list[TextLine] = [
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
        extremes.show([*reported, *wrapped(found.note, "quiet", self.size.width - 4)])

    def _shares(self, name: str) -> list[TextLine]:
        """What each rank holds of it, where that was asked."""
        parameter = next((one for one in self._shown if one.name == name), None)
        if parameter is None or not parameter.held:
            return []
        lines: list[TextLine] = []
        for rank, share in sorted(parameter.held.items()):
            verdict = "equal to the checkpoint" if share.equal else f"{share.checkpoint}: {_why(share)}"
            lines.append([
                (f"rank {rank}  ", f"rank{rank % 4}"),
                (f"{share.checksum}  ", "quiet"),
                (verdict, "text" if share.equal else "wrong"),
            ])  # fmt: skip
        if self.size.height < 30 and len(lines) > 2:  # the worst are enough where there is no room for all
            lines.sort(key=lambda line: line[2][1] != "wrong")
            lines = lines[:2]
        return lines

    def on_resize(self) -> None:
        """Words are wrapped to the width."""
        if self._measured is not None:
            self._draw()

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
        self.query_one("#extremes", TextBlock).show([line])

    @on(Grid.Chosen)
    def _open(self, event: Grid.Chosen) -> None:
        event.stop()
        if event.row < len(self._shown):
            chosen = self._shown[event.row]
            self.post_message(self.OpenWeight(chosen.name, math.prod(chosen.shape)))

    def action_next_different(self) -> None:
        """Go to the next parameter of which a rank holds something else."""
        grid, many = self.query_one(Grid), len(self._shown)
        after = [(grid.cursor + 1 + i) % many for i in range(many)]
        found = next((row for row in after if self._shown[row].differs), None)
        if found is None:
            self.notify("No rank is known to hold anything else than the checkpoint.")
        else:
            grid.point(found)

    def filtered(self) -> None:
        """The parameters with the needle in their names."""
        if self.snapshot is not None:
            self._lay_out()

    def table(self) -> Table | None:
        """The parameters."""
        if self.snapshot is None or not self.snapshot.parameters:
            return None
        ranks = self.overview.ranks if self.overview else 1
        rows = tuple(
            (
                p.name, shape_text(p.shape), p.dtype, *p.parts,
                *(p.held[r].checkpoint if r in p.held else None for r in range(ranks)),
            )
            for p in self.snapshot.parameters
        )  # fmt: skip
        parts = (f"rank {r}" for r in range(ranks))
        compared = (f"rank {r} against the checkpoint" for r in range(ranks))
        return Table("weights", ("parameter", "shape", "dtype", *parts, *compared), rows)


def _histogram(seen: TensorFigures, height: int) -> list[TextLine]:
    """How many values lie where, over their range, as a pane of `height` lines has room for it."""
    low, high, counts = number(seen.minimum), number(seen.maximum), [float(n) ** 0.5 for n in seen.counts]
    if height < _TALL:
        return [[(f"{low} ", "quiet"), (bars(counts, 1)[0], "trace"), (f" {high}", "quiet")]]
    drawn: list[TextLine] = [[(line, "trace")] for line in bars(counts, 3 if height > 26 else 1)]
    return [*drawn, [(low + high.rjust(len(counts) - len(low)), "quiet")]]


def _share(part: str, rank: int, parameter: Parameter) -> GridCell:
    """A rank's part, and whether it holds just that."""
    if not parameter.held:
        return (part, "quiet" if part == "whole" else "text")
    share = parameter.held.get(rank)
    if share is not None and share.equal:
        return (f"= {part}", "quiet" if part == "whole" else "text")
    return (f"≠ {part}" if share is not None else "≠ not held", "wrong")


def _why(share: WeightShare) -> str:
    """What stands in the place of the checkpoint's values."""
    return (
        "nothing but zeros"
        if share.empty
        else f"{shape_text(share.shape)}, rms {number(share.statistic('rms'))}, max {number(share.statistic('absmax'))}"
    )
