"""Text for people: foreign strings made safe to print, sizes in bytes, suggestions. Torch-free."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def printable(value: object, limit: int = 120) -> str:
    """`value` as text, control, format and surrogate characters replaced by `?`, at most `limit` long."""
    text = value if isinstance(value, str) else str(value)
    safe = "".join("?" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in text[: limit + 1])
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"


def first_line(what: str, error: Exception) -> str:
    """`what` failed, and the first line of why."""
    return f"{what}: {type(error).__name__}: {error}".splitlines()[0]


def bytes_text(size: float) -> str:
    """A size in bytes: 812 B, 3.4 MiB."""
    unit, *larger = _UNITS
    while size >= 1024 and larger:
        size /= 1024
        unit, *larger = larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def did_you_mean(
    word: str, known: Iterable[str], otherwise: str, *, most: int = 3, cutoff: float = 0.6
) -> str:
    """The advice for a name that does not exist: up to `most` of the nearest known ones, else `otherwise`."""
    close = difflib.get_close_matches(word, list(known), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(close)}?" if close else otherwise
