"""What the workbench's keys do: the base of its screen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from textual import on

from sessions.text import clean
from workbench.export.table import Table
from workbench.tui import screenshots
from workbench.tui.app import LockstepApp
from workbench.tui.panes import PANES
from workbench.tui.panes.base import Pane
from workbench.tui.screens import commands, keys
from workbench.tui.screens.help import HelpScreen
from workbench.tui.screens.moving import Moving
from workbench.tui.screens.output import OutputScreen
from workbench.tui.screens.status import message_facts
from workbench.tui.screens.toggles import Toggled, TogglesScreen, toggle_rows
from workbench.tui.screenshots import Screenshot
from workbench.tui.settings import TOKEN_COLOURS
from workbench.tui.widgets.command_line import CommandLine
from workbench.tui.widgets.status_line import Fact, StatusLine
from workbench.views.where import Where

if TYPE_CHECKING:
    from workbench.debugger.host.messages import CommandAnswer

#: The panes' titles in the order of their numbers.
TITLES = tuple(pane.TITLE for pane in PANES)

_COLOURS = {
    "probability": "the clearer, the less likely the token was",
    "entropy": "the clearer, the less sure the choice was",
    "divergence": "the clearer, the farther from the golden reference, or from the other branch",
}


class WorkbenchActions(Moving):
    """Panes, help, copy, export, the command line, beside the moves. The screen itself lays out and follows `where`."""

    comparing: int | bool | None
    token_colour = TOKEN_COLOURS[0]
    said: tuple[Fact, ...] = ()  # about the last action; gone with the next place
    story: tuple[Fact, ...] = ()  # what the pane in front has to tell
    difference: tuple[Fact, ...] = ()  # where the branch left the one it is held against

    @property
    def against(self) -> int | None:
        """The branch whose tokens stand under the present ones."""
        raise NotImplementedError

    def watch_where(self) -> None:
        """Show everything at `where` anew."""
        raise NotImplementedError

    @property
    def current_pane(self) -> Pane | None:
        """The pane in front."""
        raise NotImplementedError

    async def show_pane(self, number: int) -> None:
        """Bring a pane to the front."""
        raise NotImplementedError

    async def go(self, where: Where) -> None:
        """Look at `where`, at the nearest step that its branch has."""
        raise NotImplementedError

    def open_tensor(self, tap: int) -> None:
        """A tap's tensor over the whole screen."""
        raise NotImplementedError

    def state_fact(self) -> Fact | None:
        """Whether a model runs behind this; None: the session alone decides what is said."""
        return None

    def tell(self, text: str, *, wrong: bool = False) -> None:
        """Say something in the message line."""
        mark = (Fact("✗", "wrong"),) if wrong else ()
        self.said = (*mark, Fact(text, "text"))
        self.show_message()

    def show_message(self) -> None:
        """The message line: what was said last, else what the pane has to tell, else what the step did."""
        line = self.query_one("#message", StatusLine)
        left, right = message_facts(self.present)
        line.left = self.said or self.story or left
        line.right = self.difference or right

    async def action_pane(self, number: int) -> None:
        """1 … 8."""
        await self.show_pane(number)

    async def action_golden(self) -> None:
        """g: the golden pane; a live session compares first."""
        await self.show_pane(7)

    async def action_breakpoints(self) -> None:
        """B: the breakpoints."""
        self.run_command("info breakpoints")

    async def action_origin(self) -> None:
        """o: walk back to the first operation whose inputs were right."""
        self.run_command("origin")

    def run_command(self, line: str, *, quiet: bool = False) -> None:
        """Have the debugger carry out a line, and follow it to where it goes; `quiet`: what it says is seen in the
        pane."""
        self.run_worker(self.carry_out(line, quiet), group="command")

    async def carry_out(self, line: str, quiet: bool) -> None:
        """What `run_command` sets going."""
        raise NotImplementedError

    def show_reply(self, line: str, reply: CommandAnswer) -> None:
        """A tensor as a screen of its own; one line into the message line; more into a sheet."""
        text, result = reply.text.strip(), reply.result
        taps = self.overview.taps if self.overview is not None else ()
        if result.get("kind") == "tensor" and not result.get("index") and result.get("tap") in taps:
            self.open_tensor(taps.index(str(result["tap"])))
        elif result.get("kind") in ("origin", "golden"):
            # The cause is the last line of what golden says, and the first that anybody wants.
            lines = text.splitlines()[:: -1 if result["kind"] == "golden" else 1]
            wrong = result.get("verdict") != "match"
            self.tell("; ".join(clean(line, limit=200) for line in lines), wrong=wrong)
        elif "\n" in text and result.get("kind") != "stopped":
            self.app.push_screen(OutputScreen(line, text))
        elif text:
            raised = result.get("reason") in ("exception", "data breakpoint", "divergence")
            self.tell(clean(text.splitlines()[0], limit=300), wrong=raised or result.get("holds") is False)

    async def action_break_here(self) -> None:
        """b: a breakpoint at the present operation."""
        if self.overview is not None:
            self.run_command(f"break {self.overview.taps[self.where.tap]}")

    def action_fill(self) -> None:
        """a: the command that fills the pane."""
        pane = self.current_pane
        if pane is not None:
            pane.action_fill()

    @on(Pane.Command)
    def _pane_asks(self, event: Pane.Command) -> None:
        self.run_command(event.line, quiet=True)

    async def action_toggles(self) -> None:
        """x: what can be switched on and off; in a replay it can only be read."""
        model = await self.reader.ask(lambda source: source.meta.model)
        overview = self.overview
        if overview is None:
            return
        rules = dict(overview.branch(self.where.branch).rules)
        rows = toggle_rows(model, overview.ranks, rules)
        self.app.push_screen(TogglesScreen(rows, self.why_no_toggle()), self.toggled)

    def why_not(self, press: str) -> str:
        """Why a key does nothing here; "" where it does."""
        return ""

    def why_no_toggle(self) -> str:
        """Why nothing can be switched; "" when it can."""
        return ""

    def toggled(self, chosen: Toggled | None) -> None:
        """A toggle was chosen."""

    async def action_interrupt(self) -> None:
        """ctrl+c."""
        self.tell("nothing runs; ctrl+q quits")

    async def action_compare(self) -> None:
        """w: the next other branch under this one, token for token; after the last, none."""
        others = [b.id for b in self.overview.branches if b.id != self.where.branch] if self.overview else []
        if not others:
            self.tell("there is only one branch: x forks another")
            return
        now = self.against
        index = others.index(now) + 1 if now in others else 0
        self.comparing = others[index] if index < len(others) else False
        self.watch_where()

    def action_token_colour(self) -> None:
        """T: colour the tokens by something else."""
        now = TOKEN_COLOURS.index(self.token_colour)
        self.token_colour = TOKEN_COLOURS[(now + 1) % len(TOKEN_COLOURS)]
        self.watch_where()
        self.tell(f"tokens coloured by {self.token_colour}: {_COLOURS[self.token_colour]}")
        if isinstance(self.app, LockstepApp):
            self.app.keep("token_colour", self.token_colour)

    def action_zoom(self) -> None:
        """z: the pane alone."""
        self.toggle_class("-zoomed")

    def action_help(self) -> None:
        """?: what the pane shows, and every key."""
        pane = self.current_pane
        if pane is not None:
            self.app.push_screen(HelpScreen(f"{pane.NUMBER}  {pane.TITLE}", pane.HELP, keys.reference()))

    def table(self) -> Table | None:
        """The data of the pane in front."""
        return self.current_pane.table() if self.current_pane else None

    def shown(self) -> tuple[Screenshot, str] | None:
        """The pane in front as it is drawn."""
        pane, overview = self.current_pane, self.overview
        if pane is None or overview is None:
            return None
        branch = overview.branch(self.where.branch)
        title = f"{overview.model}, tp {overview.ranks}: {pane.TITLE}, step {self.where.step}, branch {branch.name}"
        found = screenshots.taken(self, pane.region, title, pane.table())
        return found, f"{pane.TITLE.split()[0].lower()}-step{self.where.step}"

    def action_command(self) -> None:
        """The colon."""
        self.query_one(CommandLine).open()

    def export_pane(self, name: str) -> None:
        """Write the pane to a file whose ending names the format; without a name: ask."""
        found = self.shown()
        if not name.strip() or found is None:
            self.action_export()
        else:
            self.export(found[0], Path(name.strip()))

    async def run_line(self, line: str) -> None:
        """A command of the `:` line: the screen's own, else the debugger's."""
        try:
            act = commands.parse_own(line, TITLES)
        except commands.CommandProblem as problem:
            self.tell(str(problem), wrong=True)
            return
        if act is None:
            self.run_command(line.strip().lstrip(":"))
        elif act.do == "pane":
            await self.show_pane(act.number)
        elif act.do == "export":
            self.export_pane(act.argument)
        elif act.do == "theme":
            self._theme(act.argument)
        elif act.do == "help":
            self.action_help()
        else:
            self.app.exit(0)

    def _theme(self, name: str) -> None:
        found = [theme for theme in sorted(self.app.available_themes) if name in theme]
        if not found:
            self.tell(
                f"no theme {name!r}: there are {', '.join(sorted(self.app.available_themes))}", wrong=True
            )
            return
        self.app.theme = found[0]
