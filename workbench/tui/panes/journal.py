"""Pane 8: commands, stops and notes in order, and the branches as a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from textual import on
from textual.widget import Widget

from lockstep.workbench.export.table import Table
from lockstep.workbench.tui.panes.base import Pane
from lockstep.workbench.tui.panes.titles import JOURNAL, titled
from lockstep.workbench.tui.widgets.grid import Grid, GridCell, GridColumn
from lockstep.workbench.tui.widgets.key_bar import KeyHint
from lockstep.workbench.tui.widgets.text_block import TextBlock, TextLine
from lockstep.workbench.views.journal import Journal, JournalEntry, journal

_ROLES = {"stop": "quiet", "error": "wrong", "finding": "wrong", "note": "strong", "fork": "quiet"}


class JournalPane(Pane):
    """What was done and what happened."""

    NUMBER, TITLE, SHORT = titled(JOURNAL)
    OF_STEP = False
    HELP = """\
The branches as a tree, each with the rules in which it differs and its last tokens; below, every command,
stop and note in order, and what was reported of them; what the cursor is on stands in full under them. The commands are
the script that makes this session again.

  enter  go to that branch, to that event's step, or to the operation where it stopped
"""
    HINTS = (KeyHint("enter", "go there", "enter"), KeyHint("tab", "branches, events", "tab"))
    DEFAULT_CSS = """
    JournalPane > #branches { height: auto; max-height: 40%; min-height: 3; margin-bottom: 1; }
    JournalPane > #events { height: 1fr; }
    JournalPane > #entry { height: auto; max-height: 40%; padding: 1 1 0 1; }
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: Journal | None = None
        self.entries: tuple[JournalEntry, ...] = ()

    def content(self) -> Iterable[Widget]:
        """The tree, the events, and the one under the cursor in full."""
        yield Grid(_BRANCHES, id="branches")
        yield Grid(_EVENTS, id="events")
        yield TextBlock(fold=True, id="entry")

    def question(self) -> tuple[Callable[..., Journal], Sequence[object]]:
        """The whole journal."""
        return journal, ()

    def answer(self, snapshot: Journal) -> None:
        """Show it; a journal that grew is followed if its end was in view."""
        names = {node.line.id: node.line.name for node in snapshot.branches}
        entries = tuple(self.messages.among(snapshot.entries, names)) if self.messages else snapshot.entries
        first, grown = self.snapshot is None, len(entries) > len(self.entries)
        self.snapshot, self.entries = snapshot, entries
        self.filled()
        branches, events = self.query_one("#branches", Grid), self.query_one("#events", Grid)
        at_end = events.cursor >= events.count - 1
        branches.styles.height = len(snapshot.branches) + 1
        branches.show(len(snapshot.branches), self._branch)
        events.show(len(entries), self._event)
        if first or (grown and at_end):
            events.cursor = events.count - 1
        self._report()

    def _report(self) -> None:
        """The event under the cursor, all of it."""
        cursor = self.query_one("#events", Grid).cursor
        lines: list[TextLine] = []
        if cursor < len(self.entries):
            entry = self.entries[cursor]
            role = _ROLES.get(entry.kind, "text")
            lines = [[(line, role)] for line in entry.text.split("\n")]
        self.query_one("#entry", TextBlock).show(lines)

    def _branch(self, index: int) -> list[GridCell]:
        assert self.snapshot is not None
        node = self.snapshot.branches[index]
        line = node.line
        here = line.id == self.where.branch
        stem = "  " * (node.depth - 1) + "└ " if node.depth else ""
        return [
            ("▸" if here else "", "accent"),
            (stem + line.name, "strong" if here else "text"),
            (f"step {line.fork_step}" if node.depth else "", "quiet"),
            (str(line.steps), "quiet"),
            (line.summary("none"), "wrong" if line.rules else "quiet"),
            (node.last_tokens, "quiet"),
        ]

    def _event(self, index: int) -> list[GridCell]:
        entry = self.entries[index]
        here = entry.branch == self.where.branch and entry.step == self.where.step
        role = "accent" if entry.stop and entry.kind == "stop" else _ROLES.get(entry.kind, "text")
        return [
            ("▸" if here else "", "accent"),
            (str(entry.step), "quiet"),
            (entry.kind, "quiet"),
            (entry.text.replace("\n", " ⏎ ").replace("\t", "⇥"), role),
            (entry.branch_name, "quiet"),
        ]

    @on(Grid.Chosen)
    def _chosen(self, event: Grid.Chosen) -> None:
        event.stop()
        assert self.snapshot is not None
        if event.grid.id == "branches":
            self.post_message(self.Go(branch=self.snapshot.branches[event.row].line.id, move=True))
        else:
            entry = self.entries[event.row]
            tap = self.overview.tap(entry.tap) if self.overview is not None else None
            self.post_message(self.Go(branch=entry.branch, step=entry.step, tap=tap, move=True))

    @on(Grid.Pointed)
    def _pointed(self, event: Grid.Pointed) -> None:
        event.stop()
        self._report()

    def table(self) -> Table | None:
        """The events."""
        if self.snapshot is None:
            return None
        rows = tuple((e.id, e.branch_name, e.step, e.kind, e.text) for e in self.entries)
        return Table("journal", ("id", "branch", "step", "kind", "text"), rows)


_BRANCHES = (
    GridColumn("", 1),
    GridColumn("branch", 20, flex=1),
    GridColumn("from", 9, drop=2),
    GridColumn("steps", 6, right=True),
    GridColumn("faults", 22, flex=1),
    GridColumn("last tokens", 14, flex=1, drop=1, tail=True, mark="…"),
)
_EVENTS = (
    GridColumn("", 1),
    GridColumn("step", 6, right=True),
    GridColumn("", 8),
    GridColumn("what", 30, flex=1),
    GridColumn("branch", 16, drop=1),
)
