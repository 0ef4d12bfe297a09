"""Text to token ids and back, with a checkpoint's own tokenizer and chat template. Loads no torch, transformers or
`tokenizers`: what a stranger wrote runs in processes of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from lockstep.engine.checkpoint.files import gguf_file
from lockstep.engine.errors import CheckpointError, RequestError
from lockstep.workbench.models.chat_template import render
from lockstep.workbench.models.tokenizer_messages import FILES, TOKENIZER, VOCABULARY, UnsupportedTokenizer
from lockstep.workbench.models.tokenizer_process import TokenizerProcess

#: Tokenizers count ids in 32 bits.
_IDS = 1 << 32
#: Tokens held back while they end inside a character, which has at most four bytes; more are broken bytes.
_LONGEST = 8


class TokenizerBackend(Protocol):
    """What a tokenizer is asked; CheckpointError where it fails. `special`: with special tokens."""

    def encode(self, text: str, *, special: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, special: bool) -> str: ...

    def piece(self, token: int) -> str | None: ...


class Tokenizer:
    """A checkpoint's tokenizer. `special` are its special tokens by the names that templates use."""

    def __init__(
        self, backend: TokenizerBackend, special: Mapping[str, str], template: str | None, where: Path
    ) -> None:
        self.special, self.template, self.where = dict(special), template, where
        self._backend = backend

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; special tokens in the text count as such, and a leading one (BOS) is added
        where the tokenizer does."""
        return self._backend.encode(text, special=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to where the answer begins. The template writes every special token
        itself, so none is added."""
        return self._backend.encode(self.render(messages), special=False)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as the chat template writes it. RequestError where there is none or it refuses the
        conversation, CheckpointError where it fails."""
        if self.template is None:
            raise RequestError(f"{self.where} has no chat template: give the prompt without --chat")
        return render(self.template, messages, self.special, self.where)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of some ids; special tokens only where `special`. Ids beyond the vocabulary have none."""
        return self._backend.decode([one for one in ids if 0 <= one < _IDS], special=special)

    def token(self, token: int) -> str | None:
        """The text of one token, special or not; None for an id that the tokenizer does not know or fails at: it is
        shown as its number then."""
        try:
            return self._backend.piece(token) if 0 <= token < _IDS else None
        except CheckpointError:
            return None


class TextStream:
    """Tokens in, text out as soon as it is final: a character split over tokens comes when it is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # what was last let go: decoders look at what precedes
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes, often its own."""
        self._pending.append(token)
        text = self._text()
        incomplete = text.endswith("\ufffd") and len(self._pending) < _LONGEST
        return "" if incomplete else self._release(text)

    def finish(self) -> str:
        """What is left at the end; half a character is U+FFFD."""
        return self._release(self._text())

    def _text(self) -> str:
        return self._tokenizer.decode(self._context + self._pending)

    def _release(self, text: str) -> str:
        new = text[len(self._tokenizer.decode(self._context)) :]
        if new:
            self._context = self._pending
        else:
            self._context = self._context + self._pending
        self._pending = []
        return new


#: Those in use, by checkpoint and state of its files: each is a process.
_IN_USE: WeakValueDictionary[object, Tokenizer] = WeakValueDictionary()
_FINDING = threading.Lock()


def find_tokenizer(checkpoint: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint: in its directory or GGUF file, or beside its file. None where there is none, or
    only one of a kind that is not known here.

    ConfigError or CheckpointError for one that cannot be read, or takes more time or memory than any.
    """
    try:
        return _open(checkpoint)
    except UnsupportedTokenizer:
        return None


def need_tokenizer(tokenizer: Tokenizer | None, where: Path) -> Tokenizer:
    """`tokenizer`, or a RequestError that states why there is none and how to go on without."""
    if tokenizer is not None:
        return tokenizer
    reason = f"{where} has no tokenizer"
    try:
        _open(where)
    except UnsupportedTokenizer as error:
        reason = str(error)
    raise RequestError(f"{reason}: give token ids with --ids 1,2,3 instead of text")


def _open(checkpoint: Path) -> Tokenizer | None:
    with _FINDING:
        if (key := _state(checkpoint)) is None:
            return None
        if (known := _IN_USE.get(key)) is not None:
            return known
        process = TokenizerProcess(checkpoint)
        if (found := process.found) is None:
            return None
        made = Tokenizer(process, found.special, found.template, Path(os.fsdecode(found.where)))
        _IN_USE[key] = made
        return made


def _state(checkpoint: Path) -> object:
    """What changes with the files that a tokenizer may be read from; None where none of them is there."""
    directory = checkpoint if checkpoint.is_dir() else checkpoint.parent
    own = gguf_file(checkpoint)
    files = [*([] if own is None else [own]), *(directory / name for name in FILES)]
    states = [os.stat(file) for file in files if file.exists()]
    if own is None and not any((directory / name).exists() for name in (TOKENIZER, VOCABULARY)):
        return None
    return os.fspath(checkpoint.absolute()), *((one.st_ino, one.st_mtime_ns, one.st_size) for one in states)
