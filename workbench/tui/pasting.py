"""What a terminal sends of a paste, held together."""

from __future__ import annotations

import re
from collections.abc import Iterator

from textual._xterm_parser import XTermParser
from textual.events import Paste
from textual.message import Message

#: What a terminal puts around a paste (xterm's mode 2004).
_BEGIN, _END = "\x1b[200~", "\x1b[201~"
#: What is kept of a paste.
_MOST = 1 << 16
#: Between the lines of a paste most terminals send what the enter key sends.
_LINE_END = re.compile(r"\r\n?|\n")


def one_line(text: str) -> str:
    """A paste for a field: its lines side by side, what a terminal would obey made visible."""
    # Imported here: it takes numpy along, which the first paint does not wait for.
    from lockstep.sessions.text import clean

    return clean(" ".join(_LINE_END.split(text.replace("\t", " "))))


class PasteParser(XTermParser):
    """Takes pastes out of what the terminal sends, before Textual's parser reads the rest.

    That one takes an escape sequence within a paste for a key, and then every character after it: 32 kB were as many
    key presses, which held the screens up for a minute, and any text could press keys.
    """

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
        self._pasted: str | None = None  # None outside of a paste
        self._last = ""  # of it, where the end may have begun

    def feed(self, data: str) -> Iterator[Message]:
        """The messages in a piece of input; "" ends it."""
        if not data:
            yield from super().feed(data)
        while data:
            if self._pasted is None:
                keys, begin, data = data.partition(_BEGIN)
                if keys:
                    yield from super().feed(keys)
                if begin:
                    self._pasted, self._last = "", ""
                continue
            text, end, data = (self._last + data).partition(_END)
            if not end:
                text, self._last = text[: 1 - len(_END)], text[1 - len(_END) :]
            self._pasted = (self._pasted + text)[:_MOST] if len(self._pasted) < _MOST else self._pasted
            if end:
                pasted, self._pasted = self._pasted, None
                yield Paste(pasted)
