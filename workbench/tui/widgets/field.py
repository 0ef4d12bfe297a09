"""A field for one line of text, whatever is pasted into it."""

from __future__ import annotations

from textual import events
from textual.widgets import Input

from lockstep.workbench.tui.pasting import one_line


class Field(Input):
    """Textual's field would take a paste of any length, and of several lines the first alone."""

    #: As many characters as a paste may bring; also the longest path that Linux takes.
    LIMIT = 4096

    def on_paste(self, event: events.Paste) -> None:
        """The terminal's paste."""
        event.stop()
        event.prevent_default()
        self._take(event.text)

    def action_paste(self) -> None:
        """What was copied on the screens."""
        self._take(self.app.clipboard)

    def _take(self, text: str) -> None:
        """Put it in place of what is selected."""
        safe = one_line(text[: 16 * self.LIMIT])
        if len(safe) > self.LIMIT:
            self.notify(f"what was pasted is cut to its first {self.LIMIT} characters", severity="warning")
        self.replace(safe[: self.LIMIT], *self.selection)
