"""JSON columns. Python's dialect: NaN and the infinities are written as such."""

from __future__ import annotations

import json
from typing import Any

from sessions.errors import broken
from sessions.records import JSON


def json_text(value: JSON) -> str:
    """Compact JSON, escaped to ASCII so that any Python string survives."""
    return json.dumps(value, separators=(",", ":"))


def parse_json(text: object, where: str) -> Any:
    """JSON text from the file; `SessionError` on anything else."""
    if not isinstance(text, str):
        raise broken(where, f"expected JSON text, found {type(text).__name__}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise broken(where, f"not JSON ({str(error)[:80]})") from error
