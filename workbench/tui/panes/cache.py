"""Pane 3: the KV cache: lengths against positions on every rank, blocks and slots, the pool, norms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from textual import on
from textual.binding import Binding, BindingType
from textual.reactive import reactive
from textual.widget import Widget

from workbench.export.table import Table
from workbench.tui.panes.base import Pane
from workbench.tui.panes.cache_lengths import layered, length_lines
from workbench.tui.widgets.heatmap import Heatmap
from workbench.tui.widgets.key_bar import KeyHint
from workbench.tui.widgets.shading import Matrix
from workbench.tui.widgets.text_block import TextBlock, TextLine, wrapped
from workbench.views.kv_cache import Cache, CachedSequence, cache
from workbench.views.numbers import number

#: The widest pool bar.
_BAR = 60


class CachePane(Pane):
    """What the cache holds after the present step."""

    NUMBER = 3
    TITLE = "KV cache"
    SHORT = "KV"
    HELP = """\
The KV cache after the present step.

Each sequence: how many rows each rank holds for it, layer by layer where the layers do not agree (a length that
disagrees with the tokens ✗, or a token at a position that does not follow, is a fault), and its block table in
order: full blocks, the last one with its free slots, blocks that are in two tables.

Below, the norms of the cached keys (or values): a row a layer and rank, positions across, as far as they were
captured. Slots that hold nothing, that a later step overwrote, or that hold another slot's or head's row are
told and marked with a dot. Against golden the map is the error of each row: stale and shifted slots light up.

  v      keys or values          d      error to golden, or norms
  a      capture what is missing
"""
    HINTS = (
        KeyHint("v", "keys, values", "v"),
        KeyHint("d", "golden error", "d"),
        KeyHint("a", "capture", "a"),
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "kind", "Keys or values"),
        Binding("d", "error", "Error to golden"),
    ]
    DEFAULT_CSS = """
    CachePane > TextBlock { max-height: 50%; }
    CachePane > #about-norms { height: auto; max-height: 5; padding: 1 1 0 1; }
    CachePane > Heatmap { padding: 0; margin: 0 1; }
    """

    kind: reactive[str] = reactive("k_cache")
    error: reactive[bool] = reactive(False)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: Cache | None = None

    def content(self) -> Iterable[Widget]:
        """The sequences, and the norms."""
        yield TextBlock(id="sequences")
        yield TextBlock(fold=True, id="about-norms")
        yield Heatmap(id="norms")

    def question(self) -> tuple[Callable[..., Cache | None], Sequence[object]]:
        """The cache after the present step."""
        overview = self.overview
        assert overview is not None
        return cache, (overview.block_size, overview.layers, self.kind, self.error)

    def lacks(self) -> str:
        """The cached keys or values of every layer."""
        return f"capture layers.*.attn.{self.kind}"

    def answer(self, snapshot: Cache | None) -> None:
        """Show it."""
        self.snapshot = snapshot
        if snapshot is None or not snapshot.sequences:
            self.empty("Nothing is cached yet.", "n  runs a step")
            return
        self.filled()
        self.query_one("#sequences", TextBlock).show(
            [
                *_pool_lines(snapshot, self.size.width),
                *self._sequence_lines(snapshot),
                *_findings(snapshot, self.size.width - 6),
            ]
        )
        rows = snapshot.rows
        self.query_one(Heatmap).matrix = (
            None if rows.values is None else Matrix(rows.values, marks=rows.marks)
        )
        self._tell()

    def on_resize(self) -> None:
        """The bar and the words are laid out for the width, which is not known before the first layout."""
        if self.snapshot is not None:
            self.answer(self.snapshot)

    def _tell(self) -> None:
        """What the map shows, and the slot under the cursor."""
        snapshot = self.snapshot
        if snapshot is None:
            return
        rows, what = snapshot.rows, "keys" if snapshot.rows_of == "k_cache" else "values"
        if rows.values is None:
            told: list[TextLine] = [
                [
                    (f"The cached {what} were not captured.  ", "quiet"),
                    ("a", "strong"),
                    (f"  captures them (:{self.lacks()})", "quiet"),
                ]
            ]
        else:
            layers = "layers and ranks down" if rows.ranks > 1 else "layers down"
            row, slot = self.query_one(Heatmap).cursor
            value = rows.values[min(row, len(rows.values) - 1), min(slot, rows.values.shape[1] - 1)]
            kind = "relative error of the cached" if rows.against_golden else "L2 norm of the cached"
            told = [
                [(f"{kind} {what}: ", "quiet"), (f"{layers}, positions across", "quiet")],
                [
                    (f"layer {row // rows.ranks} ", "strong"),
                    (f"rank {row % rows.ranks}", f"rank{row % rows.ranks % 4}"),
                    (f"   slot {slot} “{self.label(slot)}”   ", "text"),
                    (number(float(value), 4), "text" if np.isfinite(value) else "wrong"),
                ],
            ]
        self.query_one("#about-norms", TextBlock).show(told)

    @on(Heatmap.Pointed)
    def _pointed(self, event: Heatmap.Pointed) -> None:
        event.stop()
        self._tell()

    def _sequence_lines(self, snapshot: Cache) -> list[TextLine]:
        found: list[TextLine] = []
        for sequence in snapshot.sequences:
            found.append([])
            found += length_lines(sequence, self.size.width - 4)
            found += [[("   ✗ ", "wrong"), (jump, "wrong")] for jump in sequence.jumps]
            found += _block_lines(sequence, snapshot, max(20, self.size.width - 14))
        return found

    def action_kind(self) -> None:
        """Keys or values."""
        self.kind = "v_cache" if self.kind == "k_cache" else "k_cache"
        self.again()

    def action_error(self) -> None:
        """The error to golden's rows, where there is one."""
        if not self.error and (self.snapshot is None or not self.snapshot.rows.has_golden):
            self.notify(
                "No golden cache at this step: g compares with a golden reference.", severity="warning"
            )
            return
        self.error = not self.error
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


def _findings(snapshot: Cache, width: int) -> list[TextLine]:
    """What is odd about the cached rows."""
    found = snapshot.rows.findings
    lines = [line for words in found[:4] for line in wrapped(f"✗ {words}", "wrong", width)]
    more: list[TextLine] = [[(f"  and {len(found) - 4} more", "quiet")]] if len(found) > 4 else []
    return [[], *lines, *more] if lines else []


def _pool_lines(snapshot: Cache, width: int) -> list[TextLine]:
    """The occupancy of the pool."""
    if snapshot.used is None or snapshot.free is None:
        return [[("pool   ", "strong"), ("not recorded", "quiet")]]
    total = snapshot.used + snapshot.free
    room = max(10, min(_BAR, width - 42))
    filled = max(round(room * snapshot.used / total) if total else 0, 1 if snapshot.used else 0)
    share = 100 * snapshot.used / total if total else 0
    return [
        [
            ("pool   ", "strong"),
            ("█" * filled, "trace"),
            ("░" * (room - filled), "faint"),
            (f"  {snapshot.used} of {total} blocks of {snapshot.block_size}, {share:.0f} %", "quiet"),
        ]
    ]


def _block_lines(sequence: CachedSequence, snapshot: Cache, width: int) -> list[TextLine]:
    """The block table in order: number of each block, and how full the last one is."""
    if not sequence.blocks:
        return [[("   no block table recorded", "quiet")]]
    pieces: list[tuple[str, str]] = []
    left = sequence.expected
    for block in sequence.blocks:
        held = max(0, min(snapshot.block_size, left))
        left -= held
        role = "wrong" if block in snapshot.shared else "text" if held == snapshot.block_size else "accent"
        pieces.append(
            (f"{block}" if held == snapshot.block_size else f"{block}({held}/{snapshot.block_size})", role)
        )
    rows: list[TextLine] = []
    line: list[tuple[str, str]] = [("   blocks  ", "quiet")]
    used = 0
    for text, role in pieces:
        if used + len(text) + 1 > width:
            rows.append(line)
            line, used = [("           ", "quiet")], 0
        line.append((text + " ", role))
        used += len(text) + 1
    rows.append(line)
    if left > 0:
        rows.append([(f"   ✗ {left} rows have no block", "wrong")])
    return rows
