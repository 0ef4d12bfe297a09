"""What an edit of a norm is called, whichever form the model has of it.

Places are those of RMSNorm's formula, x / sqrt(mean(x²) + eps) * w, with "bias" for what LayerNorm adds to that, and
"sum" for the result with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.engine.graph.formula import Node
from lockstep.workbench.diagnosis.hypotheses.edits import Edit, Place, node_at

#: What its leaves are called in formulas, and what they are in a sentence.
NORM_LEAVES: Mapping[str, str] = {"weight": "w", "bias": "b"}
NORM_SENTENCES: Mapping[str, str] = {
    "x": "the norm's input", "weight": "{weight}", "bias": "{bias}", "eps": "epsilon"
}  # fmt: skip
_PLACES: Mapping[Place, str] = {
    (0,): "the normalised row",
    (0, 0): "the norm's input, but for its {root},",
    (0, 1): "the {root}",
    (0, 1, 0): "the {square} with epsilon",
    (0, 1, 0, 0): "the {square}",
    (0, 1, 0, 0, 0): "each square",
    (0, 1, 0, 0, 0, 0): "the norm's input for its {root}",
    (1,): "{weight}",
    "sum": "the result",
}
_MIXING = (
    ("rows_before", "each token is divided by the {root} of the token before"),
    ("rows_after", "each token is divided by the {root} of the token after it"),
    ("rows_mean_of_sequence", "the {root} is taken over all tokens of the sequence's step"),
    ("rows_mean_of_step", "the {root} is taken over all tokens of the step"),
)
#: What may be done to a weight or bias alone.
_CONVENTIONS: Mapping[str, str] = {
    "plus_one": "{at} is applied as 1 + {letter}",
    "minus_one": "{at} is applied as {letter} - 1",
    "squared": "{at} is applied twice",
    "inverted": "{at} is divided by",
    "first_half_twice": "{at}'s first half is used for both",
    "second_half_twice": "{at}'s second half is used for both",
    "pairs_as_halves": "{at} is read as neighbouring pairs",
    "halves_as_pairs": "{at} is read as halves",
    "backwards": "{at} is read backwards",
}
_Words = Mapping[tuple[Place, str, object], str]
_PLAIN: _Words = {
    ((), "left_out", 0.0): "{weight} is not applied",
    ((), "before", "x"): "{weight} is multiplied before the norm, not after it",
    ((), "skipped", "x"): "the norm is skipped: its input goes on as it is",
    ((), "repeated", "x"): "the row is normalised twice, with the weight both times",
    ((0,), "left_out", 0.0): "the row is not divided by its {root}",
    ((0,), "skipped", "x"): "the norm is skipped: its input goes on as it is",
    ((0,), "function", "multiply"): "the row is divided by the reciprocal of its {root}",
    ((0, 1), "left_out", 0.0): "the {square} is divided by, not its root",
    ((0, 1, 0), "left_out", 0.0): "no epsilon is added (it is {eps:g})",
    ((0, 1, 0, 0), "function", "total"): "squares are summed, not averaged",
    ((0, 1, 0, 0), "function", "mean_of_n_less_1"): "squares are averaged over one element less",
    ((0, 1, 0, 0), "function", "mean_over_heads"):
        "the {root} is taken over all heads of the rank, not each head's own",
    ((0, 1, 0, 0), "function", "mean_of_each_part"):
        "the mean of squares is over {part:g} columns, not over all {row}: each of {a:g} parts of the row is "
        "divided by its own {root}, as on shards never reduced",
    ((0, 1, 0, 0), "function", "mean_of_part"): "the {root} is that of part {b:g} of {a:g} of the row",
    **{((0, 1, *inner), "applied", how): text for inner in ((), (0,), (0, 0)) for how, text in _MIXING},
    ((0, 1, 0, 0, 0, 0), "operand", "x"):
        "the mean of squares is over the rank's own {own} columns, not over all {row} of the {ranks} ranks",
    ((0, 1), "outside", 0.0): "the epsilon is added outside of the root",
    **{
        ((1,), "applied", function): text.format(at="{weight}", letter="w")
        for function, text in _CONVENTIONS.items()
    },
    **{
        ("bias", "applied", function): text.format(at="{bias}", letter="b")
        for function, text in _CONVENTIONS.items()
    },
    ("sum", "left_out", 0.0): "{bias} is not added",
    ("sum", "before", "x"): "{bias} is added before the norm, not after it",
    ("sum", "function", "subtract"): "{bias} is subtracted",
    ("sum", "skipped", "x"): "the norm is skipped: its input goes on as it is",
    ("sum", "repeated", "x"): "the row is normalised twice, with weight and bias both times",
}  # fmt: skip
#: Of norms that do not take the mean off,
_UNCENTRED: _Words = {
    ((0,), "left_out", 0.0): "the row is not normalised, only multiplied by the weight",
    ("x", "applied", "centred"): "the mean is subtracted first, as LayerNorm does",
    ((0, 0), "applied", "centred"): "the mean is subtracted after the root mean square was taken",
    ((0, 1, 0, 0, 0, 0), "applied", "centred"): "the row is divided by its standard deviation",
}
#: and of those that do.
_CENTRED: _Words = {
    ("subtract", "left_out", 0.0): "the mean is not subtracted: RMSNorm runs in place of LayerNorm",
    ((0, 0), "left_out", 0.0): "the mean is not subtracted from the row, only for its standard deviation",
    (
        (0, 1, 0, 0, 0, 0),
        "left_out",
        0.0,
    ): "the row is divided by its root mean square, not its standard deviation",
}
#: Of weights that are stored less one.
_LESS_ONE: _Words = {
    ((1,), "left_out", 1.0): "{weight} is applied as w, not as 1 + w",
    **{
        (place, "applied", "plus_one"): "{weight} is applied as 2 + w: 1 is added twice"
        for place in ((1,), (1, 0), (1, 1))
    },
}


def norm_sentence(formula: Node, edit: Edit) -> str | None:
    """The sentence of an edit of a norm, its fields open; None where it has none of its own."""
    first = edit.detail[0] if edit.detail else None
    key = (_place(formula, edit.place), edit.kind, first)
    own = _CENTRED if _centred(formula) else _UNCENTRED
    found = {**_PLAIN, **own, **(_LESS_ONE if _less_one(formula) else {})}.get(key)
    return None if found is None else _of_form(formula, found)


def norm_place(formula: Node, edit: Edit) -> str | None:
    """What is at the place of an edit; None where a leaf's name or the formula shows it best."""
    found = _PLACES.get(_place(formula, edit.place))
    return None if found is None else _of_form(formula, found)


def _of_form(formula: Node, text: str) -> str:
    root, square = (
        ("standard deviation", "variance") if _centred(formula) else ("root mean square", "mean square")
    )
    return text.replace("{root}", root).replace("{square}", square)


def _place(formula: Node, place: Place) -> Place:
    """The same place in RMSNorm's formula: LayerNorm adds to that, a norm without weight is a part of it."""
    if isinstance(place, str):
        return place
    if formula.name == "add":
        return place[1:] if place[:1] == (0,) else "bias" if place else "sum"
    return (0, *place) if formula.name == "divide" else place


def _centred(formula: Node) -> bool:
    by = formula
    while by.name in ("add", "multiply"):
        by = by.args[0]
    return by.args[0].name == "subtract"


def _less_one(formula: Node) -> bool:
    scaled = node_at(formula, (0,)) if formula.name == "add" else formula
    return scaled.name == "multiply" and scaled.args[1].name == "add"
