"""Pane 6: what watches over the run: when and where each thing first went wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from textual import on
from textual.widget import Widget

from lockstep.workbench.export.table import Table
from lockstep.workbench.tui.panes.base import Pane
from lockstep.workbench.tui.panes.titles import SENTINELS, titled
from lockstep.workbench.tui.widgets.grid import Grid, GridCell, GridColumn
from lockstep.workbench.tui.widgets.key_bar import KeyHint
from lockstep.workbench.tui.widgets.text_block import TextBlock, TextLine, wrapped
from lockstep.workbench.views.branch_sentinel import BranchSentinel
from lockstep.workbench.views.sentinel_watch import Watch
from lockstep.workbench.words.plain_text import plural


class SentinelsPane(Pane):
    """One row a sentinel."""

    NUMBER, TITLE, SHORT = titled(SENTINELS)
    UNDER_WAY = True
    HELP = """\
What watches over every step of the branch, and where each first found something.

Under the list what the chosen one found, and a row a sentinel with a cell a step: █ where it fired.

NaN and Inf by the first tap that holds any; ranks whose bits differ where they are equal by the layout;
caches whose length is not the position; a tail of tokens that repeats itself; the first tap that left the
golden reference; stops. Enter goes there: the step, and the tap.

  enter  go there          o  walk back to the origin of what is wrong
"""
    HINTS = (KeyHint("enter", "go there", "enter"), KeyHint("o", "origin", "o"))
    DEFAULT_CSS = """
    SentinelsPane > Grid { height: 8; }
    SentinelsPane > #found { height: auto; max-height: 6; padding: 1 1 0 1; }
    SentinelsPane > #histories { height: 1fr; padding: 1 1 0 1; }
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: Watch | None = None
        self._alarmed = False  # whether the cursor has gone to what was raised

    def content(self) -> Iterable[Widget]:
        """The sentinels, what the one under the cursor found in full, and where each fired."""
        yield Grid(_COLUMNS, id="sentinels")
        yield TextBlock(id="found")
        yield TextBlock(id="histories")

    def question(self) -> tuple[Callable[..., Watch], Sequence[object]]:
        """Go on looking."""
        return self.reader.sentinels.watch, ()

    def answer(self, snapshot: Watch) -> None:
        """Show what was found; go on while there are steps that were not looked at."""
        self.snapshot = snapshot
        self.filled()
        grid = self.query_one(Grid)
        grid.show(len(snapshot.sentinels), self._cells)
        if snapshot.scanned >= snapshot.total and not self._alarmed and (raised := _raised(snapshot)):
            self._alarmed = True
            if grid.cursor == 0:  # where nobody has put it
                grid.cursor = raised[0]
        self._draw()
        if snapshot.scanned < snapshot.total:
            self.again()

    def _draw(self) -> None:
        """The histories, and the sentinel under the cursor."""
        snapshot = self.snapshot
        if snapshot is None:
            return
        raised = len(_raised(snapshot))
        done = snapshot.scanned >= snapshot.total
        progress = f"{snapshot.scanned} of {snapshot.total} steps looked at" + ("" if done else " …")
        reported = "nothing wrong so far" if not raised else f"{raised} of {len(snapshot.sentinels)} raised"
        found = self._found(snapshot.sentinels[self.query_one(Grid).cursor])
        room = max(10, self.size.width - _LABEL - 6)
        share = max(1, -(-snapshot.total // room))
        wide = max(1, min(_WIDEST, room // max(1, snapshot.total)))
        high = max(1, min(_HIGHEST, (self.size.height - len(found) - 13) // len(snapshot.sentinels)))
        present = self.where.step // share * wide
        each = "a step" if share == 1 else f"{share} steps"
        lines: list[TextLine] = [
            [(f"{reported}   ", "text"), (f"{progress}   a cell is {each}", "quiet")],
            [("".ljust(_LABEL + present), "quiet"), (f"▼ step {self.where.step}", "accent")],
        ]
        for one in snapshot.sentinels:
            blind = one.step is None and bool(one.looked)
            seen = 0 if blind else snapshot.scanned
            cells = history_cells(snapshot.histories[one.kind].steps, seen, share, wide)
            rows = [[(name.ljust(_LABEL), "quiet"), *cells] for name in (one.name, "")[: max(1, high - 1)]]
            lines += [*rows, []] if high > 1 else rows
        self.query_one("#histories", TextBlock).show(lines)
        self.query_one("#found", TextBlock).show(found)

    def _found(self, sentinel: BranchSentinel) -> list[TextLine]:
        """All that one sentinel found, nothing cut."""
        assert self.snapshot is not None
        if sentinel.step is None:
            return [[(sentinel.name, "strong"), (f"   {sentinel.looked or 'clear'}", "quiet")]]
        steps = self.snapshot.histories[sentinel.kind].steps
        fired = plural(sum(steps), "step")
        head: TextLine = [
            (sentinel.name, "strong"),
            (f"   first at step {sentinel.step}, at {fired} in all", "text"),
        ]
        return [head, *wrapped(sentinel.what, "wrong", self.size.width - 4)]

    def on_resize(self) -> None:
        """The histories are as wide as the pane."""
        self._draw()

    @on(Grid.Pointed)
    def _pointed(self, event: Grid.Pointed) -> None:
        event.stop()
        self._draw()

    def _cells(self, index: int) -> list[GridCell]:
        assert self.snapshot is not None
        sentinel = self.snapshot.sentinels[index]
        if sentinel.step is None:
            return [
                ("·", "faint"),
                (sentinel.name, "quiet"),
                ("", "quiet"),
                (sentinel.looked or "clear", "quiet"),
                ("", "quiet"),
            ]
        ranks = self.snapshot.histories[sentinel.kind].ranks or sentinel.ranks
        return [
            ("●", "wrong"),
            (sentinel.name, "text"),
            (str(sentinel.step), "text"),
            (sentinel.what, "wrong"),
            (" ".join(map(str, ranks)), f"rank{ranks[0] % 4}" if ranks else "quiet"),
        ]

    @on(Grid.Chosen)
    def _chosen(self, event: Grid.Chosen) -> None:
        event.stop()
        assert self.snapshot is not None
        found = self.snapshot.sentinels[event.row]
        if found.step is not None:
            tap = self.overview.tap(found.tap) if self.overview is not None else None
            self.post_message(self.Go(step=found.step, tap=tap, move=True))

    def table(self) -> Table | None:
        """The sentinels."""
        if self.snapshot is None:
            return None
        rows = tuple(
            (s.kind, s.step, s.tap or None, " ".join(map(str, s.ranks)) or None, s.what or None)
            for s in self.snapshot.sentinels
        )
        return Table("sentinels", ("sentinel", "first step", "tap", "ranks", "what"), rows)


def _raised(snapshot: Watch | None) -> list[int]:
    """The rows of the sentinels that have fired."""
    return [] if snapshot is None else [i for i, one in enumerate(snapshot.sentinels) if one.step is not None]


def history_cells(steps: bytes, scanned: int, share: int, wide: int = 1) -> list[GridCell]:
    """`wide` cells for each `share` steps: `█` where it fired at one of them, `·` where not, blank where nobody
    looked."""
    cells = []
    for first in range(0, len(steps), share):
        fired = 1 in steps[first : first + share]
        cells.append(("█" * max(1, wide - 1) if fired else "·" if first < scanned else " ").ljust(wide))
    text = "".join(cells)
    return [(run, "wrong" if run[0] == "█" else "faint") for run in _RUNS.findall(text)]


#: The width of the names beside the histories.
_LABEL = 22
#: The most cells of a step, and the most lines of a sentinel, the empty one under it included.
_WIDEST, _HIGHEST = 6, 3
_RUNS = re.compile(r"█+|·+| +")
_COLUMNS = (
    GridColumn("", 1),
    GridColumn("sentinel", 21),
    GridColumn("step", 6, right=True),
    GridColumn("first found", 24, flex=1),
    GridColumn("ranks", 7, drop=1),
)
