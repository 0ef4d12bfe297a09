"""Conditions evaluated where the tap is (torch-free): a JSON tree, a dictionary of numbers, an answer.

The debugger parses the user's text; what travels to a rank is this tree. A node is a number, or
`["name", NAME]`, `["not", a]`, `["-", a]`, or `[operator, a, b]`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.engine.errors import RequestError

_BINARY: dict[str, Callable[[float, float], float]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne, "+": operator.add, "-": operator.sub, "*": operator.mul,
}  # fmt: skip


def evaluate(node: Any, names: Mapping[str, float], depth: int = 0) -> float:
    """The value of a condition; true is 1. Unknown names and malformed trees raise RequestError."""
    if depth > 32:
        raise RequestError("condition is nested too deeply (32 levels at most)")
    if isinstance(node, bool | int | float):
        return float(node)
    if not isinstance(node, list | tuple) or not node or not isinstance(node[0], str):
        raise RequestError(f"malformed condition: {node!r}")
    head, *args = node
    if head == "name" and len(args) == 1:
        if args[0] not in names:
            raise RequestError(f"unknown name {args[0]!r} in a condition: use {', '.join(sorted(names))}")
        return float(names[args[0]])
    values = [evaluate(arg, names, depth + 1) for arg in args]
    if head == "not" and len(values) == 1:
        return float(not values[0])
    if head == "-" and len(values) == 1:
        return -values[0]
    if head in ("and", "or") and len(values) == 2:
        return float(all(values) if head == "and" else any(values))
    if head == "/" and len(values) == 2:
        return values[0] / values[1] if values[1] else math.nan
    if head in _BINARY and len(values) == 2:
        return float(_BINARY[head](*values))
    raise RequestError(f"malformed condition: {node!r}")
