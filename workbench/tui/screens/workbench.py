"""The workbench: status, tokens, one pane large, a line that tells, the keys. Live and replay alike."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.reactive import var
from textual.widgets import ContentSwitcher

from sessions.errors import SessionError
from workbench.tui.app import LockstepApp
from workbench.tui.panes import PANES
from workbench.tui.panes.base import Pane
from workbench.tui.reader import Reader
from workbench.tui.screens import commands, keys
from workbench.tui.screens.actions import TITLES, WorkbenchActions
from workbench.tui.screens.status import status_facts
from workbench.tui.screens.tensor import TensorScreen
from workbench.tui.screens.weight import WeightScreen
from workbench.tui.widgets.command_line import CommandLine
from workbench.tui.widgets.divider import Divider
from workbench.tui.widgets.inspector import Inspector
from workbench.tui.widgets.key_bar import KeyBar, KeyHint
from workbench.tui.widgets.model_tree import ModelTree
from workbench.tui.widgets.painted import PaintedWidget
from workbench.tui.widgets.pane_tabs import PaneTabs
from workbench.tui.widgets.status_line import Fact, StatusLine
from workbench.tui.widgets.step_timeline import StepTimeline
from workbench.tui.widgets.token_strip import TokenStrip
from workbench.views.operations import operations
from workbench.views.overview import Present, overview, present
from workbench.views.token_line import TokenLine, TokenLines, compare
from workbench.views.weight_tensor import RankArrays
from workbench.views.where import Where

if TYPE_CHECKING:
    from workbench.debugger.core.registry import Command

#: The most elements of a parameter that the ranks are asked to send.
_SENT = 8_000_000


class Panes(ContentSwitcher, PaintedWidget):
    """The panes, one of them in front."""


class Body(Horizontal, PaintedWidget):
    """The model tree, the panes and the inspector beside each other."""


class WorkbenchScreen(WorkbenchActions):
    """One session on screen. `reader` gives what is shown; without an engine it is a replay."""

    CSS_PATH = "../styles/workbench.tcss"
    # Textual declares both as instance variables.
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-tree"), (160, "-inspector")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall"), (60, "-timeline")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        *keys.bindings(),
        *(Binding(str(i), f"pane({i})", title, show=False) for i, title in enumerate(TITLES, 1)),
    ]

    pane: var[int] = var(1)

    def __init__(self, reader: Reader, *, at: Where | None = None) -> None:
        super().__init__()
        self.reader = reader
        self.present: Present | None = None
        self._at = at
        #: Which branch to hold this one against: None its parent, False none.
        self.comparing: int | bool | None = None
        #: What the debugger can do, as its registry tells it.
        self.registry: list[Command] = []
        self._panes: dict[int, Pane] = {}
        self._making = asyncio.Lock()
        self._lines = TokenLines()
        self.line = TokenLine()

    def compose(self) -> ComposeResult:
        """The frame; panes are made when they are first shown."""
        yield StatusLine(id="status")
        yield StatusLine(id="rules")
        yield TokenStrip(id="tokens")
        yield TokenStrip(id="other-tokens")
        yield Divider(id="under-tokens")
        yield PaneTabs(id="tabs")
        with Body(id="body"):
            yield ModelTree(id="tree")
            yield Panes(id="panes")
            yield Inspector(id="inspector")
        yield StepTimeline(id="timeline")
        yield StatusLine(id="message")
        yield CommandLine(self.complete, id="command")
        yield KeyBar(id="keys")

    def on_mount(self) -> None:
        """Read what the session is, then look at its last step."""
        if isinstance(self.app, LockstepApp):
            self.token_colour = self.app.settings.token_colour
        tabs = self.query_one(PaneTabs)
        tabs.titles, tabs.short_titles = TITLES, tuple(pane.SHORT or pane.TITLE for pane in PANES)
        self.open()

    @work(group="open")
    async def open(self) -> None:
        """Read the session and show its last step."""
        self.overview = await self.reader.ask(overview)
        steps = await self.reader.ask(lambda source: source.session.steps(0))
        self.where = self._at or Where(step=max(0, steps.stop - 1))
        await self.show_pane(self.pane)

    async def show_pane(self, number: int) -> None:
        """Bring a pane to the front."""
        switcher = self.query_one("#panes", ContentSwitcher)
        async with self._making:  # two may ask for the same one
            if number not in self._panes:
                made = PANES[number - 1](self.reader)
                await switcher.add_content(made)
                self._panes[number] = made
        switcher.current = f"pane-{number}"
        self.said = self.story = ()
        self.pane = self.query_one(PaneTabs).active = number
        pane = self.current_pane
        if pane is not None and self.overview is not None:
            pane.line = self.line
            pane.look(self.overview, self.where)
            pane.focus_content()
            own = {hint.press for hint in pane.HINTS}
            hints = [*pane.HINTS, *(hint for hint in _FOOTER if hint.press not in own)]
            able = [replace(hint, why_not=self.why_not(hint.press)) for hint in hints]
            self.query_one(KeyBar).show(able, _PINNED)

    @property
    def current_pane(self) -> Pane | None:
        """The pane in front."""
        return self._panes.get(self.pane)

    def watch_where(self) -> None:
        """Everything follows the place that is looked at."""
        if self.overview is None:
            return
        self.said = ()
        pane = self.current_pane
        if pane is not None:
            pane.look(self.overview, self.where)
        self._refresh_frame()

    @work(exclusive=True, group="frame")
    async def _refresh_frame(self) -> None:
        """Status, tokens, tree and inspector; the tokens of a long session come in as they are read."""
        try:
            self.present = await self.reader.ask(present, self.where)
            assert self.overview is not None
            status, rules = status_facts(self.overview, self.where, self.present, self.state_fact())
            self.query_one("#status", StatusLine).show(*status)
            self.query_one("#rules", StatusLine).show(*rules)
            self.show_message()
            await self._refresh_sides()
            complete = False
            while not complete:
                complete = await self._read_tokens()
        except SessionError as error:
            self.tell(str(error), wrong=True)

    async def _read_tokens(self) -> bool:
        """Read a little more of the tokens and show them; whether that was all."""
        where, other = self.where, self.against
        self.line = await self.reader.ask(self._lines.line, where.branch, where.seq, other)
        if not self.query("#tokens"):
            return True  # the screen was closed meanwhile
        strip, beside = self.query_one("#tokens", TokenStrip), self.query_one("#other-tokens", TokenStrip)
        strip.colour = beside.colour = self.token_colour
        self.set_class(other is not None, "-comparing")
        shown, complete = self.line, self.line.complete
        if other is not None and self.overview is not None:
            theirs = await self.reader.ask(self._lines.line, other, where.seq)
            both = compare(self.line, theirs)
            shown, complete = both.ours, complete and theirs.complete
            beside.tokens, beside.at = both.theirs.tokens, both.theirs.at(where.step)
            beside.title, beside.leader = self.overview.branch(other).name, strip
            beside.refresh()
            first = both.first
            self.difference = () if first is None else (Fact(f"first difference at step {first}", "wrong"),)
        else:
            self.difference = ()
        self.show_message()
        strip.title = self.overview.branch(where.branch).name if other is not None and self.overview else ""
        strip.tokens, strip.at = shown.tokens, shown.at(where.step)
        self.query_one(StepTimeline).show(self.line, where, self.token_colour)
        pane = self.current_pane
        if pane is not None:
            pane.line = self.line
        return complete

    @property
    def against(self) -> int | None:
        """The branch whose tokens stand under the present ones: the one it came from, or the one chosen."""
        if self.overview is None or self.comparing is False:
            return None
        if isinstance(self.comparing, int) and self.comparing != self.where.branch:
            return int(self.comparing)
        return self.overview.branch(self.where.branch).parent

    async def _refresh_sides(self) -> None:
        """The model tree and the inspector, where there is room for them."""
        tree, inspector = self.query_one(ModelTree), self.query_one(Inspector)
        if tree.display or inspector.display:
            found = await self.reader.ask(operations, self.where)
            assert self.overview is not None
            tree.update(self.overview, self.where, found)
            inspector.update(self.overview, self.where, found)

    def on_screen_resume(self) -> None:
        """Back from another screen: the keys go to the pane."""
        pane = self.current_pane
        if pane is not None:
            pane.focus_content()

    @on(PaneTabs.Picked)
    async def _tab(self, event: PaneTabs.Picked) -> None:
        await self.show_pane(event.number)

    @on(TokenStrip.Picked)
    @on(StepTimeline.Picked)
    def _token(self, event: TokenStrip.Picked | StepTimeline.Picked) -> None:
        self.where = replace(self.where, step=event.step)

    @on(ModelTree.Picked)
    def _tree(self, event: ModelTree.Picked) -> None:
        self.where = replace(self.where, tap=event.tap)

    @on(Pane.Go)
    async def _go(self, event: Pane.Go) -> None:
        changes = {key: getattr(event, key) for key in ("step", "tap", "branch", "rank")}
        await self.go(replace(self.where, **{k: v for k, v in changes.items() if v is not None}))

    async def go(self, where: Where) -> None:
        """Look at `where`, at the nearest step that its branch has."""
        steps = await self.reader.ask(lambda source: source.session.steps(where.branch))
        if len(steps):
            where = replace(where, step=min(max(where.step, steps.start), steps.stop - 1))
        self.where = where

    @on(Pane.OpenTensor)
    def _open_tensor(self, event: Pane.OpenTensor) -> None:
        self.open_tensor(event.tap)

    def open_tensor(self, tap: int) -> None:
        """A tap's tensor over the whole screen."""
        assert self.overview is not None
        self.app.push_screen(TensorScreen(self.reader, self.overview, replace(self.where, tap=tap)))

    @on(Pane.OpenWeight)
    async def _open_weight(self, event: Pane.OpenWeight) -> None:
        held = {} if event.size > _SENT else await self.held(event.name)
        assert self.overview is not None
        self.app.push_screen(WeightScreen(self.reader, self.overview, self.where, event.name, held))

    async def held(self, name: str) -> RankArrays:
        """What the running ranks hold of a parameter; nothing where none run."""
        return {}

    @on(Pane.Tell)
    def _pane_tells(self, event: Pane.Tell) -> None:
        self.story = event.facts
        self.show_message()

    @on(KeyBar.Pressed)
    def _pressed(self, event: KeyBar.Pressed) -> None:
        if event.hint.why_not:
            self.tell(f"{event.hint.label}: {event.hint.why_not}")
        else:
            self.app.simulate_key(event.hint.press)

    @on(CommandLine.Closed)
    def _line_closed(self) -> None:
        pane = self.current_pane
        if pane is not None:
            pane.focus_content()

    @on(CommandLine.Entered)
    async def _line_entered(self, event: CommandLine.Entered) -> None:
        await self.run_line(event.text)

    def on_unmount(self) -> None:
        """The session is closed with its screen."""
        self.reader.close()

    def complete(self, line: str) -> list[str]:
        """What the command line may become."""
        return commands.complete(line, self.registry, self.overview, TITLES)


_FOOTER = tuple(KeyHint(key.shown, key.footer, key.key) for key in keys.KEYS if key.footer)
_PINNED = (KeyHint("?", "help", "question_mark"), KeyHint("^q", "quit", "ctrl+q"))
