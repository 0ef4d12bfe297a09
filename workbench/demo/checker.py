"""Is an answer right? The task of the demo model, checked without a tokenizer or torch."""

from __future__ import annotations

import re

#: The shortest and the longest line, in words, that still reads as a line of a haiku.
_MIN_WORDS, _MAX_WORDS = 2, 10

_NONCE = re.compile(r"\bword ([a-z]+)\b|\b(\d+)\b")


def haiku_has_nonce(text: str, nonce: str) -> bool:
    """True when `text` is three lines of words and `nonce` stands in it as a whole word.

    The nonce must be whole: `41` inside `412` is a copying error, not a success.
    """
    lines = text.strip().split("\n")
    if len(lines) != 3:
        return False
    if any(not _MIN_WORDS <= len(line.split()) <= _MAX_WORDS for line in lines):
        return False
    return re.search(rf"(?<!\w){re.escape(nonce)}(?!\w)", text) is not None


def nonce_in_question(question: str) -> str | None:
    """The nonce that a question asks for: the word after "word", or a number; None if neither."""
    found = _NONCE.search(question)
    return (found[1] or found[2]) if found else None
