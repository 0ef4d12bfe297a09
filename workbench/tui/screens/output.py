"""What a command printed, where it is more than a line: a sheet over the screen, with copy."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from lockstep.sessions.text import clean
from lockstep.workbench.tui.screens.dialog import Dialog


class OutputScreen(Dialog[None]):
    """Text under the command that gave it; `prose` is broken between words, anything else scrolls sideways. Escape
    closes it, y copies."""

    CSS_PATH = "../styles/help.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "dismiss", "Close"),
        Binding("y", "copy", "Copy"),
    ]

    def __init__(self, command: str, text: str, *, prose: bool = False) -> None:
        super().__init__()
        self._prose = prose
        self._command, self._text = clean(command, limit=80), clean(text, newlines=True)

    def compose(self) -> ComposeResult:
        """The sheet."""
        with VerticalScroll(id="sheet", classes="output prose" if self._prose else "output") as sheet:
            sheet.border_title = Content(self._command)
            sheet.border_subtitle = "esc closes   y copies"
            yield Static(self._text, markup=False)

    def on_mount(self) -> None:
        """The keys scroll."""
        self.query_one("#sheet").focus()

    def action_copy(self) -> None:
        """To the clipboard."""
        self.app.copy_to_clipboard(self._text)
        self.notify("copied")
