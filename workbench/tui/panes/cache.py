"""Pane 3: the KV cache: the pool and its blocks, lengths against positions on every rank and over steps, norms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import DescendantFocus, Resize
from textual.reactive import reactive
from textual.widget import Widget

from lockstep.engine.graph import STATE_TAPS
from lockstep.workbench.export.table import Table
from lockstep.workbench.tui.panes.base import Pane
from lockstep.workbench.tui.panes.cache_blocks import (
    finding_lines,
    map_lines,
    pool_lines,
    table_lines,
    token_lines,
)
from lockstep.workbench.tui.panes.cache_lengths import layered, length_lines
from lockstep.workbench.tui.panes.cache_text import (
    borrowing_lines,
    growth_lines,
    length_facts,
    norm_facts,
    progress_lines,
    row_label,
    state_lines,
)
from lockstep.workbench.tui.panes.titles import CACHE, titled
from lockstep.workbench.tui.widgets.axes import Axes
from lockstep.workbench.tui.widgets.heatmap import Heatmap
from lockstep.workbench.tui.widgets.key_bar import KeyHint
from lockstep.workbench.tui.widgets.shading import Matrix
from lockstep.workbench.tui.widgets.status_line import Fact
from lockstep.workbench.tui.widgets.text_block import TextBlock, TextLine, flow
from lockstep.workbench.views.cache_history import CacheHistory
from lockstep.workbench.views.cache_rows import CACHED, cached_as
from lockstep.workbench.views.kv_cache import Cache, cache

#: From this height on both maps are shown.
_TALL = 36


class CachePane(Pane):
    """What the cache holds after the present step, or inside it."""

    NUMBER, TITLE, SHORT = titled(CACHE)
    HELP = """\
The KV cache after the present step. Inside a step: which layers have written their rows.

The pool: blocks and bytes used and reserved, and each block with the sequence that it belongs to and how full it is:
0█ full, 0▄ half, ○ given back, ◆ in two tables. Each sequence: how many rows each rank holds for it, layer by layer
where the layers do not agree (a length that disagrees with the tokens ✗, or a token at a position that does not
follow, is a fault), its block table in order, and how its rows grew.

Below two maps, a row a layer and rank: the rows held after each step, and the norms of the cached keys (or values) by
position, as far as they were captured. Slots that hold nothing, that a later step overwrote, or that hold another
slot's or head's row are listed and marked with a dot. Against golden the map is the error of each row: stale and
shifted slots light up.

Of layers with linear attention, which keep a state in place of rows: its norm over the steps, and how much the present
one has changed it, as far as states were captured.

  m      rows over steps, norms  v      keys or values
  a      capture what is missing d      error to golden, or norms
"""
    HINTS = (
        KeyHint("m", "map", "m"),
        KeyHint("v", "keys, values", "v"),
        KeyHint("d", "golden error", "d"),
        KeyHint("a", "capture", "a"),
    )
    EMPTY_KEYS = frozenset({"a"})
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "map", "Rows over steps, or norms"),
        Binding("v", "kind", "Keys or values"),
        Binding("d", "error", "Error to golden"),
    ]
    DEFAULT_CSS = """
    CachePane > TextBlock { max-height: 50%; }
    CachePane.-no-map > #sequences { max-height: 85%; }
    CachePane > #under { height: auto; max-height: 3; }
    CachePane > #cached { height: 1fr; padding: 0 1; }
    CachePane > #cached > Heatmap { display: none; height: 1fr; }
    CachePane > #cached > .-shown { display: block; }
    """

    UNDER_WAY = True

    kind: reactive[str] = reactive("k_cache")
    error: reactive[bool] = reactive(False)
    chosen: reactive[str] = reactive("norms")  # the map that is looked at

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: Cache | None = None

    def content(self) -> Iterable[Widget]:
        """The pool and the sequences, the maps, and what is under the cursor."""
        yield TextBlock(id="sequences")
        yield Vertical(Heatmap(id="lengths", classes="-shown"), Heatmap(id="norms"), id="cached")
        yield TextBlock(id="under")

    def question(self) -> tuple[Callable[..., Cache | None], Sequence[object]]:
        """The cache after the present step."""
        overview = self.overview
        assert overview is not None
        return cache, (overview.block_size, overview.layers, self.kind, self.error)

    def lacks(self) -> str:
        """The cached keys or values of every layer, and the states of those that hold one instead."""
        taps = () if self.overview is None else self.overview.taps
        states = [one for one in STATE_TAPS if any(tap.endswith(f".{one}") for tap in taps)]
        kinds = [self._cached, *(one.removeprefix("attn.") for one in states)]
        return f"capture {' '.join(f'layers.*.attn.{kind}' for kind in kinds)}"

    def answer(self, snapshot: Cache | None) -> None:
        """Show it."""
        self.snapshot = snapshot
        if snapshot is None or not snapshot.sequences:
            self.empty("Nothing is cached yet.", "n  runs a step")
            return
        self.filled()
        self._draw()

    def on_resize(self, event: Resize) -> None:
        """The bar and the words are laid out for the width, which is not known before the first layout."""
        self._draw()

    def watch_line(self) -> None:
        """The tokens came in: name them."""
        self._draw()

    def _draw(self) -> None:
        snapshot = self.snapshot
        if snapshot is None or not snapshot.sequences:
            return
        self.set_class(not self._maps(snapshot), "-no-map")
        width, ranks = self.size.width - 4, snapshot.rows.ranks
        layers = self.overview.layers if self.overview else 0
        self.query_one("#sequences", TextBlock).show(
            [
                *progress_lines(snapshot, self.where, layers, self.label, width),
                *self._sequence_lines(snapshot, width),
                *self._growth(snapshot, width),
                *borrowing_lines(snapshot.borrowing),
                *state_lines(snapshot.states, self.where.seq, width, 3 if self.size.height < 30 else 8),
                *finding_lines(snapshot.rows.findings, width),
                *pool_lines(snapshot, ranks, width),
                *map_lines(snapshot, width, 2 if self.size.height < 30 else 6),
            ]
        )
        self._draw_maps(snapshot, ranks)
        self._report()

    def _draw_maps(self, snapshot: Cache, ranks: int) -> None:
        lengths, norms = self.query_one("#lengths", Heatmap), self.query_one("#norms", Heatmap)
        history, rows = self._uneven(snapshot), snapshot.rows
        both = self.size.height >= _TALL
        there = history is not None and rows.values is not None
        norms.set_class(
            rows.values is not None and (both or history is None or self.chosen == "norms"), "-shown"
        )
        lengths.set_class(history is not None and (both or not there or self.chosen == "lengths"), "-shown")
        if history is not None:
            steps = Axes(
                lambda y: row_label(y, ranks),
                lambda x: str(history.first + x),
                "layer",
                "step",
                "rows cached" + (f", from step {history.first} on" if history.first > history.begin else ""),
            )
            lengths.matrix = Matrix(history.rows, masked=True, marks=history.wrong, axes=steps)
        if rows.values is not None:
            what = CACHED[snapshot.rows_of]
            unit = f"{'relative error' if rows.against_golden else 'L2 norm'} of the cached {what}"
            axes = Axes(lambda y: row_label(y, ranks), self._slot_label, "layer", "slot", unit)
            norms.matrix = Matrix(rows.values, masked=True, marks=rows.marks, axes=axes)

    @staticmethod
    def _uneven(snapshot: Cache) -> CacheHistory | None:
        """The rows over steps where they need a map: a strip shows them where all layers and ranks are alike."""
        history = snapshot.history
        return None if history is None or history.even else history

    def _growth(self, snapshot: Cache, width: int) -> list[TextLine]:
        history = snapshot.history
        if history is None or not history.even:
            return []
        return growth_lines(history, self.where.seq, snapshot.others, width)

    def _slot_label(self, slot: int) -> str:
        return f"{slot} {self.label(slot)}".rstrip()

    def _sequence_lines(self, snapshot: Cache, width: int) -> list[TextLine]:
        found: list[TextLine] = []
        for sequence in snapshot.sequences if snapshot.step >= 0 else ():
            lines = length_lines(sequence, width)
            if len(snapshot.sequences) > 1:
                chosen = sequence.seq == self.where.seq
                lines[0] = [("▸ " if chosen else "  ", "accent"), *lines[0]]
            found += lines
            found += [[("   ✗ ", "wrong"), (jump, "wrong")] for jump in sequence.jumps]
            if sequence.seq == self.where.seq and self._names_tokens(snapshot):
                share = 2 if self._maps(snapshot) else 1  # of the upper half, where a map has the lower one
                most = self.size.height // (2 * share) - len(snapshot.sequences)
                found += token_lines(sequence, snapshot, self.label, width, max(2, most))
            else:
                found += table_lines(sequence, snapshot, width)
        return found

    def _maps(self, snapshot: Cache) -> bool:
        """Whether there is a map below."""
        return snapshot.rows.values is not None or self._uneven(snapshot) is not None

    def _names_tokens(self, snapshot: Cache) -> bool:
        """Whether there is room for the tokens in each block: a map has it where it is low."""
        return self.size.height >= _TALL - 12 or not self._maps(snapshot)

    def _report(self) -> None:
        """What is under the cursor of the map that is looked at, and what is missing."""
        snapshot = self.snapshot
        if snapshot is None or self.overview is None:
            return
        facts: list[TextLine] = []
        for heatmap in self.query(Heatmap).results(Heatmap):
            if heatmap.matrix is not None and heatmap.has_class("-shown"):
                row, column = heatmap.cursor
                report = length_facts if heatmap.id == "lengths" else norm_facts
                if heatmap.has_focus or not facts:
                    value = float(heatmap.matrix.values[row, column])
                    facts = report(snapshot, row, column, value, self.label)
        lines = flow(facts, self.size.width - 2)
        if snapshot.rows.values is None:
            what = CACHED[snapshot.rows_of]
            why = next((w for tap, w in self.overview.absent.items() if tap.endswith(snapshot.rows_of)), "")
            reported = f"The cached {what} were not captured{f': {why}' if why else ''}."
            lines += flow(
                [[(reported, "quiet")], self._fills()],
                self.size.width - 2,
                gap=2,
            )
        self.query_one("#under", TextBlock).show(lines)

    def _fills(self) -> TextLine:
        if not self.live:  # a map needs the room more than a hint for another run
            return [(self.keeps(), "quiet")] if self.has_class("-no-map") else []
        return [("a", "strong"), (f"  captures them (:{self.lacks()})", "quiet")]

    @on(Heatmap.Pointed)
    def _pointed(self, event: Heatmap.Pointed) -> None:
        event.stop()
        self._report()

    @on(DescendantFocus)
    def _focused(self) -> None:
        self._report()

    def action_map(self) -> None:
        """The other map."""
        snapshot = self.snapshot
        if snapshot is None or self._uneven(snapshot) is None or snapshot.rows.values is None:
            self.notify(f"There is only one map here: {self.lacks()} brings the norms.")
            return
        shown = next((one.id for one in self.query(Heatmap).results(Heatmap) if one.has_focus), self.chosen)
        self.chosen = "norms" if shown == "lengths" else "lengths"
        self._draw()
        self.query_one(f"#{self.chosen}", Heatmap).focus()
        self._report_text("rows cached after each step" if self.chosen == "lengths" else "norms by position")

    def _report_text(self, text: str) -> None:
        self.post_message(self.Report((Fact(text),)))

    def action_kind(self) -> None:
        """Keys or values."""
        self.kind = "v_cache" if self.kind == "k_cache" else "k_cache"
        self._report_text(f"cached {CACHED[self._cached]}")
        self.again()

    @property
    def _cached(self) -> str:
        """The tap of `kind` in this model, which may cache latents."""
        overview = self.overview
        return self.kind if overview is None else cached_as(lambda tap: tap in overview.taps, self.kind)

    def action_error(self) -> None:
        """The error to golden's rows, where there is one."""
        if not self.error and (self.snapshot is None or not self.snapshot.rows.has_golden):
            self.notify(
                "No golden cache at this step: g compares with a golden reference.", severity="warning"
            )
            return
        self.error = not self.error
        self._report_text("error to golden's rows" if self.error else "norms")
        self.again()

    def table(self) -> Table | None:
        """The sequences."""
        if self.snapshot is None:
            return None
        rows = tuple(
            (s.seq, s.expected, layered(s.lengths), " ".join(map(str, s.blocks)), s.agrees)
            for s in self.snapshot.sequences
        )
        columns = ("sequence", "positions", "rows by rank and layer", "block table", "agrees")
        return Table(f"KV cache after step {self.snapshot.step}", columns, rows)
