"""Part 2 of the split view: one layer's attention on both sides, and the difference, a head at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from textual import on
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.reactive import reactive
from textual.widget import Widget

from lockstep.engine.taps.names import layer_of
from lockstep.workbench.export.colormap import Scale
from lockstep.workbench.export.table import Table
from lockstep.workbench.tui.split.maps import (
    MAP_HINTS,
    MapsPart,
    Plane,
    SideMap,
    SideMaps,
    hidden_line,
    strongest,
    under_cursor,
)
from lockstep.workbench.tui.widgets.axes import Axes
from lockstep.workbench.tui.widgets.grid import Grid, GridCell, GridColumn
from lockstep.workbench.tui.widgets.heatmap import Heatmap
from lockstep.workbench.tui.widgets.key_bar import KeyHint
from lockstep.workbench.tui.widgets.shading import Matrix
from lockstep.workbench.tui.widgets.text_block import TextBlock, TextLine
from lockstep.workbench.views.attention import LayerAttention
from lockstep.workbench.views.compared_tensors import ComparedAttention, compared_attention
from lockstep.workbench.words.numbers import fixed, number


class SplitAttention(MapsPart):
    """Heads in a list, the maps of the one under the cursor."""

    NUMBER = 2
    TITLE = "Attention"
    SHORT = "Attn"
    HELP = """\
One layer's attention on both sides, and ours less theirs on the diverging scale (blue below, orange above).

The list gives each head's largest difference and the entropy of its last row on both sides; the maps are of the
head under the cursor. Both sides share a scale. Where it is narrow one map stands alone. Of scores, ∞ on the
difference is a key that the mask hides on one side alone.

  d    the next map              v    probabilities or scores
  z    one map alone, or all     , .  previous, next layer
  a    has missing attention computed again
"""
    HINTS = (
        *MAP_HINTS,
        KeyHint("v", "scores", "v"),
        KeyHint(", .", "layer", "full_stop"),
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "kind", "Probabilities or scores"),
    ]
    DEFAULT_CSS = """
    SplitAttention > Horizontal { height: 1fr; }
    SplitAttention Grid { width: 29; }
    """

    kind: reactive[str] = reactive("probs")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: ComparedAttention | None = None

    def content(self) -> Iterable[Widget]:
        """The heads, the maps, and what is under the cursor."""
        yield Horizontal(Grid(_COLUMNS, id="split-heads"), SideMaps(id="attention-maps"))
        yield TextBlock(id="under")

    def compared(self) -> tuple[Callable[..., ComparedAttention], Sequence[object]]:
        """The layer of the operation that is looked at."""
        return compared_attention, (self.present_layer, self.kind)

    @property
    def present_layer(self) -> int:
        """The layer of the operation that is looked at, 0 outside the layers."""
        taps = self.overview.taps if self.overview else ()
        return (layer_of(taps[self.where.tap]) or 0) if self.where.tap < len(taps) else 0

    def lacking(self) -> Sequence[tuple[str, str]]:
        """The sides without the layer's attention."""
        sides = () if self.snapshot is None else self.snapshot.lacking
        return [(side, self._tap) for side in sides]

    @property
    def _tap(self) -> str:
        return f"layers.{self.present_layer}.attn.{self.kind}"

    def answer(self, snapshot: ComparedAttention) -> None:
        """Show the layer."""
        self.snapshot = snapshot
        if snapshot.ours.values is None and (snapshot.theirs is None or snapshot.theirs.values is None):
            reported = snapshot.why_not or snapshot.ours.missing
            self.empty(
                f"Layer {self.present_layer}'s attention {self.kind} at step {snapshot.step}: {reported}.",
                "a  captures them",
            )
            return
        self.filled()
        self.query_one(Grid).show(len(self._any.heads), self._head_cells)
        self._draw()

    @property
    def _any(self) -> LayerAttention:
        """A side that has attention: both have the same heads."""
        assert self.snapshot is not None
        ours, theirs = self.snapshot.ours, self.snapshot.theirs
        return ours if ours.values is not None or theirs is None else theirs

    @property
    def head(self) -> int:
        """The selected head."""
        return self.query_one(Grid).cursor

    def _head_cells(self, head: int) -> list[GridCell]:
        found = self.snapshot
        assert found is not None
        farthest = None if found.difference is None else _farthest(found.difference[head])
        entropies = [
            None
            if side is None or side.values is None or head >= len(side.heads)
            else side.heads[head].figures.entropy
            for side in (found.ours, found.theirs)
        ]
        return [
            (str(head), f"rank{self._any.heads[head].rank % 4}"),
            (
                "-" if farthest is None else number(farthest),
                "quiet" if not farthest else "text" if np.isfinite(farthest) else "wrong",
            ),
            *(
                (
                    fixed(one, 2) if one is not None else "-",
                    "quiet" if one is None or np.isfinite(one) else "wrong",
                )
                for one in entropies
            ),
        ]

    def _draw(self) -> None:
        found = self.snapshot
        if found is None or (
            found.ours.values is None and (found.theirs is None or found.theirs.values is None)
        ):
            return
        head = self.head
        (ours, theirs), sides = found.names, (found.ours, found.theirs)
        shown = [None if side is None or side.values is None else side.values[head] for side in sides]
        top = strongest(shown)
        scale: Scale = "magnitude" if self.kind == "probs" else "difference"
        maps = [
            SideMap(name, _matrix(one, scale, self._axes(one, side), top), self._missing(name, side))
            for name, one, side in zip(found.names, shown, sides, strict=True)
        ]
        difference = None if found.difference is None else found.difference[head]
        axes = self._axes(difference, found.ours)
        matrix = _matrix(difference, "difference", axes)
        maps.append(SideMap(f"{ours} − {theirs}", matrix, [[(found.why_not, "accent")]]))
        self.query_one(SideMaps).show(maps)
        self._report_cursor()

    def _axes(self, values: NDArray[np.float32] | None, side: LayerAttention | None) -> Axes | None:
        """Positions and their tokens, queries down and keys across."""
        if values is None or side is None or side.values is None:
            return None
        first = side.first_query + side.values.shape[1] - len(values)
        return Axes(
            lambda query: f"{first + query} {self.label(first + query)}",
            lambda key: self.label(key) or str(key),
            "q",
            "k",
        )

    def _missing(self, name: str, side: LayerAttention | None) -> list[TextLine]:
        """Why a side has no map, and what brings it."""
        assert self.snapshot is not None
        if side is None:
            return [[(self.snapshot.why_not, "accent")]]
        return [
            [(f"{name} at step {self.snapshot.step}: {side.missing}", "quiet")],
            [
                (
                    "a  has the step run again for it"
                    if self.live
                    else "record the run with --capture for it",
                    "text",
                )
            ],
        ]

    def _report_cursor(self) -> None:
        """Three lines: the place, the comparison, and what is under the cursor."""
        found = self.snapshot
        assert found is not None
        query, key = cursor = self.query_one(SideMaps).cursor
        theirs_values = None if found.theirs is None else found.theirs.values
        arrays = (found.ours.values, theirs_values, found.difference)
        planes = [None if values is None else values[self.head] for values in arrays]
        ours, theirs = found.names
        position = self._any.first_query + query
        reported: TextLine = [(found.why_not, "accent")]
        if not found.why_not:
            reported = [(f"{ours} − {theirs}: blue is less, orange more", "quiet")]
            reported += hidden_line(found.names, planes[0], planes[1], self._tap)
        head: TextLine = [
            (f"layer {self.present_layer} {self.kind}  head {self.head}  ", "strong"),
            (f"q {position} “{self.label(position)}”   k {key} “{self.label(key)}”", "text"),
        ]
        cells = under_cursor(found.names, planes, cursor, self._tap)
        self.query_one("#under", TextBlock).show([head, reported, cells])

    @on(Grid.Pointed)
    def _head_pointed(self, event: Grid.Pointed) -> None:
        event.stop()
        self._draw()

    @on(Grid.Chosen)
    def _head_chosen(self, event: Grid.Chosen) -> None:
        event.stop()
        self.query_one(SideMaps).heatmap.focus()

    @on(Heatmap.Pointed)
    def _cell_pointed(self, event: Heatmap.Pointed) -> None:
        event.stop()
        if self.snapshot is not None:
            self._report_cursor()

    def watch_line(self) -> None:
        """The tokens came in: name them."""
        self._draw()

    def action_kind(self) -> None:
        """Probabilities or scores."""
        self.kind = "scores" if self.kind == "probs" else "probs"
        self.again()

    def table(self) -> Table | None:
        """The last query's row of every head on both sides, and the difference."""
        found = self.snapshot
        if found is None or found.difference is None:
            return None
        assert found.ours.values is not None
        assert found.theirs is not None
        assert found.theirs.values is not None
        sides = zip(
            (*found.names, "difference"),
            (found.ours.values, found.theirs.values, found.difference),
            strict=True,
        )
        rows = tuple(
            (name, head, *map(float, values[head, -1]))
            for name, values in sides
            for head in range(len(values))
        )
        columns = ("side", "head", *(f"k{key}" for key in range(found.difference.shape[2])))
        return Table(f"attention {self.kind}, layer {self.present_layer}, step {found.step}", columns, rows)


def _matrix(values: Plane, scale: Scale, axes: Axes | None, top: float | None = None) -> Matrix | None:
    if values is None:
        return None
    return Matrix(np.ascontiguousarray(values), scale, top=top, masked=True, axes=axes)


def _farthest(values: NDArray[np.float32]) -> float:
    """The largest magnitude; NaN where something is. What is hidden on both sides is none."""
    return float(np.abs(values[~np.isneginf(values)]).max(initial=0.0))


_COLUMNS = (
    GridColumn("h", 2, right=True),
    GridColumn("max Δ", 7, right=True),
    GridColumn("H ours", 6, right=True),
    GridColumn("theirs", 6, right=True),
)
