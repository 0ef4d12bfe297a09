"""Token ids as text: the text that the session recorded, else the tokenizer of the model, else the id.

A token's text comes from a foreign file. `token_label` is the only form in which it is shown.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

from lockstep.engine.errors import CheckpointError, EngineError
from lockstep.sessions.meta import SessionMeta
from lockstep.workbench.demo import MODEL_DIR

if TYPE_CHECKING:
    from lockstep.workbench.models.tokenizer import Tokenizer

_NAMED = {"\n": "⏎", "\t": "⇥", "\r": "␍", "\x7f": "␡", "\u00a0": "⍽", "\ufeff": "‹bom›"}


class TokenTexts:
    """The texts of a session's tokens. `tokenizer` is called when an id is asked for that `recorded` lacks.

    `special` ids (end of sequence) are left out of `joined`.
    """

    def __init__(
        self,
        recorded: Mapping[int, str],
        tokenizer: Callable[[], Tokenizer | None] = lambda: None,
        special: Collection[int] = (),
    ) -> None:
        self._texts: dict[int, str | None] = dict(recorded)
        self._recorded, self._special = bool(recorded), frozenset(special)
        self._find_tokenizer = tokenizer
        self._labels: dict[int, str] = {}

    @classmethod
    def of(cls, meta: SessionMeta) -> TokenTexts:
        """The texts that a session's meta holds, and the tokenizer beside its checkpoint, read when first needed."""
        checkpoint = checkpoint_path(meta)
        return cls(meta.token_texts, lambda: _tokenizer_at(checkpoint), meta.model.eos_ids)

    def text(self, token: int) -> str | None:
        """The raw text of a token, special or not; None if it is unknown."""
        if token not in self._texts:
            tokenizer = self._find_tokenizer()
            self._texts[token] = None if tokenizer is None else tokenizer.token(token)
        return self._texts[token]

    def label(self, token: int) -> str:
        """The token as it is shown; its id in angle quotes if its text is unknown."""
        known = self._labels.get(token)
        if known is None:
            text = self.text(token)
            known = self._labels[token] = f"‹{token}›" if text is None else token_label(text)
        return known

    def joined(self, ids: Sequence[int]) -> str | None:
        """The raw text of several tokens without special ones; None if there are neither texts nor a tokenizer.

        A tokenizer goes first here: it joins characters that are split over tokens.
        """
        tokenizer = self._find_tokenizer()
        if tokenizer is not None:
            with suppress(CheckpointError):  # it fails at them: they are shown one by one
                return tokenizer.decode(ids)
        if not self._recorded:
            return None
        return "".join(self._texts.get(i) or f"<{i}>" for i in ids if i not in self._special)


@lru_cache(maxsize=65536)
def token_label(text: str, limit: int = 24) -> str:
    """One token's text in at most `limit` terminal cells: nothing invisible, nothing that a terminal obeys.

    Control and format characters get a visible form, a lone combining mark a circle to stand on, special tokens angle
    quotes. A leading space stays a space (it is how words begin); other blanks are dots.
    """
    if not text:
        return "∅"
    if len(text) > 2 and text[0] == "<" and text[-1] == ">":
        text = f"‹{text[1:-1]}›"
    shown = "".join(map(_visible_character, text[: 4 * limit]))
    body = shown.rstrip(" ")
    shown = body + "·" * (len(shown) - len(body))
    if unicodedata.combining(shown[0]):
        shown = "◌" + shown
    if cell_len(shown) > limit:
        shown = set_cell_size(shown, limit - 1).rstrip(" ") + "…"
    return shown if cell_len(shown) else "◌" + shown


def _visible_character(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)  # the "symbol for" block: ␛ for escape
    category = unicodedata.category(character)
    if category in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"‹{code:x}›"
    return "·" if category == "Zs" and character != " " else character


def checkpoint_path(meta: SessionMeta) -> Path | None:
    """The checkpoint that a session names, if it is on this machine. "demo" is the embedded model."""
    named = meta.model.path
    if not named:
        return None
    path = MODEL_DIR if named == "demo" else Path(named)
    return path if os.path.exists(path) else None  # Path.exists raises for a name that is too long


@lru_cache(maxsize=4)
def _tokenizer_at(checkpoint: Path | None) -> Tokenizer | None:
    """The tokenizer beside a checkpoint; None where there is none that can be read."""
    if checkpoint is None:
        return None
    # Imported here: it is paid for only by a session that does not name its tokens.
    from lockstep.workbench.models.tokenizer import find_tokenizer

    try:
        return find_tokenizer(checkpoint)
    except EngineError:
        return None  # the session's own texts are still shown
