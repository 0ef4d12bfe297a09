"""What the message line has shown of late: it stands in the Journal too."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lockstep.sessions.text import clean
from lockstep.workbench.tui.reader import Reader
from lockstep.workbench.views.journal import JournalEntry
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where

#: The messages that are kept, and the characters of each.
_MOST, _LONGEST = 500, 20_000


@dataclass(frozen=True, slots=True)
class LoggedMessage:
    """A message. `after`: the newest event of the session when it was reported."""

    after: int
    where: Where
    text: str
    kind: str  # "report", "finding" (something wrong with the model), "error"


class MessageLog:
    """The newest messages in order; the same one again is not kept twice."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._messages: deque[LoggedMessage] = deque(maxlen=_MOST)
        self._newest = 0

    async def add(self, where: Where, text: str, kind: str) -> None:
        """Keep a message that was reported at a place."""
        stated = LoggedMessage(0, where, clean(text, newlines=True, limit=_LONGEST), kind)
        self._newest = await self.reader.ask(_newest, self._newest)
        if not self._messages or self._messages[-1].text != stated.text:
            self._messages.append(replace(stated, after=self._newest))

    def among(self, entries: tuple[JournalEntry, ...], names: dict[int, str]) -> Iterator[JournalEntry]:
        """The events with the messages where they were reported. `names` of the branches."""
        waiting = deque(self._messages)
        for entry in entries:
            while waiting and waiting[0].after < entry.id:
                yield _entry(waiting.popleft(), names)
            yield entry
        yield from (_entry(one, names) for one in waiting)


def _entry(one: LoggedMessage, names: dict[int, str]) -> JournalEntry:
    at = one.where
    return JournalEntry(0, at.branch, names.get(at.branch, ""), at.step, one.kind, one.text)


def _newest(source: SessionSource, known: int) -> int:
    return max((event.id for event in source.session.events(after=known)), default=known)
