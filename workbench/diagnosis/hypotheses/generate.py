"""Every single edit of a formula: what may have run in its place. One generator for all operations.

for edit in edits_of(FORMULAS["norm"], Choices(operands={"x": ["layers.0.mlp.down"]}, numbers={"eps": (1e-5,)})):
    apply(edit, FORMULAS["norm"])
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from lockstep.engine.graph.formula import Node
from lockstep.workbench.diagnosis.hypotheses.edits import (
    Detail,
    Edit,
    Place,
    is_number,
    leaves,
    node_at,
    nodes,
    repeated,
)
from lockstep.workbench.diagnosis.hypotheses.functions import (
    ACTIVATIONS,
    BINARY,
    CONVENTIONS,
    FAMILIES,
    ORDERS,
    SAME_AS,
    SLOPED,
    SUMMING,
    UNARY,
)

#: Changes of any value by numbers that are solved for.
SOLVED: tuple[Detail, ...] = (
    ("scaled", None), ("clamped_above", None), ("clamped_below", None), ("clamped_within", None),
    ("dropped_below", None),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choices:
    """What a formula's leaves may be exchanged for at a site.

    `operands`: by leaf the names of other tensors of its shape; `results` those that may go on in place of the result,
    `added` those that may be added to it; `inserted` other operations that a leaf may go through; `together` tensors of
    several leaves at once, by leaf, of another layer or rank. `numbers`: of leaves that are numbers, other values that
    engines have. `vectors`: leaves that are weights of one axis. `dtypes`: narrower ones than the engine's. `parts`:
    into how many a row may be cut. `rows`: functions that mix tokens. `orders`: whether columns may be read in another
    order. `applied`: by leaf, or "result", what may be done to it alone; `usual`: whether what may be done to any value
    is tried as well.
    """

    operands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    results: Sequence[str] = ()
    added: Sequence[str] = ()
    inserted: Sequence[Detail] = ()
    together: Sequence[Mapping[str, str]] = ()
    numbers: Mapping[str, Sequence[float]] = field(default_factory=dict)
    vectors: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    parts: Sequence[int] = (2,)
    rows: Sequence[str] = ()
    orders: bool = True
    applied: Mapping[str, Sequence[Detail]] = field(default_factory=dict)
    usual: bool = True


def edits_of(tree: Node, choices: Choices) -> Iterator[Edit]:
    """The likeliest first: what is left out, another function, operand, number; then what is done to a value as well;
    then numbers that are solved for."""
    found: dict[Edit, None] = {}
    for path, node in nodes(tree):
        found |= dict.fromkeys(_structural(path, node, choices))
    for node in repeated(tree):
        found |= dict.fromkeys(_structural(node.name, node, choices))
    found |= dict.fromkeys(_of_leaves(tree, choices))
    places: list[Place] = [path for path, _ in nodes(tree)]
    for place in (*places, *(one for one, _ in _places(tree) if isinstance(one, str))):
        node = Node(place) if isinstance(place, str) else node_at(tree, place)
        own = "result" if place == () else "" if node.args else node.name
        found |= dict.fromkeys(Edit(place, "applied", detail) for detail in choices.applied.get(own, ()))
        if choices.usual and node.name not in choices.numbers:
            found |= dict.fromkeys(_applied(place, node, choices))
    yield from found


def _structural(path: Place, node: Node, choices: Choices) -> Iterator[Edit]:
    """Another form of the node, of the same arguments."""
    for i, one in enumerate(node.args):
        others = (other for other in node.args if other is not one)
        of_model = one.name in choices.numbers or one.name in choices.vectors
        if not of_model or all(is_number(other) for other in others):  # w of 1 + w as well
            yield Edit(path, "left_out", (float(i),))
    if len(node.args) == 2 and node.name in ("subtract", "divide"):
        yield Edit(path, "exchanged")
    for detail in _functions(node, choices.parts):
        yield Edit(path, "function", detail)
    if len(node.args) == 1:
        yield Edit(path, "applied", (node.name,))
    if _of_one(node, choices) and (inner := node.args[0]).args and inner.name != node.name:
        places = (0, 1) if inner.name in BINARY else (0,) if _of_one(inner, choices) else ()
        yield from (Edit(path, "outside", (float(i),)) for i in places)
    if node.name in SUMMING:
        for i, one in enumerate(node.args):
            if len(one.args) == 1 and one.name in (*ACTIVATIONS, *UNARY, *SAME_AS):
                yield Edit(path, "within", (one.name, float(i)))
                if node.name in BINARY and not isinstance(path, str):
                    yield Edit((*path, 1 - i), "applied", (one.name,))


def _of_one(node: Node, choices: Choices) -> bool:
    """Whether it is a function of one argument, but for numbers."""
    return bool(node.args) and all(is_number(one) or one.name in choices.numbers for one in node.args[1:])


def _functions(node: Node, parts: Sequence[int]) -> Iterator[Detail]:
    """Functions of the same family, with the numbers that they take."""
    known = SAME_AS.get(node.name, node.name)
    for family in FAMILIES:
        if known not in family:
            continue
        for name in family:
            if name.startswith("mean_of_each_part"):
                yield from ((name, float(one)) for one in parts)
            elif name == "mean_of_part":
                yield from ((name, float(one), float(i)) for one in parts for i in range(one))
            elif name != known:
                yield (name,)
        if known in ACTIVATIONS:
            yield from ((name, None) for name in SLOPED)


def _of_leaves(tree: Node, choices: Choices) -> Iterator[Edit]:
    """Other tensors and numbers, at one place and wherever they stand; leaves in each other's place."""
    names = [name for name in leaves(tree) if name not in choices.numbers]
    inputs = [name for name in names if name not in choices.vectors]
    for others in choices.together:
        yield Edit((), "operands", tuple(one for leaf_and_other in others.items() for one in leaf_and_other))
    if len(tree.args) == 2 and tree.args[1].name in choices.vectors:
        yield from (Edit((), "before", (name,)) for name in inputs)
    for name in inputs:
        yield Edit((), "skipped", (name,))
        yield Edit((), "repeated", (name,))
    for one, other in combinations([name for name in names if name in choices.vectors], 2):
        yield Edit((), "exchanged", (one, other))
    for one, other in combinations(inputs, 2):
        yield Edit((), "exchanged", (one, other))
        if choices.orders and {one, other} == set(names):
            yield from (Edit((), "split", detail) for detail in _splits(one, other, choices.parts))
    for other in choices.results:
        yield Edit((), "operand", (other,))
    for place, name in _places(tree):
        for other in choices.operands.get(name, ()):
            yield Edit(place, "operand", (other,))
        for value in choices.numbers.get(name, ()):
            yield Edit(place, "number", (value,))
        if name in choices.numbers:
            yield Edit(place, "number", (None,))
        elif name not in choices.vectors:
            yield from (Edit(place, "inserted", detail) for detail in choices.inserted)
        if not choices.usual:
            continue
        if name in choices.vectors:
            yield from (Edit(place, "applied", (function,)) for function in CONVENTIONS)
        elif name not in choices.numbers and len(names) > 1 and not choices.vectors:
            yield Edit(place, "applied", ("plus_one",))


def _splits(one: str, other: str, parts: Sequence[int]) -> Iterator[Detail]:
    for first, second in (("even_columns", "odd_columns"), ("odd_columns", "even_columns"),
                          ("first_half_woven", "second_half_woven")):  # fmt: skip
        yield (one, first, other, second)
    for count in parts:
        yield (one, "first_half_of_blocks", other, "second_half_of_blocks", float(count))


def _places(tree: Node) -> Iterator[tuple[Place, str]]:
    """Of each leaf: all of its places at once where it has several, and each."""
    by_name: dict[str, list[tuple[int, ...]]] = {}
    for path, node in nodes(tree):
        if not node.args:
            by_name.setdefault(node.name, []).append(path)
    for name, paths in by_name.items():
        places: list[Place] = [name] if len(paths) > 1 else []
        yield from ((place, name) for place in (*places, *paths))


def _applied(place: Place, node: Node, choices: Choices) -> Iterator[Edit]:
    """What is done to a value as well: rounded, centred, reordered, moved, scaled, cut off, another tensor added."""
    for dtype in choices.dtypes:
        yield Edit(place, "applied", (dtype,))
        if node.args:
            yield Edit(place, "throughout", (dtype,))
    yield Edit(place, "applied", ("overflowing",))
    yield from (Edit(place, "applied", (function,)) for function in choices.rows)
    if node.args and place and node.name not in ACTIVATIONS:
        return
    yield from (Edit(place, "applied", detail) for detail in SOLVED)
    yield Edit(place, "applied", ("centred",))
    if place == ():
        yield from (Edit(place, "applied", ("plus", other, None)) for other in choices.added)
    if choices.orders:
        moved: list[Detail] = [("columns_moved", 1.0), ("columns_moved", -1.0)]
        plain: list[Detail] = [(name,) for name in ORDERS if name != "columns_moved"]
        yield from (Edit(place, "applied", detail) for detail in (*plain, *moved))
