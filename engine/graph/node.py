"""The nodes of formulas (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Node:
    """`name` of `args`: a function, or, without any, a leaf's role."""

    name: str
    args: tuple[Node, ...] = ()

    def __str__(self) -> str:
        sign = _SIGNS.get(self.name)
        words = [f"({one})" if sign and one.name in _SIGNS else str(one) for one in self.args]
        if sign:
            return f" {sign} ".join(words)
        return f"{self.name}({', '.join(words)})" if self.args else self.name


_SIGNS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}


def of(name: str, *args: Node) -> Node:
    """A function of its arguments."""
    return Node(name, args)


def substitute(tree: Node, others: Mapping[str, Node]) -> Node:
    """The tree with other nodes in place of leaves, wherever these stand."""
    if not tree.args:
        return others.get(tree.name, tree)
    return replace(tree, args=tuple(substitute(one, others) for one in tree.args))
