"""Pane 2: what a layer attends to: all heads small beside one head large, that head alone, or one query's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from textual import on
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.events import Resize
from textual.reactive import reactive
from textual.widget import Widget

from lockstep.engine.graph import STATE_TAPS
from lockstep.engine.taps.names import layer_of
from lockstep.workbench.export.colormap import Scale
from lockstep.workbench.export.table import Table
from lockstep.workbench.judgements.cause import numbers_in_words
from lockstep.workbench.tui.panes.attention_text import (
    about,
    head_axes,
    head_cells,
    head_label,
    token_axes,
    under_cursor,
    view_name,
)
from lockstep.workbench.tui.panes.base import Pane
from lockstep.workbench.tui.panes.titles import ATTENTION, titled
from lockstep.workbench.tui.widgets.axes import Axes
from lockstep.workbench.tui.widgets.grid import Grid, GridCell, GridColumn
from lockstep.workbench.tui.widgets.heatmap import Heatmap
from lockstep.workbench.tui.widgets.key_bar import KeyHint
from lockstep.workbench.tui.widgets.multiples import Multiples, Tiles
from lockstep.workbench.tui.widgets.shading import Matrix
from lockstep.workbench.tui.widgets.status_line import Fact
from lockstep.workbench.tui.widgets.text_block import TextBlock
from lockstep.workbench.views.attention import LayerAttention, attention_and_golden

_MODES = ("heads", "head", "rows")
#: How the taps of scores end.
_SCORES = ".attn.scores"
#: From this width on a head is large beside all heads.
_WIDE = 84


class AttentionPane(Pane):
    """Heads × positions of one layer."""

    NUMBER, TITLE, SHORT = titled(ATTENTION)
    OF_SEQUENCE = True
    HELP = """\
What one layer attends to, from the captured probabilities (or scores): queries down, keys across, each with its
position and token. Inside a step, of the layer that has just passed.

All heads are small, each under its number, its rank and the key/value head that it reads; the arrows choose one,
enter shows it large. Where there is room it stands large beside them. The rows are those of one query in every head,
with each row's sum (1 for probabilities), its entropy in nats, how many keys hold 99 % of it, and the strongest key.
Under the maps: what the cursor is on. A map that has more elements than room shows the strongest, and reports it.

  m    all heads, one head, rows     v    probabilities or scores
  , .  previous, next layer          d    difference to the golden reference
"""
    HINTS = (
        KeyHint("m", "view", "m"),
        KeyHint("v", "scores", "v"),
        KeyHint(", .", "layer", "full_stop"),
        KeyHint("d", "golden diff", "d"),
    )
    EMPTY_KEYS = frozenset({"v", "full_stop"})
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "mode", "All heads, one head, rows"),
        Binding("v", "kind", "Probabilities or scores"),
        Binding("d", "difference", "Difference to golden"),
    ]
    DEFAULT_CSS = """
    AttentionPane > #maps { height: 1fr; padding: 0 1; }
    AttentionPane > #maps > * { display: none; height: 1fr; }
    AttentionPane > #maps > .-shown { display: block; }
    AttentionPane > #maps > Multiples { width: 2fr; }
    AttentionPane > #maps > Heatmap { width: 3fr; }
    AttentionPane > #maps > Grid { width: 44; max-width: 50%; }
    AttentionPane > TextBlock { height: auto; max-height: 4; }
    """

    UNDER_WAY = True

    mode: reactive[str] = reactive("heads")
    kind: reactive[str] = reactive("probs")
    difference: reactive[bool] = reactive(False)
    head: reactive[int] = reactive(0)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: LayerAttention | None = None

    def content(self) -> Iterable[Widget]:
        """Of what layer it is, the maps, and what is under the cursor."""
        yield TextBlock(id="about")
        yield Horizontal(
            Multiples(id="tiles", classes="-shown"), Grid(_COLUMNS, id="heads"), Heatmap(id="map"), id="maps"
        )
        yield TextBlock(fold=True, id="under")

    def question(self) -> tuple[Callable[..., LayerAttention], Sequence[object]]:
        """The layer of the present operation, or the one that has just passed."""
        return attention_and_golden, (self.kind,)

    @property
    def hints(self) -> list[KeyHint]:
        """Without that of scores where there are none."""
        return [hint for hint in super().hints if hint.press != "v" or self._has_scores]

    @property
    def _has_scores(self) -> bool:
        """Whether scores are recorded, or can be: what other engines compute in one kernel are not."""
        if self.overview is None:
            return True
        return any(tap.endswith(_SCORES) and tap not in self.overview.absent for tap in self.overview.taps)

    def lacks(self) -> str:
        """The layer's own attention, whole."""
        return "" if self._linear() else f"capture layers.{self._layer}.attn.{self.kind}"

    @property
    def _layer(self) -> int:
        return 0 if self.snapshot is None else self.snapshot.layer

    @property
    def _values(self) -> NDArray[np.float32] | None:
        return None if self.snapshot is None else self.snapshot.values

    def answer(self, snapshot: LayerAttention) -> None:
        """Show the layer."""
        before, self.snapshot = self._values, snapshot
        self.shows(snapshot.step)
        if snapshot.values is None and (layers := self._linear()):
            self.empty(
                f"Layer {snapshot.layer} has linear attention: it keeps a state, and attends to no earlier token.\n\n"
                f", .  {layers}\n\n3  shows the state"
            )
            return
        if snapshot.values is None:
            absent = self.overview.absent if self.overview else {}
            why = absent.get(f"layers.{snapshot.layer}.attn.{snapshot.kind}", "")
            scores = "v  scores" if self._has_scores else ""
            self.empty(
                f"Layer {snapshot.layer}'s attention {snapshot.kind} at step {self.where.step} were not captured"
                + (f":\n{why}.\n\n" if why else ".\n\n")
                + ("v  probabilities" if snapshot.kind == "scores" else scores),
                f"a  captures them (:{self.lacks()})",
            )
            return
        self.filled()
        self.set_reactive(AttentionPane.head, min(self.head, len(snapshot.heads) - 1))
        row, column = self.query_one(Heatmap).cursor
        self._draw()
        if before is None or row >= before.shape[1] - 1:  # on the newest query: it stays there
            strongest = snapshot.heads[self.head].figures.strongest
            column = column if before is not None or strongest is None else strongest
            if self.mode != "rows":
                self.query_one(Heatmap).cursor = (snapshot.values.shape[1] - 1, column)
        self._report_cursor()

    def _linear(self) -> str:
        """Of a layer that keeps a state which layers have scores instead, in words; "" of any other."""
        taps = () if self.overview is None else self.overview.taps
        if not {f"layers.{self._layer}.{one}" for one in STATE_TAPS}.intersection(taps):
            return ""
        others = [at for tap in taps if tap.endswith(".attn.probs") and (at := layer_of(tap)) is not None]
        return f"layer{'s' * (len(others) > 1)} {numbers_in_words(others)} attend{'s' * (len(others) == 1)} to tokens"

    def _drawn(self) -> tuple[NDArray[np.float32], Scale, str]:
        """What the maps show, on which scale, and what it is: the values, or their difference to golden."""
        snapshot = self.snapshot
        assert snapshot is not None
        assert snapshot.values is not None
        difference = snapshot.difference if self.difference else None
        if difference is not None:
            return difference, "difference", "less golden's"
        if snapshot.kind == "scores":
            return snapshot.values, "difference", "score"
        return snapshot.values, "magnitude", "probability"

    def _draw(self) -> None:
        snapshot = self.snapshot
        if snapshot is None or snapshot.values is None:
            return
        values, scale, unit = self._drawn()
        tiles, heatmap, heads = self.query_one(Multiples), self.query_one(Heatmap), self.query_one(Grid)
        small, wide = self.mode == "heads", self.size.width >= _WIDE
        tiles.set_class(small, "-shown")
        heads.set_class(self.mode == "rows", "-shown")
        heatmap.set_class(not small or wide, "-shown")
        top = _top(values) if scale == "magnitude" else None
        if small:
            titles = tuple(map(head_label, snapshot.heads))
            ranks = tuple(one.rank for one in snapshot.heads)
            tiles.tiles = Tiles(values, titles, ranks, scale, top, "" if wide else unit)
            tiles.selected = self.head
        axes: Axes
        if self.mode == "rows":
            shown, axes = values[:, -1], head_axes(snapshot.heads, self.label, unit)
            heads.show(len(snapshot.heads), self._head_cells)
            heads.cursor = self.head
        else:
            shown, axes = values[self.head], token_axes(snapshot, self.label, unit)
        heatmap.matrix = Matrix(np.ascontiguousarray(shown), scale, top, masked=True, axes=axes)
        if self.mode == "rows":
            heatmap.cursor = (self.head, heatmap.cursor[1])
        lines = about(snapshot, self.mode, self.head, wide, unit, self.label, self.size.width - 2)
        self.query_one("#about", TextBlock).show(lines)
        self._report_cursor()

    def _head_cells(self, head: int) -> list[GridCell]:
        assert self.snapshot is not None
        return head_cells(self.snapshot.heads[head], self.snapshot.kind, self.label)

    def _report_cursor(self) -> None:
        """What is under the cursor."""
        if self.snapshot is None or self._values is None:
            return
        query, key = self._pointed()
        lines = under_cursor(self.snapshot, self.head, query, key, self.label, self.size.width - 2)
        self.query_one("#under", TextBlock).show(lines)

    def _pointed(self) -> tuple[int, int]:
        """The query and the key under the cursor; of a head that is not large its newest row's strongest key."""
        assert self.snapshot is not None
        assert self._values is not None
        _, queries, keys = self._values.shape
        heatmap = self.query_one(Heatmap)
        row, column = heatmap.cursor
        if not heatmap.has_class("-shown"):
            return queries - 1, self.snapshot.heads[self.head].figures.strongest or 0
        return (queries - 1 if self.mode == "rows" else min(row, queries - 1)), min(column, keys - 1)

    def on_resize(self, event: Resize) -> None:
        """Another width has room for other maps."""
        self._draw()

    @on(Grid.Pointed)
    def _head_pointed(self, event: Grid.Pointed) -> None:
        event.stop()
        self.head = event.row

    @on(Multiples.Picked)
    def _tile_picked(self, event: Multiples.Picked) -> None:
        event.stop()
        self.head = event.tile

    @on(Grid.Chosen)
    @on(Multiples.Chosen)
    def _head_chosen(self, event: Grid.Chosen | Multiples.Chosen) -> None:
        event.stop()
        self._show_mode("head")

    @on(Heatmap.Pointed)
    def _cell_pointed(self, event: Heatmap.Pointed) -> None:
        event.stop()
        if self.mode == "rows":
            # Not the message's row: drawing moves the cursor too, and two messages under way would call each other.
            self.head = self.query_one(Heatmap).cursor[0]
        self._report_cursor()

    def watch_head(self) -> None:
        """Draw the other head."""
        self._draw()

    def watch_line(self) -> None:
        """The tokens came in: name them."""
        self._draw()

    def action_mode(self) -> None:
        """All heads, one head, rows."""
        self._show_mode(_MODES[(_MODES.index(self.mode) + 1) % len(_MODES)])

    def _show_mode(self, mode: str) -> None:
        self.mode = mode
        self._draw()
        self.query_one({"heads": "#tiles", "head": "#map", "rows": "#heads"}[mode]).focus()
        self._report_text(view_name(mode, self.head))

    def _report_text(self, text: str) -> None:
        self.post_message(self.Report((Fact(text),)))

    def action_kind(self) -> None:
        """Probabilities or scores."""
        if self.kind == "probs" and not self._has_scores:
            self.notify("This recording has no scores.", severity="warning")
            return
        self.kind = "scores" if self.kind == "probs" else "probs"
        self._report_text("scores, masked, before softmax" if self.kind == "scores" else "probabilities")
        self.again()

    def action_difference(self) -> None:
        """The difference to the golden reference, where there is one."""
        if self.snapshot is None or self.snapshot.golden is None:
            self.notify(
                "No golden attention for this layer: g compares with a golden reference.", severity="warning"
            )
            return
        self.difference = not self.difference
        self._report_text("difference to golden" if self.difference else "the values themselves")
        self._draw()

    def table(self) -> Table | None:
        """The newest query's row of every head."""
        if self.snapshot is None or self.snapshot.values is None:
            return None
        values = self.snapshot.values[:, -1]
        rows = tuple((head, *(float(x) for x in values[head])) for head in range(len(values)))
        columns = ("head", *(f"k{key}" for key in range(values.shape[1])))
        return Table(f"attention {self.snapshot.kind}, layer {self.snapshot.layer}", columns, rows)


def _top(values: NDArray[np.float32]) -> float:
    """The strongest colour of probabilities: 1, or more where they are none."""
    return max(1.0, float(values.max(where=np.isfinite(values), initial=0)))


_COLUMNS = (
    GridColumn("h", 2, right=True),
    GridColumn("kv", 2, right=True),
    GridColumn("sum", 6, right=True),
    GridColumn("H", 4, right=True),
    GridColumn("99%", 3, right=True, drop=1),
    GridColumn("strongest", 11, flex=1),
)
