"""Pane 2: what a layer attends to: all heads small, one head large, or the last query's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from textual import on
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.reactive import reactive
from textual.widget import Widget

from engine.taps.names import layer_of
from workbench.export.numbers import fixed, number
from workbench.export.table import Table
from workbench.tui.panes.base import Pane
from workbench.tui.widgets.grid import Grid, GridCell, GridColumn
from workbench.tui.widgets.heatmap import Heatmap
from workbench.tui.widgets.key_bar import KeyHint
from workbench.tui.widgets.multiples import Multiples, Tiles
from workbench.tui.widgets.shading import Matrix
from workbench.tui.widgets.text_block import TextBlock
from workbench.views.attention import LayerAttention, attention_and_golden

_MODES = ("heads", "head", "query")


class AttentionPane(Pane):
    """Heads × positions of one layer."""

    NUMBER = 2
    TITLE = "Attention"
    SHORT = "Attn"
    HELP = """\
What one layer attends to, from the captured probabilities (or scores).

The list gives, for the last query of each head: the row's sum (1 for probabilities), its entropy in nats,
how many keys hold 99 % of it, and the strongest key. Beside it all heads small, one head large
(queries down, keys across), or the last query's row of every head. The cursor names head, query, key,
both tokens and the value. Pixels take the strongest element under them.

  m    all heads, one head, rows     v    probabilities or scores
  , .  previous, next layer          d    difference to the golden reference
"""
    HINTS = (
        KeyHint("m", "view", "m"),
        KeyHint("v", "scores", "v"),
        KeyHint(", .", "layer", "full_stop"),
        KeyHint("d", "golden diff", "d"),
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "mode", "All heads, one head, rows"),
        Binding("v", "kind", "Probabilities or scores"),
        Binding("d", "difference", "Difference to golden"),
    ]
    DEFAULT_CSS = """
    AttentionPane > Horizontal { height: 1fr; }
    AttentionPane Grid { width: 42; max-width: 50%; }
    AttentionPane #maps { height: 1fr; width: 1fr; padding: 0 1; }
    AttentionPane #maps > * { display: none; }
    AttentionPane #maps > .-shown { display: block; }
    AttentionPane > TextBlock { height: 2; }
    """

    UNDER_WAY = True

    mode: reactive[str] = reactive("heads")
    kind: reactive[str] = reactive("probs")
    difference: reactive[bool] = reactive(False)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: LayerAttention | None = None

    def content(self) -> Iterable[Widget]:
        """The heads, their maps, and what is under the cursor."""
        yield Horizontal(
            Grid(_COLUMNS, id="heads"),
            Horizontal(Multiples(id="tiles"), Heatmap(id="map"), id="maps"),
        )
        yield TextBlock(id="under")

    def question(self) -> tuple[Callable[..., LayerAttention], Sequence[object]]:
        """The layer of the present operation."""
        return attention_and_golden, (self.present_layer, self.kind)

    @property
    def present_layer(self) -> int:
        """The layer of the present operation, 0 outside the layers."""
        taps = self.overview.taps if self.overview else ()
        return (layer_of(taps[self.where.tap]) or 0) if self.where.tap < len(taps) else 0

    def lacks(self) -> str:
        """The layer's own attention, whole."""
        return f"capture layers.{self.present_layer}.attn.{self.kind}"

    def answer(self, snapshot: LayerAttention) -> None:
        """Show the layer."""
        self.snapshot = snapshot
        self.shows(snapshot.step)
        if snapshot.values is None:
            self.empty(
                f"Layer {snapshot.layer}'s attention {snapshot.kind} at step {self.where.step} were not captured.\n\n"
                + ("v  probabilities" if snapshot.kind == "scores" else "v  scores"),
                f"a  captures them (:{self.lacks()})",
            )
            return
        self.filled()
        heads = self.query_one(Grid)
        heads.show(len(snapshot.heads), self._head_cells)
        self._draw()

    @property
    def head(self) -> int:
        """The selected head."""
        return self.query_one(Grid).cursor

    def _head_cells(self, head: int) -> list[GridCell]:
        snapshot = self.snapshot
        assert snapshot is not None
        assert snapshot.values is not None
        one = snapshot.heads[head]
        found = one.figures
        broken = not np.isfinite(found.total)
        strongest = "-" if found.strongest is None else self.label(found.strongest)
        off = snapshot.kind == "probs" and abs(found.total - 1) > 1e-2
        return [
            (str(head), f"rank{one.rank % 4}"),
            (str(one.kv_head), "quiet"),
            (fixed(found.total, 4), "wrong" if broken or off else "quiet"),
            (fixed(found.entropy, 2), "wrong" if broken else "text"),
            ("-" if found.keys is None else str(found.keys), "text"),
            (strongest, "text"),
        ]

    def _values(self) -> tuple[np.ndarray, str]:
        """What the maps show, and on which scale: the values, or their difference to golden."""
        assert self.snapshot is not None
        assert self.snapshot.values is not None
        if self.difference and self.snapshot.golden is not None:
            hidden = np.isneginf(self.snapshot.values)
            golden = np.where(np.isneginf(self.snapshot.golden), 0, self.snapshot.golden)
            return np.where(hidden, -np.inf, self.snapshot.values - golden), "difference"
        return self.snapshot.values, "magnitude"

    def _draw(self) -> None:
        snapshot = self.snapshot
        if snapshot is None or snapshot.values is None:
            return
        values, scale = self._values()
        tiles, heatmap = self.query_one(Multiples), self.query_one(Heatmap)
        tiles.set_class(self.mode == "heads", "-shown")
        heatmap.set_class(self.mode != "heads", "-shown")
        if self.mode == "heads":
            titles = tuple(f"{one.head}" for one in snapshot.heads)
            ranks = tuple(one.rank for one in snapshot.heads)
            tiles.tiles = Tiles(values, titles, ranks, scale)
            tiles.selected = self.head
        else:
            shown = values[self.head] if self.mode == "head" else values[:, -1]
            heatmap.matrix = Matrix(np.ascontiguousarray(shown), scale, masked=True)  # type: ignore[arg-type]
            if self.mode == "query":
                heatmap.cursor = (self.head, heatmap.cursor[1])
        self._tell_under()

    def _tell_under(self) -> None:
        """Two lines: the layer and the view, and what is under the cursor."""
        snapshot = self.snapshot
        assert snapshot is not None
        assert snapshot.values is not None
        heads, queries, keys = snapshot.values.shape
        query, key = self._pointed()
        value = snapshot.values[self.head, query, key]
        head = snapshot.heads[self.head]
        golden = snapshot.golden[self.head, query, key] if snapshot.golden is not None else None
        q, last = snapshot.first_query + query, snapshot.first_query + queries - 1
        self.query_one(TextBlock).show(
            [
                [
                    (f"layer {snapshot.layer} ", "strong"),
                    (
                        f"{snapshot.kind}  q {snapshot.first_query}…{last} × k 0…{keys - 1}  {heads} heads",
                        "quiet",
                    ),
                    ("  difference to golden" if self._values()[1] == "difference" else "", "accent"),
                ],
                [
                    (f"head {self.head} ", "strong"),
                    (f"rank {head.rank}", f"rank{head.rank % 4}"),
                    (f"  kv {head.kv_head}   ", "quiet"),
                    (f"q {q} “{self.label(q)}”   k {key} “{self.label(key)}”   ", "text"),
                    (number(float(value), 4), "text" if np.isfinite(value) else "wrong"),
                    (f"   golden {number(float(golden), 4)}" if golden is not None else "", "quiet"),
                ],
            ]
        )

    def _pointed(self) -> tuple[int, int]:
        """The query and the key under the cursor."""
        assert self.snapshot is not None
        assert self.snapshot.values is not None
        _, queries, keys = self.snapshot.values.shape
        row, column = self.query_one(Heatmap).cursor
        if self.mode == "heads":
            return queries - 1, self.snapshot.heads[self.head].figures.strongest or 0
        return (min(row, queries - 1) if self.mode == "head" else queries - 1), min(column, keys - 1)

    @on(Grid.Pointed)
    def _head_pointed(self, event: Grid.Pointed) -> None:
        event.stop()
        self._draw()

    @on(Grid.Chosen)
    def _head_chosen(self, event: Grid.Chosen) -> None:
        event.stop()
        self.mode = "head"

    @on(Multiples.Picked)
    def _tile_picked(self, event: Multiples.Picked) -> None:
        event.stop()
        self.query_one(Grid).cursor = event.tile
        self._draw()

    @on(Heatmap.Pointed)
    def _cell_pointed(self, event: Heatmap.Pointed) -> None:
        event.stop()
        if self.mode == "query":
            self.query_one(Grid).cursor = event.row
        if self.snapshot is not None and self.snapshot.values is not None:
            self._tell_under()

    def watch_line(self) -> None:
        """The tokens came in: name them."""
        if self.snapshot is not None and self.snapshot.values is not None:
            self.query_one(Grid).refresh()
            self._tell_under()

    def watch_mode(self) -> None:
        """Draw the other view."""
        self._draw()

    def action_mode(self) -> None:
        """All heads, one head, rows."""
        self.mode = _MODES[(_MODES.index(self.mode) + 1) % len(_MODES)]
        self.query_one(Heatmap if self.mode == "head" else Grid).focus()

    def action_kind(self) -> None:
        """Probabilities or scores."""
        self.kind = "scores" if self.kind == "probs" else "probs"
        self.again()

    def action_difference(self) -> None:
        """The difference to the golden reference, where there is one."""
        if self.snapshot is None or self.snapshot.golden is None:
            self.notify(
                "No golden attention for this layer: g compares with a golden reference.", severity="warning"
            )
            return
        self.difference = not self.difference
        self._draw()

    def table(self) -> Table | None:
        """The last query's row of every head."""
        if self.snapshot is None or self.snapshot.values is None:
            return None
        values = self.snapshot.values[:, -1]
        rows = tuple((head, *(float(x) for x in values[head])) for head in range(len(values)))
        columns = ("head", *(f"k{key}" for key in range(values.shape[1])))
        return Table(f"attention {self.snapshot.kind}, layer {self.snapshot.layer}", columns, rows)


_COLUMNS = (
    GridColumn("h", 2, right=True),
    GridColumn("kv", 2, right=True),
    GridColumn("sum", 6, right=True),
    GridColumn("H", 4, right=True),
    GridColumn("99%", 3, right=True, drop=1),
    GridColumn("strongest", 9, flex=1),
)
