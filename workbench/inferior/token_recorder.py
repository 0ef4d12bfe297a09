"""Records the text of every token of a session, so that a replay needs no tokenizer."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.sessions import SessionWriter
from lockstep.sessions.records import StepRecord

#: Texts a page of the session's meta holds; only the last page is ever written again.
_PAGE = 512


class TokenRecorder:
    """Collects the ids of every pass (fed, emitted, and the best candidates) and writes their texts."""

    def __init__(self, token: Callable[[int], str | None]) -> None:
        self._token = token
        self._known: set[int] = set()
        self._page: dict[int, str] = {}
        self._number = 0
        self._unwritten: dict[int, dict[int, str]] = {}  # pages by number

    def note(self, record: StepRecord) -> None:
        """Take the ids of a pass."""
        for reported in record.sequences:
            emitted = () if reported.emitted is None else (reported.emitted,)
            for token in (*reported.ids, *emitted, *reported.topk_ids):
                if token not in self._known:
                    self._add(token)

    def flush(self, writer: SessionWriter) -> None:
        """Write the pages that have grown. `SessionWriteError`: what is not written is kept for the next time."""
        for number in list(self._unwritten):
            writer.token_texts(number, self._unwritten[number])
            del self._unwritten[number]

    def _add(self, token: int) -> None:
        self._known.add(token)
        text = self._token(token)
        if text is None:
            return
        if len(self._page) == _PAGE:
            self._page, self._number = {}, self._number + 1
        self._page[token] = text
        self._unwritten[self._number] = self._page
