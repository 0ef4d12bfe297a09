"""What the panes have in common: ask the reader, show the answer, name what fills an empty pane."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.events import DescendantBlur
from textual.message import Message
from textual.reactive import var
from textual.widget import Widget
from textual.widgets import Input, Static

from lockstep.sessions.errors import SessionError
from lockstep.sessions.text import clean
from lockstep.workbench.export.table import Table
from lockstep.workbench.tui.drivers.port import CommandStage
from lockstep.workbench.tui.marks import Marks
from lockstep.workbench.tui.message_log import MessageLog
from lockstep.workbench.tui.reader import Reader
from lockstep.workbench.tui.widgets.key_bar import KeyHint
from lockstep.workbench.tui.widgets.painted import PaintedWidget
from lockstep.workbench.tui.widgets.status_line import Fact
from lockstep.workbench.tui.widgets.text_block import TextBlock
from lockstep.workbench.views.overview import Overview
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.token_line import TokenLine
from lockstep.workbench.views.where import Where


class Pane(PaintedWidget):
    """One pane. It looks where the screen asks it to, and asks for nothing while it is hidden."""

    DEFAULT_CSS = """
    Pane { height: 1fr; width: 1fr; layout: vertical; }
    Pane > .empty { height: 1fr; content-align: center middle; text-align: center; color: $quiet; display: none; }
    Pane.-empty > .empty { display: block; }
    Pane > .older { height: 1; padding: 0 1; color: $accent; background: $raised; display: none; }
    Pane.-older > .older { display: block; }
    Pane.-empty > .content { display: none; }
    """

    NUMBER: ClassVar[int] = 0
    TITLE: ClassVar[str] = ""
    SHORT: ClassVar[str] = ""  # the title where it is narrow
    HELP: ClassVar[str] = ""
    HINTS: ClassVar[tuple[KeyHint, ...]] = ()
    #: Of these, the keys that act where it is empty, and those that have a model run.
    EMPTY_KEYS: ClassVar[frozenset[str]] = frozenset()
    MODEL_KEYS: ClassVar[frozenset[str]] = frozenset({"a"})
    #: Whether it shows a step that is under way; else it shows the step before, and states that.
    UNDER_WAY: ClassVar[bool] = False
    #: Whether it shows a step: a branch without any has nothing for it.
    OF_STEP: ClassVar[bool] = True
    #: Whether it shows one sequence: a step that did not feed the chosen one has nothing for it.
    OF_SEQUENCE: ClassVar[bool] = False

    overview: var[Overview | None] = var(None)  # no `reactive`: what stands around is not drawn anew
    where: var[Where] = var(Where())
    line: var[TokenLine | None] = var(None)
    marks: var[Marks] = var(Marks())

    @dataclass
    class Go(Message):
        """Look somewhere else; with `move` the debugger goes there. What is None stays."""

        step: int | None = None
        tap: int | None = None
        branch: int | None = None
        rank: int | None = None
        move: bool = False

        def applied_to(self, where: Where) -> Where:
            """The place to look at from `where`."""
            changes = {"step": self.step, "tap": self.tap, "branch": self.branch, "rank": self.rank}
            return replace(where, **{name: value for name, value in changes.items() if value is not None})

    @dataclass
    class OpenTensor(Message):
        """Show a tap's tensor."""

        tap: int

    @dataclass
    class ToggleBreak(Message):
        """Put a breakpoint at a tap, or take away the one that is there."""

        tap: int

    @dataclass
    class OpenWeight(Message):
        """Show a parameter's values. `size`: how many it has."""

        name: str
        size: int

    @dataclass
    class Missing(Message):
        """The tensor at a place was not captured: have it brought, if that can be done without asking."""

        where: Where

    class Filled(Message):
        """There is something to show where nothing was, or the other way round: other keys act."""

    class Back(Message):
        """Go back to the pane before."""

    @dataclass
    class Command(Message):
        """Have the debugger carry out a command; a replay states why it cannot."""

        line: str

    @dataclass
    class Report(Message):
        """Show something in the message line."""

        facts: tuple[Fact, ...]

    def __init__(self, reader: Reader) -> None:
        super().__init__(id=f"pane-{self.NUMBER}")
        self.reader = reader
        self.live = True  # whether there is a model to run
        self.messages: MessageLog | None = None  # what the message line has shown
        self._empty = Static("", classes="empty", markup=False)
        self._older = Static("", classes="older", markup=False)

    def content(self) -> Iterable[Widget]:
        """The widgets of the pane."""
        raise NotImplementedError

    def question(self) -> tuple[Callable[..., Any], Sequence[object]]:
        """What to ask the reader: a pure function of the source, and its arguments after `where`."""
        raise NotImplementedError

    def answer(self, snapshot: Any) -> None:
        """Show the answer."""
        raise NotImplementedError

    @property
    def hints(self) -> list[KeyHint]:
        """The keys that act here now."""
        acts = set(self.EMPTY_KEYS) if self.has_class("-empty") else {hint.press for hint in self.HINTS}
        acts -= set() if self.live else self.MODEL_KEYS
        return [hint for hint in self.HINTS if hint.press in acts]

    @property
    def of_sequence(self) -> bool:
        """Whether it shows one sequence now."""
        return self.OF_SEQUENCE

    @property
    def stem(self) -> str:
        """What a file of it is called, without the step and the ending."""
        return self.TITLE.split()[0].lower()

    def lacks(self) -> str:
        """The debugger's command that fills what is empty here; "" where there is none."""
        return ""

    def keeps(self) -> str:
        """How another run of our engine would keep what a replay lacks; "" where that is not known."""
        command, *globs = self.lacks().split() or [""]
        if command != "capture" or self.overview is None or self.overview.engine:
            return ""
        return " ".join([*(f"--capture '{glob}'" for glob in globs), " keeps it in a run"])

    def action_back(self) -> None:
        """Back to where the pane was opened from; most are opened from nowhere."""

    def action_fill(self) -> None:
        """Have the debugger bring what is missing here."""
        line = self.lacks()
        if line:
            self.post_message(self.Command(line))
        else:
            self.notify("Nothing is missing here that a command could bring.")

    def progress(self, stages: Sequence[CommandStage]) -> None:
        """What the command that runs has done so far; few panes have a word on it."""

    def table(self) -> Table | None:
        """What is shown, as data; None while there is nothing."""
        return None

    def compose(self) -> ComposeResult:
        """Whose step it is where that is an older one; the content; what stands in its place while there is none."""
        yield self._older
        for widget in self.content():
            widget.add_class("content")
            yield widget
        yield self._empty

    def look(self, overview: Overview, where: Where, marks: Marks) -> None:
        """Show what is at `where`; the newest call wins."""
        self.overview, self.where, self.marks = overview, where, marks
        self._look()

    def label(self, position: int) -> str:
        """The token at a position of the sequence, as far as it has been read."""
        return self.line.label(position) if self.line is not None else ""

    def again(self) -> None:
        """Ask anew: a setting of the pane changed."""
        if self.overview is not None:
            self._look()

    @work(exclusive=True, group="look")
    async def _look(self) -> None:
        function, arguments = self.question()
        where = self.where
        try:
            if not self.UNDER_WAY:
                where = await self.reader.ask(SessionSource.passed, where)
            if self.OF_STEP and where.step < 0:
                self.shows(self.where.step)
                self.empty("Step 0 is under way, and has not come here yet.", "n  goes to its end")
                return
            self.shows(where.step if self.OF_STEP else self.where.step)
            if self.OF_STEP and self.overview is not None:
                steps = await self.reader.ask(SessionSource.reach, where.branch)
                if not steps:
                    name = self.overview.branch(where.branch).name
                    self.empty(f"Branch {name} has no steps yet.", "n  runs one")
                    return
            if self.of_sequence and (why := await self.reader.ask(SessionSource.why_absent, where)):
                self.empty(f"{why[0].upper()}{why[1:]}.\n\n( )  choose another sequence")
                return
            self.answer(await self.reader.ask(function, where, *arguments))
        except SessionError as error:
            self.empty(clean(str(error), newlines=True, limit=2000))
        except Exception as error:
            # What was shown before is of another place. The outer net reports on the rest.
            self.empty(f"This cannot be shown: {clean(f'{type(error).__name__}: {error}', limit=2000)}")
            raise

    def shows(self, step: int) -> None:
        """Show of which step the content is, where that is not the present one."""
        older = step != self.where.step
        self.set_class(older, "-older")
        _write(self._older, f"of step {step}: step {self.where.step} has not come here yet" if older else "")

    def empty(self, text: str, fills: str = "", replayed: str = "") -> None:
        """Show `text` instead of the content: what is missing, and the key of the live run that `fills` the pane, or
        what does in a replay (`replayed`)."""
        if fills and not self.live:
            fills = replayed or "This is a replay: what was not recorded cannot be had here."
            fills += f"\n{keeps}" if not replayed and (keeps := self.keeps()) else ""
        _write(self._empty, f"{text}\n\n{fills}".rstrip())
        was_filled, self.can_focus = not self.has_class("-empty"), True
        self.add_class("-empty")
        if was_filled:  # what is empty has keys all the same: those of the pane, and the way back
            self._focus_again()

    def filled(self) -> None:
        """Show the content, and let it have the keys that it could not take while it was not there."""
        was_empty, self.can_focus = self.has_class("-empty"), False
        self.remove_class("-empty")
        if was_empty:
            self._focus_again()

    def _focus_again(self) -> None:
        """Other keys act now; they go to what takes the place of what had them."""
        self.post_message(self.Filled())
        self.call_after_refresh(self._focus_if_free)

    def _focus_if_free(self) -> None:
        """Give the keys to the content, unless a line is typed meanwhile, or something else is in front."""
        if self.display and self.screen.is_current:
            focused = self.screen.focused
            in_a_pane = focused is None or any(isinstance(one, Pane) for one in focused.ancestors_with_self)
            if in_a_pane and not isinstance(focused, Input):
                self.focus_content()

    @on(DescendantBlur)
    def _keep_keys(self) -> None:
        """What had the keys may be shown no longer, of a map that the present step has not."""
        self.call_after_refresh(self._focus_if_lost)

    def _focus_if_lost(self) -> None:
        if self.is_attached and self.screen.focused is None:
            self._focus_if_free()

    def focus_content(self) -> None:
        """Give the keys to the pane's main widget: a table or a map before mere lines."""
        able = [widget for widget in self.query("*") if widget.can_focus and widget.display]
        able.sort(key=lambda widget: isinstance(widget, TextBlock))
        if self.has_class("-empty"):
            able = [self]
        self.screen.set_focus(able[0] if able else None)  # not to what was closed, over an empty pane


def _write(line: Static, text: str) -> None:
    """Show a text. `update` lays the screen out anew even where nothing has changed."""
    if line.content != text:
        line.update(text)
