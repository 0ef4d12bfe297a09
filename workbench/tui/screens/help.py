"""Help over the present screen: what the pane shows, and every key with what it does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from lockstep.workbench.tui.screens.dialog import Dialog
from lockstep.workbench.tui.widgets.text_block import TextBlock, TextLine

#: Cells of a key, and between two columns.
_KEY, _APART = 9, 3


class HelpScreen(Dialog[None]):
    """A sheet of text and keys. Any of escape, q, ? closes it."""

    CSS_PATH = "../styles/help.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark", "dismiss", "Close")]

    def __init__(self, title: str, text: str, keys: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._about, self._text, self._keys = title, text, keys

    def compose(self) -> ComposeResult:
        """The text of the pane, then the keys in two columns where there is room."""
        with VerticalScroll(id="sheet") as sheet:
            sheet.border_title = self._about
            sheet.border_subtitle = "esc closes"
            yield Static(reflowed(self._text), markup=False, id="about")
            yield TextBlock(id="all-keys")

    def on_mount(self) -> None:
        """Lay the keys out once it is known how wide the sheet is."""
        self.query_one("#sheet").focus()
        self.call_after_refresh(self._lay_out)

    def on_resize(self) -> None:
        """Two columns where there is room for them now."""
        self.call_after_refresh(self._lay_out)

    def _lay_out(self) -> None:
        half = -(-len(self._keys) // 2)
        columns = [self._keys[:half], self._keys[half:]]
        sheet = self.query_one("#sheet")
        if sum(map(_width, columns)) + _APART > sheet.scrollable_content_region.width:  # no word is cut
            columns = [self._keys]
        lines: list[TextLine] = []
        for row in zip_longest(*columns, fillvalue=("", "")):
            line: list[tuple[str, str]] = []
            for column, (key, what) in zip(columns, row, strict=True):
                line += [
                    (f"{key:>{_KEY}}  ", "strong"),
                    (what.ljust(_width(column) - _KEY - 2 + _APART), "quiet"),
                ]
            lines.append(line)
        self.query_one(TextBlock).show(lines)


def _width(column: Sequence[tuple[str, str]]) -> int:
    """Cells of a column of keys and what they do."""
    return _KEY + 2 + max(len(what) for _, what in column)


def reflowed(text: str) -> str:
    """Paragraphs as one line each, to be wrapped to the sheet; lines that begin with a space stay lines."""
    out: list[str] = []
    for line in text.splitlines():
        if out and out[-1] and line and not line.startswith(" ") and not out[-1].startswith(" "):
            out[-1] += f" {line}"
        else:
            out.append(line)
    return "\n".join(out)
