"""JSON for other programs: always valid, whatever the numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any


def jsonable(value: object) -> Any:
    """`value` as plain JSON values. NaN and the infinities, which JSON does not have, become the strings "nan",
    "inf" and "-inf": null would pass for "not measured", and compares as less than any threshold in jq."""
    if is_dataclass(value) and not isinstance(value, type):
        return jsonable(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): jsonable(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [jsonable(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Path):
        return str(value)
    return value


def dumps(value: object, *, indent: int | None = None) -> str:
    """`value` as JSON text, in printable ASCII: a terminal finds nothing in it to obey."""
    return json.dumps(jsonable(value), indent=indent, allow_nan=False).replace("\x7f", "\\u007f")
