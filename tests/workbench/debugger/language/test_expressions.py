"""The grammar: parsed by hand, held against Python's own arithmetic, and against what is no expression."""

from __future__ import annotations

import ast
import math
import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.taps.predicate import evaluate as evaluate_at_tap
from lockstep.workbench.debugger.errors import CommandError
from lockstep.workbench.debugger.language import expressions
from lockstep.workbench.debugger.stops.predicates import evaluate as evaluate_recorded

NAMES = {"nan": 0.0, "absmax": 51.5, "step": 12.0, "rank": 1.0, "min": -3.0}
_PYTHON = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


def python_value(node: ast.AST) -> float:
    """Python's reading of the same text: an independent parser with the same precedences."""
    if isinstance(node, ast.Expression):
        return python_value(node.body)
    if isinstance(node, ast.Constant):
        return float(node.value)
    if isinstance(node, ast.Name):
        return NAMES[node.id]
    if isinstance(node, ast.UnaryOp):
        value = python_value(node.operand)
        return float(not value) if isinstance(node.op, ast.Not) else -value
    if isinstance(node, ast.BoolOp):
        values = [python_value(one) for one in node.values]
        return float(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.BinOp):
        left, right = python_value(node.left), python_value(node.right)
        if isinstance(node.op, ast.Div):
            return left / right if right else math.nan
        return float(_PYTHON[type(node.op)](left, right))
    assert isinstance(node, ast.Compare)
    return float(_PYTHON[type(node.ops[0])](python_value(node.left), python_value(node.comparators[0])))


def _join(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    arithmetic = st.tuples(children, st.sampled_from(["+", "-", "*", "/"]), children)
    logic = st.tuples(children, st.sampled_from(["and", "or"]), children)
    bracketed = children.map(lambda text: f"({text})")
    compared = st.tuples(bracketed, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), bracketed)
    signed = bracketed.map(lambda text: f"-{text}")
    negated = children.map(lambda text: f"not ({text})")
    joined = st.one_of(arithmetic, logic, compared).map(" ".join)
    return st.one_of(
        joined.map(lambda text: f"({text})"), joined, bracketed, signed, negated.map(lambda t: f"({t})")
    )


expression_texts = st.recursive(
    st.one_of(st.integers(0, 99).map(str), st.sampled_from(sorted(NAMES))), _join, max_leaves=8
)


@given(expression_texts)
def test_means_what_python_means(text: str) -> None:
    try:
        node = ast.parse(text, mode="eval")
    except SyntaxError:
        return  # `1 + not 2`
    if any(isinstance(n, ast.Compare) and len(n.ops) > 1 for n in ast.walk(node)):
        return
    try:
        tree = expressions.parse_condition(text)
    except CommandError:
        return  # nested too deeply, or a chain of comparisons
    expected = python_value(node)
    assert evaluate_at_tap(tree, NAMES) == pytest.approx(expected, nan_ok=True)
    recorded = evaluate_recorded(tree, {name: np.array([[value]]) for name, value in NAMES.items()})
    assert float(np.asarray(recorded).reshape(-1)[0]) == pytest.approx(expected, nan_ok=True)


@given(expression_texts)
def test_showing_and_reading_again_changes_nothing(text: str) -> None:
    try:
        tree = expressions.parse(text)
    except CommandError:
        return
    assert expressions.parse(expressions.show(tree)) == tree


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_with_a_place(text: str) -> None:
    error: CommandError | None = None
    try:
        expressions.parse(text)
    except CommandError as raised:
        error = raised
    if error is not None:
        assert error.caret is not None
        assert 0 <= error.caret <= len(text)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        (
            "layers.0.attn.q_proj[0, -1, 2:8, :]",
            ["tap", "layers.0.attn.q_proj", [0, -1, [2, 8], [None, None]]],
        ),
        ("nan(layers.0.attn.scores, 1) > 0", [">", ["statistic", "nan", "layers.0.attn.scores", 1], 0.0]),
        ('text contains "a\\"b\\n"', ["contains", ["name", "text"], ["string", 'a"b\n']]),
        ("tokens == [1, 2]", ["==", ["name", "tokens"], ["list", 1.0, 2.0]]),
        ("not a and b or c", ["or", ["and", ["not", ["name", "a"]], ["name", "b"]], ["name", "c"]]),
        ("1 - 2 - 3", ["-", ["-", 1.0, 2.0], 3.0]),
        ("-2 * 3", ["*", ["-", 2.0], 3.0]),
    ],
)
def test_trees(text: str, tree: Any) -> None:
    assert expressions.parse(text) == tree


@pytest.mark.parametrize(
    ("text", "caret", "message"),
    [
        ("absmax >", 8, "expected a value"),
        ("absmax > 5 6", 11, "unexpected '6'"),
        ("absmax ? 5", 7, "unexpected '?'"),
        ("(1 + 2", 6, "expected ')'"),
        ("1 < 2 < 3", 6, "do not chain"),
        ("abs_max > 5", 0, "unknown at a tap"),
        ("__import__('os')", 11, "unexpected"),
        ("median(layers.0.attn.scores)", 0, "no statistic"),
        ("step contains 5", 5, "unknown at a tap"),
        ("(" * 40 + "1" + ")" * 40, 31, "too deeply"),
    ],
)
def test_refusals_point_at_the_fault(text: str, caret: int, message: str) -> None:
    with pytest.raises(
        CommandError, match=message.replace("(", r"\(").replace(")", r"\)").replace("?", r"\?")
    ) as info:
        expressions.parse_condition(text)
    assert info.value.caret == caret
