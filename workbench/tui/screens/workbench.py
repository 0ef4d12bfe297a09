"""The workbench: status, tokens, one pane large, a line of messages, the keys. Live and replay alike."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.reactive import var
from textual.screen import Screen

from lockstep.sessions.errors import SessionError
from lockstep.workbench.tui import keys
from lockstep.workbench.tui.drivers.port import CommandFailed, Driver, Progressed, Reported
from lockstep.workbench.tui.guard import Guarded
from lockstep.workbench.tui.marks import Marks
from lockstep.workbench.tui.message_log import MessageLog
from lockstep.workbench.tui.navigator import Navigator
from lockstep.workbench.tui.panes.base import Pane
from lockstep.workbench.tui.panes.switcher import PaneSwitcher
from lockstep.workbench.tui.panes.titles import SHORT_TITLES, TITLES
from lockstep.workbench.tui.reader import Reader
from lockstep.workbench.tui.screens.command_dispatcher import CommandDispatcher
from lockstep.workbench.tui.screens.follower import Follower
from lockstep.workbench.tui.screens.frame import Frame
from lockstep.workbench.tui.screens.keymap import Keymap
from lockstep.workbench.tui.screens.runner import CommandRunner
from lockstep.workbench.tui.screens.view_actions import ViewActions
from lockstep.workbench.tui.settings import DEFAULTS, UserSettings
from lockstep.workbench.tui.widgets.command_line import CommandLine
from lockstep.workbench.tui.widgets.key_bar import KeyBar
from lockstep.workbench.tui.widgets.model_tree import ModelTree
from lockstep.workbench.tui.widgets.pane_tabs import PaneTabs
from lockstep.workbench.tui.widgets.status_line import Fact
from lockstep.workbench.tui.widgets.token_strip import TokenStrip
from lockstep.workbench.views.overview import Overview, Present, overview
from lockstep.workbench.views.where import Where


class WorkbenchScreen(Guarded, Screen[None]):
    """One session on screen. `reader` answers what is shown of it, `driver` carries out commands on it."""

    CSS_PATH = "../styles/workbench.tcss"
    AUTO_FOCUS = ""  # nothing, rather than a field that is not shown: the keys go to the pane in front
    # Textual declares both as instance variables.
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-narrow"), (100, "-tree"), (160, "-inspector"), (180, "-broad"),
    ]  # fmt: skip
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall"), (60, "-timeline")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "view('read_message')", "The whole message", show=False, priority=True),
    ]

    pane: var[int] = var(1)
    where: var[Where] = var(Where())

    def __init__(self, reader: Reader, driver: Driver, chosen: UserSettings = DEFAULTS) -> None:
        super().__init__()
        self.reader, self.driver = reader, driver
        self.overview: Overview | None = None
        self.frame = Frame(reader, chosen.token_colour)
        self.messages = MessageLog(reader)
        self.panes = PaneSwitcher(reader, self.messages, driver, id="panes")
        self.navigator = Navigator(reader)
        self.key_keeper = self.keymap = Keymap(self, driver, chosen.keys)
        self.follower = Follower(self, reader, driver, self.navigator)
        self.runner = CommandRunner(driver, lambda: self.where, self.follower.follow, self.report)
        self.actions = ViewActions(self, self.navigator, self.frame.tokens, self.keymap, self.follower)
        self.commands = CommandDispatcher(self, reader, self.runner, self.keymap, self.actions)
        self._unresponsive = False
        self._before = 1  # the pane from which the tensor was opened
        driver.listener = self

    def compose(self) -> ComposeResult:
        """The frame; panes are made when they are first shown."""
        line = CommandLine(self.commands.complete, id="command")
        yield from self.frame.compose(self.panes, line)

    def on_mount(self) -> None:
        """Read what the session is, then look at its last step."""
        tabs = self.frame.tabs
        tabs.titles, tabs.short_titles = TITLES, SHORT_TITLES
        self._show_keys()
        self.set_interval(0.1, self._tick)
        self.open()

    @work(group="open")
    async def open(self) -> None:
        """Show the session's last step, learn the commands, carry out the first ones."""
        self.overview = await self.reader.ask(overview)
        last = await self.navigator.last()
        if last is not None:
            self.look(last)
            await self.show_some_pane()
        if lost := self.overview.lost:
            self.report(lost, True)
        try:
            await self.keymap.load()
        except CommandFailed as error:
            self.report(str(error), True)
            return
        self._show_keys()
        self.panes.load()
        for line in self.driver.opening:
            await self.runner.run(line)

    # --- what is looked at ---------------------------------------------------------------------------

    @property
    def place(self) -> Where:
        """What is looked at."""
        return self.where

    @property
    def present(self) -> Present | None:
        """The step that is looked at, as it was read last."""
        return self.frame.present

    @property
    def front(self) -> Pane | None:
        """The pane in front."""
        return self.panes.front

    def look(self, where: Where) -> None:
        """Look at a place; at the same one again, where more is known of it now."""
        if where == self.where:
            self.watch_where()
        self.where = where

    def watch_where(self) -> None:
        """Everything follows the place."""
        if self.overview is None:
            return
        self.frame.message.forget()
        if self.front is not None:
            self.front.look(self.overview, self.where, self._marks())
        self._show_frame(self.overview)

    def on_resize(self) -> None:
        """What a larger window shows beside the pane was not read before."""
        if self.overview is not None:
            self.call_after_refresh(self._show_frame, self.overview)

    @work(exclusive=True, group="frame")
    async def _show_frame(self, overview: Overview) -> None:
        try:
            async for line in self.frame.show(overview, self.where, self._state(), self._marks()):
                if self.front is not None:
                    self.front.line = line
        except SessionError as error:
            self.report(str(error), True)

    async def show_some_pane(self) -> None:
        """Bring the first pane to the front, unless the user has asked for another one, maybe a moment ago."""
        await self.show_pane(self.panes.wanted or self.pane)

    async def show_pane(self, number: int) -> None:
        """Bring a pane to the front."""
        self._before = self.pane if self.pane != number else self._before
        pane = await self.panes.bring(number)
        self.frame.message.forget_story()
        self.pane = self.frame.tabs.active = number
        if self.overview is not None:
            pane.line = self.frame.tokens.line
            pane.look(self.overview, self.where, self._marks())
            pane.focus_content()
            self._show_keys()

    @on(Pane.Filled)
    def _show_keys(self) -> None:
        self.frame.tabs.keys = self.keymap.pane_keys
        if self.front is not None:
            shown = self.keymap.hints(self.front.hints)
            self.query_one(KeyBar).show(shown, list(map(self.keymap.moved, keys.PINNED)))

    def report(self, text: str, wrong: bool = False, keep: bool = True, finding: bool = False) -> None:
        """Show a text in the message line, and in the Journal if it is to be kept: as an error where it is `wrong`,
        unless it is a `finding` about the model."""
        self.frame.message.report(text, wrong)
        kind = "report" if not wrong else "finding" if finding else "error"
        if keep:
            self.run_worker(self.messages.add(self.where, text, kind), group="messages")

    # --- the debugger --------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """Long work shows that it goes on. However fast the engine runs, it is looked at only this often."""
        if not self.frame.status.is_attached:
            return  # a timer outlives the screen's widgets by a moment when the app quits
        if self.follower.behind:
            await self.follower.follow()
        why, before = self.driver.unresponsive, self._unresponsive
        if why or before or self.runner.busy:
            self.frame.show_state(self._state())
            reported = why or ("the host answers again" if before else self.runner.progress)
            self.report(reported, bool(why), keep=bool(why) is not before)
        self._unresponsive = bool(why)
        self.panes.show_progress()

    def _state(self) -> Fact | None:
        return self.driver.state(self.where, self.runner.busy)

    def _marks(self) -> Marks:
        return Marks.of(self.driver.at, self.where)

    @on(Progressed)
    def _progressed(self) -> None:
        self.follower.behind = True

    @on(Reported)
    def _on_report(self, event: Reported) -> None:
        self.frame.show_state(self._state())
        self.report(event.text, event.wrong)

    def on_unmount(self) -> None:
        """The debugger and the session are closed with the screen."""
        self.driver.close()
        self.reader.close()

    # --- keys ----------------------------------------------------------------------------------------

    async def action_view(self, name: str, *arguments: int | str) -> None:
        """A key of the view."""
        done = getattr(self.actions, name)(*arguments)
        if inspect.isawaitable(done):
            await done

    async def action_command_key(self, name: str) -> None:
        """The key of a command."""
        await self.commands.key(name)

    def palette(self) -> Iterator[SystemCommand]:
        """The panes and the keys, for the palette."""
        return self.keymap.palette()

    @on(KeyBar.Pressed)
    def _pressed(self, event: KeyBar.Pressed) -> None:
        hint = event.hint
        self.report(f"{hint.label}: {hint.why_not}") if hint.why_not else self.app.simulate_key(hint.press)

    # --- messages of the widgets ---------------------------------------------------------------------

    @on(PaneTabs.Picked)
    async def _tab(self, event: PaneTabs.Picked) -> None:
        await self.show_pane(event.number)

    @on(TokenStrip.Picked)
    def _token(self, event: TokenStrip.Picked) -> None:
        seq = self.where.seq if event.seq is None else event.seq
        self.where = replace(self.where, seq=seq, step=self.where.step if event.step is None else event.step)

    @on(ModelTree.Picked)
    def _tree(self, event: ModelTree.Picked) -> None:
        self.where = replace(self.where, tap=event.tap)

    @on(Pane.Go)
    async def _go(self, event: Pane.Go) -> None:
        there = event.applied_to(self.where)
        move = event.move and self.driver.live and not self.driver.why_idle
        named = move and event.step is not None  # the debugger gets there, recorded or not
        if not named and (event.step, event.branch) != (None, None):
            there = replace(there, step=(await self.navigator.nearest(there)).step)
        if move:
            self.commands.go(there, inside=event.tap is not None)
        else:
            self.where = there

    @on(Pane.ToggleBreak)
    @on(ModelTree.ToggleBreak)
    def _break(self, event: Pane.ToggleBreak | ModelTree.ToggleBreak) -> None:
        self.commands.toggle_break(event.tap)

    @on(Pane.Command)
    def _pane_asks(self, event: Pane.Command) -> None:
        self.commands.run(event.line, quiet=True)

    @on(Pane.Report)
    def _pane_reports(self, event: Pane.Report) -> None:
        self.frame.message.show_story(event.facts)

    @on(Pane.OpenTensor)
    def _open_tensor(self, event: Pane.OpenTensor) -> None:
        if self.overview is not None and event.tap < len(self.overview.taps):
            self.run_worker(self.commands.opener.open_tap(event.tap), group="tensor", exclusive=True)

    @on(Pane.OpenWeight)
    async def _open_weight(self, event: Pane.OpenWeight) -> None:
        await self.commands.opener.open_weight(event.name, event.size)

    @on(Pane.Missing)
    def _missing(self, event: Pane.Missing) -> None:
        if line := self.commands.opener.how_to_bring(event.where):
            self.commands.run(line, quiet=True)

    @on(Pane.Back)
    async def _back(self) -> None:
        await self.show_pane(self._before)

    @on(CommandLine.Entered)
    async def _line_entered(self, event: CommandLine.Entered) -> None:
        await self.commands.enter(event.text)

    @on(CommandLine.Closed)
    def on_screen_resume(self) -> None:
        """Back from another screen, or from the line: the keys go to the pane, unless the line is open again."""
        typed = isinstance(self.focused, CommandLine)
        if self.overview is not None and self.front is not None and not typed:
            self.front.focus_content()
