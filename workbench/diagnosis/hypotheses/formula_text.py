"""Formulas as a reader writes them: `x / sqrt(mean(x²) + eps) * w`."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.engine.graph.formula import Node
from lockstep.workbench.diagnosis.hypotheses.edits import is_number

#: Binary signs with how tightly they bind.
_SIGNS = {"add": ("+", 1), "subtract": ("-", 1), "multiply": ("*", 2), "divide": ("/", 2)}
#: How functions are written; those that bind as loosely as a sign with its strength.
_FORMS: Mapping[str, tuple[str, int]] = {
    "root": ("sqrt({0})", 9),
    "square": ("{0}²", 9),
    "squared": ("{0}²", 9),
    "size": ("|{0}|", 9),
    "inverse": ("1 / {0}", 2),
    "inverted": ("1 / {0}", 2),
    "negative": ("-{0}", 2),
    "plus_one": ("1 + {0}", 1),
    "minus_one": ("{0} - 1", 1),
    "one_minus": ("1 - {0}", 1),
    "centred": ("{0} - mean({0})", 1),
    "scaled": ("{1} * {0}", 2),
    "plus": ("{0} + {2} * {1}", 1),
    "clamped": ("clamp({0}, {1}, {2})", 9),
    "clamped_above": ("min({0}, {1})", 9),
    "clamped_below": ("max({0}, {1})", 9),
    "clamped_within": ("clamp({0}, ±{1})", 9),
    "relu2": ("relu({0})²", 9),
    "silu_of_the_negated": ("silu(-{0})", 9),
    "total": ("sum({0})", 9),
    "swish": ("{0} * sigmoid({1} * {0})", 2),
}
#: Functions whose argument is in parentheses already.
_CLOSED = ("sqrt({0})", "|{0}|", "sum({0})", "silu(-{0})")


def formula_text(node: Node, names: Mapping[str, str] | None = None) -> str:
    """The formula; `names` are what leaves are called."""
    return _written(node, names or {})[0]


def _written(node: Node, names: Mapping[str, str]) -> tuple[str, int]:
    """The text, and how tightly its loosest sign binds (9: as one thing)."""
    if not node.args:
        return (f"{float(node.name):g}" if is_number(node) else names.get(node.name, node.name)), 9
    if node.name == "identity":
        return _written(node.args[0], names)
    parts = [_written(one, names) for one in node.args]
    if node.name in _SIGNS:
        sign, strength = _SIGNS[node.name]
        left, right = parts
        tight = strength + (node.name in ("subtract", "divide"))
        return f"{_held(left, strength)} {sign} {_held(right, tight)}", strength
    if node.name in _FORMS:
        form, strength = _FORMS[node.name]
        words = [text if form in _CLOSED else _held(one, 3) for one in parts for text in (one[0],)]
        return form.format(*words), strength
    return f"{node.name}({', '.join(text for text, _ in parts)})", 9


def _held(part: tuple[str, int], strength: int) -> str:
    """In parentheses where it binds more loosely."""
    text, bound = part
    return text if bound >= strength else f"({text})"
