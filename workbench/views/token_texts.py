"""What turns ids into text; and the texts that a session keeps itself, so that a replay needs no tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from sessions import SessionWriter
from sessions.records import StepRecord
from sessions.text import token_texts, token_texts_key

#: Texts a page of the session's meta holds; only the last page is ever written again.
_PAGE = 512


class Tokenizer(Protocol):
    """What turns ids into text."""

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of some ids."""

    def token(self, token: int) -> str | None:
        """The text of one token."""


class RecordedTokens:
    """A tokenizer that knows the tokens a session speaks of."""

    def __init__(self, texts: Mapping[int, str], special: Collection[int]) -> None:
        self._texts, self._special = texts, frozenset(special)

    @classmethod
    def of(cls, meta: Mapping[str, object]) -> RecordedTokens | None:
        """From a session's meta; None where it holds no texts."""
        texts, model = token_texts(meta), meta.get("model")
        ends = model.get("eos_ids") if isinstance(model, dict) else None
        return cls(texts, ends if isinstance(ends, list) else ()) if texts else None

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of some ids; a token of which the session holds no text is shown by its number."""
        return "".join(self._texts.get(i, f"<{i}>") for i in ids if special or i not in self._special)

    def token(self, token: int) -> str | None:
        """The text of one token."""
        return self._texts.get(token)


class TokenTextRecorder:
    """Collects the ids of every pass (fed, emitted, and the best candidates) and writes their texts."""

    def __init__(self, writer: SessionWriter, token: Callable[[int], str | None]) -> None:
        self._writer, self._token = writer, token
        self._known: set[int] = set()
        self._page: dict[str, str] = {}
        self._number = 0
        self._unwritten = False

    def note(self, record: StepRecord) -> None:
        """Take the ids of a pass and write the texts that are new."""
        for told in record.sequences:
            emitted = () if told.emitted is None else (told.emitted,)
            for token in (*told.ids, *emitted, *told.topk_ids):
                if token not in self._known:
                    self._add(token)
        self._flush()

    def _flush(self) -> None:
        if self._unwritten:
            self._writer.set_meta(token_texts_key(self._number), self._page)
            self._unwritten = False

    def _add(self, token: int) -> None:
        self._known.add(token)
        text = self._token(token)
        if text is None:
            return
        if len(self._page) == _PAGE:
            self._flush()
            self._page, self._number = {}, self._number + 1
        self._page[str(token)] = text
        self._unwritten = True
