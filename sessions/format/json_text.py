"""JSON columns. Python's dialect: NaN and the infinities are written as such."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

from lockstep.sessions.errors import broken
from lockstep.sessions.records import JSON

#: Containers in containers. Nothing recorded is nested nearly as deep, and what follows them calls itself.
MAX_DEPTH = 64
#: Bytes for each of these characters: a list, an object, an element and its place, a key and its entry, half a string.
_SIZES = {"[": 64, "{": 200, ",": 40, ":": 100, '"': 25}


def json_text(value: JSON) -> str:
    """Compact JSON, escaped to ASCII so that any Python string survives."""
    return json.dumps(value, separators=(",", ":"))


def json_bytes(text: object) -> int:
    """The memory that a JSON text's value takes, at most: counted by its punctuation, before it is parsed."""
    if not isinstance(text, str):
        return 0
    return sum(size * text.count(mark) for mark, size in _SIZES.items()) + 4 * len(text)


def parse_json(text: object, where: str) -> Any:
    """JSON text from the file; `SessionError` on anything else. Ask for `json_bytes` of room before."""
    if not isinstance(text, str):
        raise broken(where, f"expected JSON text, found {type(text).__name__}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise broken(where, f"not JSON ({str(error)[:80]})") from error
    if text.count("[") + text.count("{") > MAX_DEPTH and _deep(value):
        raise broken(where, f"JSON nested more than {MAX_DEPTH} deep")
    return value


def _deep(value: JSON) -> bool:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for one in chain.from_iterable(inner) if isinstance(one, (dict, list))]
        if not level:
            return False
    return True
