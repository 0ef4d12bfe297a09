"""A field for one line of text, whatever is pasted into it."""

from __future__ import annotations

import re

from textual import events
from textual.widgets import Input

#: Between the lines of a paste most terminals send what the enter key sends.
_LINE_END = re.compile(r"\r\n?|\n")


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
        """Put it in place of what is selected: the lines side by side, what a terminal would obey made visible."""
        # Imported here: it takes numpy along, which the first paint does not wait for.
        from sessions.text import clean

        lines = _LINE_END.split(text[: 16 * self.LIMIT].replace("\t", " "))
        safe = clean(" ".join(lines))
        if len(safe) > self.LIMIT:
            self.notify(f"what was pasted is cut to its first {self.LIMIT} characters", severity="warning")
        self.replace(safe[: self.LIMIT], *self.selection)
