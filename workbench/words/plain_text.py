"""Foreign values as short, safe text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from lockstep.sessions.text import clean


def one_line(value: object, limit: int = 120) -> str:
    """Any JSON value of a session as one line of text."""
    if isinstance(value, str):
        return clean(value, limit=limit)
    return clean(json.dumps(value, ensure_ascii=False, default=str)[: 8 * limit], limit=limit)


def mapping(value: object) -> dict[str, object]:
    """`value` if it is a JSON object, else an empty one: a stranger's session may hold anything anywhere."""
    return value if isinstance(value, dict) else {}


def figure_of(data: object, key: str) -> float | None:
    """A number of a JSON object; NaN and the infinities may be written as words. None: not there."""
    value = mapping(data).get(key)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def finite(value: float | None) -> bool:
    """Whether it is a number that can be drawn."""
    return value is not None and math.isfinite(value)


def plural(count: int, noun: str) -> str:
    """`1 step`, `2 steps`, `10 000 steps`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}".replace(",", " ")


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)
