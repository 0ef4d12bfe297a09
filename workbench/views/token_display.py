"""Token ids as text: from the session itself, else from the model's tokenizer, else the bare id."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError
from sessions.text import token_texts
from workbench.demo import MODEL_DIR
from workbench.tui.tokens import visible

if TYPE_CHECKING:
    from workbench.models.tokenizer import Tokenizer


class TokenTexts:
    """`label(id)`: the visible form of a token. Each id is looked up once."""

    def __init__(self, known: Mapping[int, str], look_up: Callable[[int], str | None] | None = None) -> None:
        self._known = dict(known)
        self._look_up = look_up
        self._labels: dict[int, str] = {}

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> TokenTexts:
        """From the texts that the session holds, and the tokenizer beside the model for ids not there."""
        path = model_path(meta)
        return cls(token_texts(meta), None if path is None else _tokenizer_at(path))

    def text(self, token: int) -> str | None:
        """The raw text of a token, None if nobody knows it."""
        if token not in self._known and self._look_up is not None:
            found = self._look_up(token)
            if found is not None:
                self._known[token] = found
        return self._known.get(token)

    def label(self, token: int) -> str:
        """What a cell shows for the token."""
        known = self._labels.get(token)
        if known is None:
            text = self.text(token)
            known = self._labels[token] = f"‹{token}›" if text is None else visible(text)
        return known


def model_path(meta: Mapping[str, Any]) -> Path | None:
    """The checkpoint that a session names, if it is on this machine. "demo" is the embedded model."""
    named = meta.get("model_path")
    if not isinstance(named, str) or not named:
        return None
    path = MODEL_DIR if named == "demo" else Path(named)
    return path if path.exists() else None


def _tokenizer_at(model: Path) -> Callable[[int], str | None]:
    """A look-up in the tokenizer beside a checkpoint, read when first asked."""
    directory = model if model.is_dir() else model.parent
    loaded: list[Tokenizer | None] = []

    def look_up(token: int) -> str | None:
        if not loaded:
            # The Rust library alone: light, and only paid for by a session that does not name its tokens.
            from workbench.models.tokenizer import find_tokenizer

            try:
                loaded.append(find_tokenizer(directory))
            except EngineError:
                loaded.append(None)  # the ids are shown
        return loaded[0].token(token) if loaded[0] is not None else None

    return look_up
