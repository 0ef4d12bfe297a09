"""The `:` line: commands with completion and history, over the message line while it is open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.suggester import Suggester

from lockstep.workbench.tui.guard import GuardedWidget
from lockstep.workbench.tui.theme import paint
from lockstep.workbench.tui.widgets.field import Field
from lockstep.workbench.tui.widgets.painted import ground

#: Gives the completions of what has been typed, the best first.
Completer = Callable[[str], Sequence[str]]


class _Suggest(Suggester):
    def __init__(self, complete: Completer) -> None:
        super().__init__(use_cache=False, case_sensitive=True)
        self.complete = complete

    async def get_suggestion(self, value: str) -> str | None:
        """The best completion, shown faintly after the cursor; right or tab takes it."""
        found = self.complete(value) if value else ()
        return found[0] if found else None


class CommandLine(Field, GuardedWidget):
    """Opened with `:`. Posts `Entered`; escape or an empty line closes it."""

    PROMPT = ":"

    DEFAULT_CSS = """
    CommandLine { height: 1; border: none; padding: 0 1 0 2 !important; background: $raised; display: none; }
    CommandLine:focus { border: none; }
    CommandLine.-open { display: block; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Close", show=False),
        Binding("up", "history(-1)", "Earlier", show=False),
        Binding("down", "history(1)", "Later", show=False),
        Binding("tab", "complete", "Complete", show=False, priority=True),
    ]

    @dataclass
    class Entered(Message):
        """A command was entered."""

        text: str

    @dataclass
    class Closed(Message):
        """The line was closed: the keys go back to the pane."""

    def __init__(self, complete: Completer, *, id: str | None = None) -> None:
        super().__init__(id=id, compact=True, suggester=_Suggest(complete), select_on_focus=False)
        self._complete = complete
        self._history: list[str] = []
        self._at = 0
        self._draft = ""

    def open(self, text: str = "") -> None:
        """Show the line, with `text` to begin with."""
        self.value = text
        self.cursor_position = len(text)
        self._at = len(self._history)
        self.add_class("-open")
        self.screen.set_focus(self)  # at once: `focus` would let the keys that are under way go elsewhere

    def action_close(self) -> None:
        """Close without doing anything."""
        self.remove_class("-open")
        self.value = ""
        self.screen.set_focus(None)
        self.post_message(self.Closed())

    async def action_submit(self) -> None:
        """Enter: run what was typed."""
        text = self.value.strip()
        self.action_close()
        if text:
            if not self._history or self._history[-1] != text:
                self._history.append(text)
            self.post_message(self.Entered(text))

    def action_history(self, by: int) -> None:
        """Go through what was entered before; behind the last of it is what was being typed."""
        at = min(max(0, self._at + by), len(self._history))
        if at == self._at:
            return
        if self._at == len(self._history):
            self._draft = self.value
        self._at = at
        self.value = self._history[at] if at < len(self._history) else self._draft
        self.cursor_position = len(self.value)

    def action_complete(self) -> None:
        """Take as much of the completions as they have in common."""
        found = list(self._complete(self.value))
        if found:
            self.value = _common(found)
            self.cursor_position = len(self.value)

    def draw(self, crop: Region) -> list[Strip]:
        """The line with its prompt in the padding."""
        strips = super().draw(crop)
        if crop.x == 0 and crop.y == 0 and strips:
            prompt = Strip([Segment(self.PROMPT, ground(self) + paint(self.app).accent)], 1)
            strips[0] = Strip.join([strips[0].crop(0, 1), prompt, strips[0].crop(2)])
        return strips

    def on_blur(self, event: events.Blur) -> None:
        """A line that lost the keys is closed."""
        self.remove_class("-open")


def _common(texts: Sequence[str]) -> str:
    """The longest beginning that all have."""
    first, last = min(texts), max(texts)
    same = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )
    return first[:same]
