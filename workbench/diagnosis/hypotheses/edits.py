"""Edits: one change of an operation's formula each, given by its structure and by nothing else.

    edit = Edit((0, 1, 0, 1), "number", (1e-5,))
    apply(edit, FORMULAS["norm"])                     # ... mean(square(x)) + 1e-05 ...

A hypothesis is one edit or several; two that are equal are the same hypothesis, at whatever layer, rank or step. What
they are called is reported in `words`, nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lockstep.engine.graph.formula import FORMULAS, NORMALISED, Node, substitute

#: Where an edit is: the way to a node, by the numbers of arguments from the root on; or the name of a leaf or function,
#: wherever that stands.
Place = tuple[int, ...] | str
#: left_out    the node is its argument of that number
#: skipped     it is the leaf of that name
#: repeated    applied to its own result, in place of that leaf
#: exchanged   its arguments, or two leaves, in each other's place
#: function    another one of its arguments
#: within      the function of one argument applied to the node instead: f(a) · b as f(a · b)
#: outside     the other way round: f(a · b) as f(a) · b; so of two functions f(g(x)) as g(f(x))
#: before      the last argument joined to a leaf, not to the result
#: operand     another tensor
#: operands    the same of each leaf, in their order
#: split       two leaves as two parts of what they are side by side
#: number      another one
#: applied     a function of the node's result, with further arguments
#: throughout  the same at every node below as well
#: inserted    another operation of the node, of that kind, with the further leaves of its formula
#: map         of the whole result, fitted by no formula
EditKind = Literal[
    "left_out", "skipped", "repeated", "exchanged", "function", "within", "outside", "before", "operand", "operands",
    "split", "number", "applied", "throughout", "inserted",
    "map",
]  # fmt: skip
#: None: a number that is to be solved for.
Detail = tuple[str | float | None, ...]


@dataclass(frozen=True, slots=True)
class Edit:
    """One change at one place. `detail` are names of functions or leaves, and numbers. `at`: figures that are another
    wherever it is made, and no part of what it is."""

    place: Place
    kind: EditKind
    detail: Detail = ()
    at: Detail = field(default=(), compare=False)

    @property
    def free(self) -> int:
        """How many numbers are to be solved for."""
        return sum(one is None for one in self.detail)

    def with_numbers(self, numbers: Sequence[str | float]) -> Edit:
        """With these in place of the numbers that are to be solved for: numbers, or names of leaves that have them."""
        left = iter(numbers)
        return replace(self, detail=tuple(next(left) if one is None else one for one in self.detail))


def number(value: float) -> Node:
    """A leaf that is a number."""
    return Node(repr(float(value)))


def is_number(node: Node) -> bool:
    try:
        float(node.name)
    except ValueError:
        return False
    return not node.args


def nodes(tree: Node, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Node]]:
    """Every node with its path, the root first."""
    yield path, tree
    for i, one in enumerate(tree.args):
        yield from nodes(one, (*path, i))


def repeated(tree: Node) -> Iterator[Node]:
    """What is computed at several places: functions that stand nowhere else with other arguments."""
    by_name: dict[str, list[Node]] = {}
    for _, node in nodes(tree):
        if node.args:
            by_name.setdefault(node.name, []).append(node)
    yield from (found[0] for found in by_name.values() if len(found) > 1 and len(set(found)) == 1)


def leaves(tree: Node) -> list[str]:
    """The names of the leaves, each once, numbers left out."""
    return list(dict.fromkeys(one.name for _, one in nodes(tree) if not one.args and not is_number(one)))


def node_at(tree: Node, path: tuple[int, ...]) -> Node:
    """IndexError where there is none."""
    for i in path:
        tree = tree.args[i]
    return tree


def put(tree: Node, path: tuple[int, ...], other: Node) -> Node:
    """The tree with another node at a path."""
    if not path:
        return other
    args = list(tree.args)
    args[path[0]] = put(args[path[0]], path[1:], other)
    return replace(tree, args=tuple(args))


def apply(edit: Edit, tree: Node) -> Node:
    """The formula with the edit. IndexError where it has no such place."""
    if isinstance(edit.place, str):
        return _wherever(edit, tree)
    return put(tree, edit.place, _changed(edit, node_at(tree, edit.place)))


def _wherever(edit: Edit, node: Node) -> Node:
    if node.name == edit.place:
        return _changed(edit, node)
    return replace(node, args=tuple(_wherever(edit, one) for one in node.args))


def _changed(edit: Edit, node: Node) -> Node:
    match edit.kind, edit.detail:
        case "left_out", (float(argument),):
            return node.args[int(argument)]
        case "skipped" | "operand", (str(name),):
            return Node(name)
        case "number", (_,):
            return _arguments(edit.detail)[0]
        case "repeated", (str(leaf),):
            return substitute(node, {leaf: node})
        case "exchanged", ():
            return replace(node, args=node.args[::-1])
        case "exchanged", (str(one), str(other)):
            return substitute(node, {one: Node(other), other: Node(one)})
        case "function", (str(name), *further):
            return Node(name, (*node.args, *_arguments(further)))
        case "within", (str(name), float(argument)):
            return _within(node, name, int(argument))
        case "outside", (float(argument),):
            return _outside(node, int(argument))
        case "before", (str(leaf),):
            return substitute(node.args[0], {leaf: replace(node, args=(Node(leaf), *node.args[1:]))})
        case "operands", names:
            read = dict(zip(names[::2], names[1::2], strict=True))
            return substitute(node, {str(leaf): Node(str(other)) for leaf, other in read.items()})
        case "split", (str(one), str(first), str(other), str(second), *further):
            both = (Node(one), Node(other), *_arguments(further))
            return substitute(node, {one: Node(first, both), other: Node(second, both)})
        case "applied", (str(name), *further):
            return Node(name, (node, *_arguments(further)))
        case "inserted", ("rope",):
            return substitute(FORMULAS["rope"], {"x": node})
        case "inserted", ("norm", str(weight), float(eps)):
            given = {"x": node, "weight": Node(weight), "eps": number(eps)}
            return substitute(FORMULAS["norm"] if weight else NORMALISED, given)
        case "throughout", (str(name), *further):
            return _throughout(node, name, _arguments(further))
    raise ValueError(f"{edit} names nothing that can be done to {node}")


def _arguments(detail: Sequence[str | float | None]) -> list[Node]:
    return [Node(one) if isinstance(one, str) else number(one or 0.0) for one in detail]


def _within(node: Node, name: str, argument: int) -> Node:
    """The function taken from the argument of that number and applied to the whole: f(a) · b as f(a · b)."""
    args = list(node.args)
    if args[argument].name != name:
        raise IndexError(argument)
    args[argument] = args[argument].args[0]
    return Node(name, (replace(node, args=tuple(args)),))


def _outside(node: Node, argument: int) -> Node:
    """The function, with the numbers that it takes, applied to one argument of its first argument alone."""
    inner, *numbers = node.args
    args = list(inner.args)
    args[argument] = replace(node, args=(args[argument], *numbers))
    return replace(inner, args=tuple(args))


def _throughout(node: Node, name: str, further: list[Node]) -> Node:
    inner = replace(node, args=tuple(_throughout(one, name, further) for one in node.args))
    return inner if is_number(node) else Node(name, (inner, *further))


def together(edits: Sequence[Edit], tree: Node) -> Node:
    """The formula with several edits, the deepest first, so that each finds its place. IndexError where one finds
    another node there than the formula has."""
    found = tree
    for edit in sorted(edits, key=lambda one: 0 if isinstance(one.place, str) else -1 - len(one.place)):
        if len(edits) > 1 and edit.kind not in ("applied", "throughout") and not isinstance(edit.place, str):
            node, own = node_at(found, edit.place), node_at(tree, edit.place)
            if (node.name, len(node.args)) != (own.name, len(own.args)):
                raise IndexError(edit.place)
        found = apply(edit, found)
    return found
