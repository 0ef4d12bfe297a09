"""Pane 3: the KV cache: lengths against positions on every rank, blocks and slots, the pool, norms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.reactive import reactive
from textual.widget import Widget

from workbench.export.table import Table
from workbench.tui.panes.base import Pane
from workbench.tui.snapshots.cache import Cache, CachedSequence, cache
from workbench.tui.widgets.heatmap import Heatmap
from workbench.tui.widgets.key_bar import KeyHint
from workbench.tui.widgets.lines import Lines, TextLine
from workbench.tui.widgets.shading import Matrix

#: The widest pool bar.
_BAR = 60


class CachePane(Pane):
    """What the cache holds after the present step."""

    NUMBER = 3
    TITLE = "KV cache"
    SHORT = "KV"
    HELP = """\
The KV cache after the present step.

Each sequence: its position, how many rows each rank holds for it (a length that disagrees with the position
is a fault), and its block table in order: full blocks, the last one with its free slots, blocks that are in
two tables. Below, the norms of the cached keys (or values) by layer and position, as far as they were
captured: stale, duplicated or shifted slots stand out as stripes.

  v      keys or values
"""
    HINTS = (KeyHint("v", "keys, values", "v"),)
    BINDINGS: ClassVar[list[BindingType]] = [Binding("v", "kind", "Keys or values")]
    DEFAULT_CSS = """
    CachePane > Lines { max-height: 50%; }
    CachePane > #about-norms { height: auto; max-height: 3; padding: 1 1 0 1; }
    CachePane > Heatmap { padding: 0; margin: 0 1; }
    """

    kind: reactive[str] = reactive("k_cache")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: Cache | None = None

    def content(self) -> Iterable[Widget]:
        """The sequences, and the norms."""
        yield Lines(id="sequences")
        yield Lines(id="about-norms")
        yield Heatmap(id="norms")

    def question(self) -> tuple[Callable[..., Cache | None], Sequence[object]]:
        """The cache after the present step."""
        overview = self.overview
        assert overview is not None
        return cache, (overview.block_size, overview.layers, self.kind)

    def lacks(self) -> str:
        """The cached keys or values of every layer."""
        return f"capture layers.*.attn.{self.kind}"

    def answer(self, snapshot: Cache | None) -> None:
        """Show it."""
        self.snapshot = snapshot
        if snapshot is None or not snapshot.sequences:
            self.empty("Nothing is cached yet.\n\nn  runs a step")
            return
        self.filled()
        self.query_one("#sequences", Lines).show([*_pool_lines(snapshot), *self._sequence_lines(snapshot)])
        heatmap = self.query_one(Heatmap)
        what = "keys" if snapshot.norms_of == "k_cache" else "values"
        if snapshot.norms is None:
            heatmap.matrix = None
            told: TextLine = [
                (f"Norms of the cached {what} were not captured.  ", "quiet"),
                ("a", "strong"),
                (f"  captures them (:{self.lacks()})", "quiet"),
            ]
        else:
            heatmap.matrix = Matrix(snapshot.norms)
            told = [(f"L2 norm of the cached {what}: ", "quiet"), ("layers down, positions across", "text")]
        self.query_one("#about-norms", Lines).show([told])

    def _sequence_lines(self, snapshot: Cache) -> list[TextLine]:
        found: list[TextLine] = []
        for sequence in snapshot.sequences:
            lengths: list[tuple[str, str]] = []
            for rank, length in enumerate(sequence.lengths):
                right = length == sequence.expected
                lengths += [
                    (f"  rank {rank} ", f"rank{rank % 4}"),
                    (str(length), "text" if right else "wrong"),
                ]
            verdict = (
                ("  =", "faint")
                if sequence.agrees
                else (f"  ≠ {sequence.expected} positions were run", "wrong")
            )
            found.append([])
            found.append(
                [
                    (f"sequence {sequence.seq}", "strong"),
                    (f"   rows {sequence.expected}", "text"),
                    *lengths,
                    verdict,
                ]
            )
            found += [[("   ✗ ", "wrong"), (jump, "wrong")] for jump in sequence.jumps]
            found += _block_lines(sequence, snapshot, max(20, self.size.width - 14))
        return found

    def action_kind(self) -> None:
        """Keys or values."""
        self.kind = "v_cache" if self.kind == "k_cache" else "k_cache"
        self.again()

    def table(self) -> Table | None:
        """The sequences."""
        if self.snapshot is None:
            return None
        rows = tuple(
            (s.seq, s.expected, " ".join(map(str, s.lengths)), " ".join(map(str, s.blocks)), s.agrees)
            for s in self.snapshot.sequences
        )
        columns = ("sequence", "positions", "rows per rank", "block table", "agrees")
        return Table(f"KV cache after step {self.snapshot.step}", columns, rows)


def _pool_lines(snapshot: Cache) -> list[TextLine]:
    """The occupancy of the pool."""
    if snapshot.used is None or snapshot.free is None:
        return [[("pool   ", "strong"), ("not recorded", "quiet")]]
    total = snapshot.used + snapshot.free
    filled = round(_BAR * snapshot.used / total) if total else 0
    share = 100 * snapshot.used / total if total else 0
    return [
        [
            ("pool   ", "strong"),
            ("█" * max(filled, 1 if snapshot.used else 0), "trace"),
            ("░" * (_BAR - max(filled, 1 if snapshot.used else 0)), "faint"),
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
