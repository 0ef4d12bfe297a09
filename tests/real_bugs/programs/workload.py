"""What every program here asks of its engine: made before any bug was put back, and the same for all of them.

A request that is longer than every window, original context and chunk of the models, with shorter ones beside it that
end earlier; then a second batch, shorter, whose first request is the beginning of an earlier one.
"""

from __future__ import annotations

import json
import os
from typing import Any

_LONG = [3 + (7 * at * at + 11 * at) % 121 for at in range(45)]
#: Batches of (token ids, how many to generate).
BATCHES: list[list[tuple[list[int], int]]] = [
    [(_LONG[5:17], 2), (_LONG, 7), (_LONG[20:27], 4)],
    [(_LONG[:14], 5)],
]


def options() -> dict[str, Any]:
    """What a row of the table sets beside the defaults, for the run with the bug and the one without."""
    found: dict[str, Any] = json.loads(os.environ.get("REAL_BUG_OPTIONS", "{}"))
    return found


def planted() -> str:
    """The bug to put back; empty: none."""
    return os.environ.get("REAL_BUG", "")
