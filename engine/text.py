"""Foreign strings (tensor names, config values, paths in a file) made safe to print. Torch-free."""

from __future__ import annotations

import unicodedata


def printable(value: object, limit: int = 120) -> str:
    """`value` as text, control, format and surrogate characters replaced by `?`, at most `limit` long."""
    text = value if isinstance(value, str) else str(value)
    safe = "".join("?" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in text[: limit + 1])
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"
