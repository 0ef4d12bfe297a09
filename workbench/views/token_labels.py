"""Token ids as text: from the session itself, else from the model's tokenizer, else the bare id."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from sessions.text import token_texts
from workbench.views.words import token_label


class Labels:
    """`label(id)`: how a token is shown. Each is looked up once."""

    def __init__(self, meta: Mapping[str, Any]) -> None:
        """The texts that the session holds come first, then the tokenizer beside `meta["model_path"]`."""
        self._known = {token: token_label(text) for token, text in token_texts(meta).items()}
        self._look_up = _tokenizer_at(meta.get("model_path"))

    def label(self, token: int) -> str:
        """What stands for the token; its id in angle quotes where nobody knows its text."""
        if token not in self._known:
            text = self._look_up(token)
            self._known[token] = f"‹{token}›" if text is None else token_label(text)
        return self._known[token]


def _tokenizer_at(path: object) -> Callable[[int], str | None]:
    if not isinstance(path, str) or not path or "\0" in path:
        return _nobody_knows
    directory = Path(path) if Path(path).is_dir() else Path(path).parent
    if not (directory / "tokenizer.json").is_file():
        return _nobody_knows
    # Imported here: the tokenizer's library is for those who have one.
    from workbench.models.tokenizer import find_tokenizer

    try:
        found = find_tokenizer(directory)
    except ConfigError:  # a broken tokenizer costs the token texts, not the report
        return _nobody_knows
    return _nobody_knows if found is None else found.token


def _nobody_knows(token: int) -> str | None:
    return None
