"""The home screen: the demo, what was open last, something else to open, what is wrong with the machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.screen import Screen
from textual.worker import get_current_worker

from lockstep.engine.text import printable
from lockstep.workbench.paths import saved_sessions
from lockstep.workbench.tui import settings
from lockstep.workbench.tui.guard import Guarded
from lockstep.workbench.tui.screens.machine import examined, machine_lines
from lockstep.workbench.tui.widgets.command_line import CommandLine
from lockstep.workbench.tui.widgets.grid import Grid, GridCell, GridColumn
from lockstep.workbench.tui.widgets.key_bar import KeyBar, KeyHint
from lockstep.workbench.tui.widgets.text_block import TextBlock, TextLine

# `snapshots.identify` reads sessions and checkpoints: numpy, which the first paint does not wait for. It is
# imported by the threads that need it.
if TYPE_CHECKING:
    from lockstep.workbench.models.identify import Found, Recent

_WORDMARK = (
    "█   █▀█ █▀▀ █▄▀ █▀▀ ▀█▀ █▀▀ █▀█",
    "█▄▄ █▄█ █▄▄ █ █ ▄▄█  █  ██▄ █▀▀",
)


@dataclass(frozen=True, slots=True)
class MenuRow:
    """A line of the menu."""

    name: str
    summary: str
    when: str
    does: Literal["demo", "open", "recent", "heading"]
    path: Path | None = None


class OpenLine(CommandLine):
    """The line for a path."""

    PROMPT = "▸"


class HomeScreen(Guarded, Screen[None]):
    """Bare `lockstep`. Posts `Open` when something is to be opened."""

    CSS_PATH = "../styles/home.tcss"
    # Textual declares it as an instance variable. Below 12 lines the menu is all there is room for.
    VERTICAL_BREAKPOINTS = [(0, "-short"), (12, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "demo", "The demo"),
        Binding("o", "open", "Open"),
        Binding("q", "app.quit", "Quit"),
    ]

    @dataclass
    class Open(Message):
        """Open what was found."""

        found: Found

    def __init__(self, *, examine: bool = True) -> None:
        super().__init__()
        self._examine = examine
        self._rows: list[MenuRow] = []

    def compose(self) -> ComposeResult:
        """The wordmark, the menu, the line to type into, the machine."""
        with Vertical(id="home"):
            yield TextBlock(id="wordmark")
            yield Grid(_COLUMNS, header=False, id="menu")
            yield TextBlock(fold=True, id="machine")
        yield TextBlock(fold=True, id="check")
        yield OpenLine(_completions, id="open")
        yield KeyBar(id="keys")

    def on_mount(self) -> None:
        """Fill in what is known at once; the rest comes."""
        words: list[TextLine] = [[(line, "accent")] for line in _WORDMARK]
        self.query_one("#wordmark", TextBlock).show(
            [*words, [], [("step, inspect and compare tensor-parallel inference", "quiet")]]
        )
        self.query_one(KeyBar).show(
            (
                KeyHint("enter", "open", "enter"),
                KeyHint("d", "demo", "d"),
                KeyHint("o", "open a session or a model", "o"),
            ),
            (KeyHint("^q", "quit", "ctrl+q"),),
        )
        self._lay_out((), ())
        self.query_one("#menu", Grid).focus()
        if self._examine:
            self.call_after_refresh(self._look_at_machine)  # it wants a processor for itself

    def on_screen_resume(self) -> None:
        """Screenshot for the first time, or back from a session: it is the most recent one now."""
        self.call_after_refresh(self._read_recent)

    def _lay_out(self, found: Sequence[Recent], gallery: Sequence[Recent]) -> None:
        rows = [
            MenuRow("demo", "a small model that writes haiku", "d", "demo"),
            MenuRow("open …", "a session or a model's directory", "o", "open"),
        ]
        if found:
            rows += [MenuRow("", "", "", "heading"), MenuRow("recent", "", "", "heading")]
            rows += [MenuRow(r.path.name, r.summary, r.when, "recent", r.path) for r in found]
        if gallery:
            rows += [MenuRow("", "", "", "heading"), MenuRow("gallery: recorded bugs", "", "", "heading")]
            rows += [MenuRow(r.path.stem, r.summary, r.when, "recent", r.path) for r in gallery]
        self._rows = rows
        grid = self.query_one("#menu", Grid)
        grid.styles.height = len(rows)
        grid.show(len(rows), self._cells)

    def _cells(self, index: int) -> list[GridCell]:
        row = self._rows[index]
        if row.does == "heading":
            return [("", "quiet"), (row.name, "quiet"), ("", "quiet"), ("", "quiet")]
        here = index == self.query_one("#menu", Grid).cursor
        name = printable(row.name, 60)
        return [
            ("▸" if here else "", "accent"),
            (name, "strong"),
            (row.summary, "quiet"),
            (row.when, "quiet"),
        ]

    @work(thread=True, exclusive=True, group="recent")
    def _read_recent(self) -> None:
        """Sessions and models are opened to show what they are: off the event loop."""
        from lockstep.workbench.models.identify import gallery, recents

        paths = settings.recent()
        known = {os.path.realpath(path) for path in paths}
        with suppress(OSError):  # a folder that cannot be read has nothing to offer
            paths += [path for path in list(saved_sessions())[:12] if os.path.realpath(path) not in known]
        found = recents(paths[:12])
        self.app.call_from_thread(self._lay_out, found, gallery())

    @work(exclusive=True, group="machine")
    async def _look_at_machine(self) -> None:
        """`lockstep doctor`, in a process of its own: it loads torch, this one must not."""
        shown = self.query_one("#machine", TextBlock)
        shown.show([[("looking at the machine …", "quiet")]])
        shown.show(machine_lines(await examined()))

    @on(Grid.Pointed)
    def _pointed(self, event: Grid.Pointed) -> None:
        event.stop()
        grid = event.grid
        if self._rows[event.row].does == "heading":
            down = event.row > self._before
            step = 1 if down else -1
            row = event.row
            while 0 <= row < len(self._rows) and self._rows[row].does == "heading":
                row += step
            grid.cursor = row
        self._before = grid.cursor
        grid.refresh()
        whole = [[(self._rows[grid.cursor].summary, "quiet")]] if grid.is_cut(grid.cursor, _SUMMARY) else []
        self.query_one("#check", TextBlock).show(whole)

    _before: int = 0

    @on(Grid.Chosen)
    def _chosen(self, event: Grid.Chosen) -> None:
        event.stop()
        row = self._rows[event.row]
        if row.does == "demo":
            self.action_demo()
        elif row.does == "open":
            self.action_open()
        elif row.path is not None:
            self._try(str(row.path))

    def action_demo(self) -> None:
        """The demo model."""
        self._try("demo")

    def action_open(self) -> None:
        """Type what to open."""
        self.query_one(OpenLine).open()
        self._check("")

    @on(OpenLine.Changed)
    def _typed(self, event: OpenLine.Changed) -> None:
        if self.query_one(OpenLine).has_class("-open"):
            self._check(event.value)

    @work(thread=True, exclusive=True, group="check")
    def _check(self, text: str) -> None:
        from lockstep.workbench.models.identify import identify

        asked = get_current_worker()
        found = identify(text)
        if not asked.is_cancelled:  # else more was typed meanwhile, which may be answered already
            self.app.call_from_thread(self._report, found)

    def _report(self, found: Found) -> None:
        mark = {"session": "✓", "model": "✓"}.get(found.kind, "·")
        role = "text" if mark == "✓" else "quiet"
        self.query_one("#check", TextBlock).show([[(f"{mark} ", "accent"), (found.summary, role)]])

    @on(CommandLine.Closed)
    def _line_closed(self) -> None:
        self.query_one("#check", TextBlock).show([])
        self.query_one("#menu", Grid).focus()

    @on(CommandLine.Entered)
    def _entered(self, event: CommandLine.Entered) -> None:
        self._try(event.text)

    @work(thread=True, exclusive=True, group="try")
    def _try(self, text: str) -> None:
        from lockstep.workbench.models.identify import identify

        found = identify(text)
        self.app.call_from_thread(self._take, found)

    def _take(self, found: Found) -> None:
        if found.kind in ("session", "model"):
            self.post_message(self.Open(found))
        else:
            self.query_one("#check", TextBlock).show([[("✗ ", "wrong"), (found.summary, "text")]])

    def on_key_bar_pressed(self, event: KeyBar.Pressed) -> None:
        """A clicked hint is its key."""
        self.app.simulate_key(event.hint.press)


def _completions(text: str) -> list[str]:
    from lockstep.workbench.models.identify import completions

    return completions(text)


_COLUMNS = (
    GridColumn("", 1),
    GridColumn("", 24, flex=2, ends=True),
    GridColumn("", 32, flex=5, spill=True),
    GridColumn("", 14, right=True),
)
_SUMMARY = 2  # the column of what a row is
