"""What the keys of the view do: look elsewhere in what was recorded, show it otherwise, take it away as a file."""

from __future__ import annotations

from dataclasses import replace

from textual.actions import SkipAction

from lockstep.workbench.export.table import Table
from lockstep.workbench.tui import keys, screenshots
from lockstep.workbench.tui.navigator import Navigator, clamped, next_rank, same_operation
from lockstep.workbench.tui.panes.titles import digit
from lockstep.workbench.tui.screens.bench import Bench
from lockstep.workbench.tui.screens.exporter import Exporter
from lockstep.workbench.tui.screens.follower import Follower
from lockstep.workbench.tui.screens.help import HelpScreen
from lockstep.workbench.tui.screens.keymap import Keymap
from lockstep.workbench.tui.screens.output import OutputScreen
from lockstep.workbench.tui.screens.token_rows import COLOURS, TokenRows
from lockstep.workbench.tui.screenshots import Screenshot
from lockstep.workbench.tui.settings import SettingChosen
from lockstep.workbench.tui.widgets.command_line import CommandLine
from lockstep.workbench.tui.widgets.message_line import MessageLine


class ViewActions:
    """One method an action of `keys.VIEW_KEYS`."""

    def __init__(
        self, bench: Bench, navigator: Navigator, tokens: TokenRows, keymap: Keymap, follower: Follower
    ) -> None:
        self.bench, self.navigator, self.tokens, self.keymap = bench, navigator, tokens, keymap
        self.follower = follower
        self.exporter = Exporter(bench.screen, self.picture, self.table, bench.report)

    async def pane(self, number: int) -> None:
        """Bring a pane to the front."""
        await self.bench.show_pane(number)

    def scrub(self, by: int) -> None:
        """Look at another step."""
        bench = self.bench
        if bench.present is not None:
            bench.look(clamped(replace(bench.place, step=bench.place.step + by), bench.present.steps))

    async def stop_event(self, by: int) -> None:
        """Look at the stop before, or the next one."""
        where = await self.navigator.stop_beside(self.bench.place, by)
        if where is None:
            self.bench.report("no stop before this one" if by < 0 else "no further stop on this branch")
        else:
            self.bench.look(where)

    async def return_to_stop(self) -> None:
        """Look where the debugger stands."""
        await self.follower.follow(back=True)

    def layer(self, by: int) -> None:
        """Look at the same operation of a neighbouring layer."""
        if self.bench.overview is not None:
            self.bench.look(same_operation(self.bench.overview.taps, self.bench.place, by))

    def sequence(self, by: int) -> None:
        """Choose the next sequence of the batch: what is shown, and what further commands mean."""
        if self.bench.overview is None:
            return
        if self.bench.overview.batch.several:
            seq = self.bench.overview.batch.beside(self.bench.place.seq, by)
            self.bench.look(replace(self.bench.place, seq=seq))
        else:
            self.bench.report("there is only one sequence: a batch has a --prompt for each")

    def rank(self) -> None:
        """One rank, then the next, then all."""
        if self.bench.overview is not None:
            where = next_rank(self.bench.place, self.bench.overview.ranks)
            self.bench.look(where)
            self.bench.report("all ranks" if where.rank is None else f"rank {where.rank} alone")

    def compare(self) -> None:
        """The next other branch under this one, token for token; after the last, none."""
        bench = self.bench
        if bench.overview is None or not self.tokens.compare_next(bench.overview, bench.place):
            bench.report("there is only one branch: x forks another")
        else:
            bench.look(bench.place)

    def token_colour(self) -> None:
        """Colour the tokens by something else, and remember it."""
        colour = self.tokens.next_colour()
        self.bench.look(self.bench.place)
        self.bench.report(f"tokens coloured by {colour}: {COLOURS[colour]}")
        self.bench.screen.post_message(SettingChosen("token_colour", colour))

    def fill(self) -> None:
        """The command that fills the pane."""
        if self.bench.front is not None:
            self.bench.front.action_fill()

    def zoom(self) -> None:
        """The pane alone, and back."""
        self.bench.screen.toggle_class("-zoomed")

    def copy(self) -> None:
        """The pane's data to the clipboard."""
        self.exporter.copy()

    def export(self) -> None:
        """The pane to a file."""
        self.exporter.ask()

    def help(self) -> None:
        """What the pane shows, and every key."""
        pane = self.bench.front
        if pane is not None:
            sheet = HelpScreen(
                f"{digit(pane.NUMBER)}  {pane.TITLE}", pane.HELP, keys.reference(self.keymap.keys)
            )
            self.bench.app.push_screen(sheet)

    def read_message(self) -> None:
        """The message that has no room on screen; where there is none, or a line is typed, enter is for others."""
        message = self.bench.screen.query_one(MessageLine)
        if not message.is_cut or isinstance(self.bench.screen.focused, CommandLine):
            raise SkipAction
        self.open_message()

    def open_message(self) -> None:
        """All of what the message line shows."""
        message = self.bench.screen.query_one(MessageLine)
        message.read = True
        self.bench.app.push_screen(OutputScreen("message", message.full, prose=True))

    def command_line(self, text: str = "") -> None:
        """The colon, with what is typed already."""
        self.bench.screen.query_one(CommandLine).open(text)

    def table(self) -> Table | None:
        """The data of the pane in front."""
        table = None if self.bench.front is None else self.bench.front.table()
        which = self._which()
        return table if table is None or not which else replace(table, title=f"{table.title}, {which}")

    def _which(self) -> str:
        """The sequence, where there are several."""
        overview = self.bench.overview
        return "" if overview is None else overview.batch.label(self.bench.place.seq)

    def picture(self) -> tuple[Screenshot, str] | None:
        """The pane in front as it is drawn, and what a file of it is called."""
        pane, overview, where = self.bench.front, self.bench.overview, self.bench.place
        if pane is None or overview is None:
            return None
        branch = overview.branch(where.branch).name
        which = self._which()
        title = f"{overview.model}, tp {overview.ranks}: {pane.TITLE}, step {where.step}, branch {branch}"
        found = screenshots.taken(
            self.bench.screen, pane.region, f"{title}, {which}" if which else title, self.table()
        )
        stem = f"{pane.stem}-step{where.step}"
        return found, f"{stem}-seq{where.seq}" if which else stem
