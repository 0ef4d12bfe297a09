"""Pane 6: what watches over the run: when and where each thing first went wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from textual import on
from textual.widget import Widget

from workbench.export.table import Table
from workbench.tui.panes.base import Pane
from workbench.tui.widgets.grid import Grid, GridCell, GridColumn
from workbench.tui.widgets.key_bar import KeyHint
from workbench.tui.widgets.text_block import TextBlock
from workbench.views.sentinel_scan import Sentinel, SentinelScan, Watch


class SentinelsPane(Pane):
    """One row a sentinel."""

    NUMBER = 6
    TITLE = "Sentinels"
    HELP = """\
What watches over every step of the branch, and where each first found something.

NaN and Inf by the first tap that holds any; ranks whose bits differ where the layout says they are equal;
caches whose length is not the position; a tail of tokens that repeats itself; the first tap that left the
golden reference; stops. Enter goes there: the step, and the tap.

  enter  go there          o  walk back to the origin of what is wrong
"""
    HINTS = (KeyHint("enter", "go there", "enter"), KeyHint("o", "origin", "o"))
    DEFAULT_CSS = """
    SentinelsPane > Grid { height: 9; }
    SentinelsPane > TextBlock { height: 1fr; padding: 1 1 0 1; }
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: Watch | None = None
        self._scan = SentinelScan()

    def content(self) -> Iterable[Widget]:
        """The sentinels, and how far they have looked."""
        yield Grid(_COLUMNS, id="sentinels")
        yield TextBlock(id="scanned")

    def question(self) -> tuple[Callable[..., Watch], Sequence[object]]:
        """Go on looking."""
        return self._scan_on, ()

    def _scan_on(self, source: Any, where: Any) -> Watch:
        return self._scan.watch(source, where)

    def answer(self, snapshot: Watch) -> None:
        """Show what was found; go on while there are steps that were not looked at."""
        self.snapshot = snapshot
        self.filled()
        self.query_one(Grid).show(len(snapshot.sentinels), self._cells)
        raised = sum(1 for s in snapshot.sentinels if s.step is not None)
        done = snapshot.scanned >= snapshot.total
        progress = f"{snapshot.scanned} of {snapshot.total} steps looked at" + ("" if done else " …")
        told = "nothing wrong so far" if not raised else f"{raised} of {len(snapshot.sentinels)} raised"
        self.query_one(TextBlock).show([[(f"{told}   ", "text"), (progress, "quiet")]])
        if not done:
            self.again()

    def _cells(self, index: int) -> list[GridCell]:
        assert self.snapshot is not None
        sentinel = self.snapshot.sentinels[index]
        if sentinel.step is None:
            return [
                ("·", "faint"),
                (sentinel.name, "quiet"),
                ("", "quiet"),
                ("clear", "quiet"),
                ("", "quiet"),
            ]
        first = next(iter(sentinel.ranks), None)
        return [
            ("●", "wrong"),
            (sentinel.name, "text"),
            (str(sentinel.step), "text"),
            (sentinel.what, "wrong"),
            ("" if first is None else f"rank {first}", f"rank{(first or 0) % 4}"),
        ]

    @on(Grid.Chosen)
    def _chosen(self, event: Grid.Chosen) -> None:
        event.stop()
        assert self.snapshot is not None
        found = self.snapshot.sentinels[event.row]
        if found.step is not None:
            self.post_message(self.Go(step=found.step, tap=self._tap(found), move=True))

    def _tap(self, sentinel: Sentinel) -> int | None:
        taps = self.overview.taps if self.overview else ()
        return taps.index(sentinel.tap) if sentinel.tap in taps else None

    def table(self) -> Table | None:
        """The sentinels."""
        if self.snapshot is None:
            return None
        rows = tuple(
            (s.kind, s.step, s.tap or None, next(iter(s.ranks), None), s.what or None)
            for s in self.snapshot.sentinels
        )
        return Table("sentinels", ("sentinel", "first step", "tap", "rank", "what"), rows)


_COLUMNS = (
    GridColumn("", 1),
    GridColumn("sentinel", 25, flex=1),
    GridColumn("step", 6, right=True),
    GridColumn("first found", 24, flex=2),
    GridColumn("rank", 6, drop=1),
)
