"""Expressions: conditions, watch predicates, what `print` shows and what `expect` claims.

    or  and  not  < <= > >= == != contains  + -  * /  unary -        loosest to tightest

    12  1e-3  "text"  [1, 2]          numbers, strings, lists
    absmax  step  rank  golden        names
    layers.0.attn.q_proj[0, 3]        a tap's tensor or a part of it
    nan(layers.0.attn.scores, 1)      a statistic of a tap (on one rank)

The result of parsing is a JSON tree: numbers, strings, and lists headed by an operator. Its numeric part is
what `engine.taps.predicate` evaluates beside the tap; nothing is ever given to Python's `eval`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lockstep.sessions.records import STATISTICS
from lockstep.workbench.debugger.errors import CommandError
from lockstep.workbench.debugger.language.lexer import Token, reference_words, tokenize, unescape

Tree = Any  # float | ["string", str] | ["name", str] | ["tap", str, index] | ["list", …] | [operator, …]

#: What a condition at a tap may speak of (see `engine.taps.pausing.Pauser`).
CONDITION_NAMES = (*STATISTICS, "step", "rank", "token", "position", "kv_len")

_BINDING = {
    "or": 1, "and": 2, "<": 4, "<=": 4, ">": 4, ">=": 4, "==": 4, "!=": 4, "contains": 4,
    "+": 5, "-": 5, "*": 6, "/": 6,
}  # fmt: skip
_NOT, _MINUS, _DEEPEST = 3, 7, 30


def parse(line: str) -> Tree:
    """The tree of a whole expression. CommandError with a caret where it goes wrong."""
    parser = _Parser(line)
    tree = parser.expression(0, 0)
    parser.expect_end()
    return tree


def parse_condition(line: str) -> Tree:
    """An expression that a rank can evaluate at a tap: numbers and CONDITION_NAMES only."""
    tree = parse(line)
    _check_names(tree, line, CONDITION_NAMES)
    return tree


def parse_reference(line: str) -> tuple[str, list[Any] | None, str]:
    """ "TAP[index] rest" -> (tap, index or None, rest)."""
    parser = _Parser(line, partial=True)
    first = parser.take()
    if first.kind != "name":
        raise CommandError("expected a tap such as layers.0.attn.q_proj", line, first.at)
    index = parser.index() if parser.at("[") else None
    return first.text, index, line[parser.peek().at :].strip()


class _Parser:
    """Pratt's: each operator binds as tightly as _BINDING states (Pratt 1973)."""

    def __init__(self, line: str, partial: bool = False) -> None:
        self.line = line
        self.tokens = reference_words(line) if partial else tokenize(line)
        self.next = 0

    def peek(self) -> Token:
        """The next word."""
        return self.tokens[self.next]

    def take(self) -> Token:
        """The next word, consumed."""
        token = self.tokens[self.next]
        self.next += token.kind != "end"
        return token

    def at(self, text: str) -> bool:
        """Whether the next word is this operator."""
        return self.peek().kind == "op" and self.peek().text == text

    def expect(self, text: str) -> None:
        """Consume this operator."""
        token = self.take()
        if token.kind != "op" or token.text != text:
            raise CommandError(f"expected {text!r}", self.line, token.at)

    def expect_end(self) -> None:
        """Nothing may be left."""
        if self.peek().kind != "end":
            raise CommandError(f"unexpected {self.peek().text!r}", self.line, self.peek().at)

    def expression(self, binding: int, depth: int) -> Tree:
        """Everything that binds tighter than `binding`."""
        if depth > _DEEPEST:
            raise CommandError("nested too deeply", self.line, self.peek().at)
        left = self._prefix(depth)
        while (power := _BINDING.get(self.peek().text, 0)) > binding and self.peek().kind != "string":
            operator = self.take()
            right = self.expression(power, depth + 1)
            if power == 4 and isinstance(left, list) and left[0] in _BINDING and _BINDING[left[0]] == 4:
                raise CommandError("comparisons do not chain: join two with 'and'", self.line, operator.at)
            left = [operator.text, left, right]
        return left

    def _prefix(self, depth: int) -> Tree:
        token = self.take()
        if token.kind == "number":
            return float(token.text)
        if token.kind == "string":
            return ["string", unescape(token.text)]
        if token.kind == "name":
            return self._name(token, depth)
        if token.text == "-":
            return ["-", self.expression(_MINUS, depth + 1)]
        if token.text == "(":
            inner = self.expression(0, depth + 1)
            self.expect(")")
            return inner
        if token.text == "[":
            return self._list(depth)
        raise CommandError("expected a value", self.line, token.at)

    def _name(self, token: Token, depth: int) -> Tree:
        if token.text == "not":
            return ["not", self.expression(_NOT, depth + 1)]
        if token.text in _BINDING:
            raise CommandError(f"expected a value before {token.text!r}", self.line, token.at)
        if self.at("("):
            return self._statistic(token)
        if self.at("["):
            return ["tap", token.text, self.index()]
        return ["name", token.text]

    def _statistic(self, token: Token) -> Tree:
        """`nan(TAP)` or `nan(TAP, RANK)`."""
        if token.text not in STATISTICS:
            raise CommandError(
                f"no statistic {token.text!r}: use {', '.join(STATISTICS)}", self.line, token.at
            )
        self.expect("(")
        tap = self.take()
        if tap.kind != "name":
            raise CommandError("expected a tap", self.line, tap.at)
        rank: Tree = None
        if self.at(","):
            self.take()
            rank = self._integer()
        self.expect(")")
        return ["statistic", token.text, tap.text, rank]

    def _list(self, depth: int) -> Tree:
        items: list[Tree] = []
        while not self.at("]"):
            items.append(self.expression(0, depth + 1))
            if not self.at("]"):
                self.expect(",")
        self.expect("]")
        return ["list", *items]

    def index(self) -> list[Any]:
        """`[0, -1, 2:8, :]` -> integers and [start, stop] pairs (None where left out)."""
        self.expect("[")
        found: list[Any] = []
        while True:
            start = None if self.at(":") else self._integer()
            if self.at(":"):
                self.take()
                stop = None if self.at(",") or self.at("]") else self._integer()
                found.append([start, stop])
            else:
                found.append(start)
            if self.at("]"):
                break
            self.expect(",")
        self.expect("]")
        return found

    def _integer(self) -> int:
        sign = -1 if self.at("-") else 1
        if sign < 0:
            self.take()
        token = self.take()
        if token.kind != "number" or not token.text.isdigit():
            raise CommandError("expected a whole number", self.line, token.at)
        return sign * int(token.text)


def _check_names(tree: Tree, line: str, allowed: Collection[str]) -> None:
    if not isinstance(tree, list):
        return
    if tree[0] in ("tap", "statistic", "string", "list", "contains") or (
        tree[0] == "name" and tree[1] not in allowed
    ):
        what = tree[1] if tree[0] != "contains" and len(tree) > 1 and isinstance(tree[1], str) else tree[0]
        message = f"{what!r} is unknown at a tap: use {', '.join(sorted(allowed))}"
        if tree[0] == "statistic":
            message = f"a condition speaks of the tap it stops at: {what}, not {show(tree)}"
        raise CommandError(message, line, max(line.find(str(what)), 0))
    for child in tree[1:]:
        _check_names(child, line, allowed)


def show(tree: Tree) -> str:
    """The tree as a user would write it."""
    if isinstance(tree, float | int):
        return f"{tree:g}"
    head, *rest = tree
    if head == "name":
        return str(rest[0])
    if head == "string":
        return '"' + str(rest[0]).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    if head == "tap":
        return f"{rest[0]}{show_index(rest[1])}"
    if head == "statistic":
        return f"{rest[0]}({rest[1]}{'' if rest[2] is None else f', {rest[2]}'})"
    if head == "list":
        return f"[{', '.join(map(show, rest))}]"
    if len(rest) == 1:
        return f"{head}{' ' if head == 'not' else ''}{_enclosed(rest[0])}"
    return f"{_enclosed(rest[0])} {head} {_enclosed(rest[1])}"


def show_index(index: list[Any] | None) -> str:
    """`[0, 2:8]` as it was written; "" for none."""
    if index is None:
        return ""
    parts = (
        str(i) if isinstance(i, int) else ":".join("" if bound is None else str(bound) for bound in i)
        for i in index
    )
    return f"[{', '.join(parts)}]"


def _enclosed(tree: Tree) -> str:
    text = show(tree)
    return f"({text})" if isinstance(tree, list) and tree[0] in (*_BINDING, "not") else text
