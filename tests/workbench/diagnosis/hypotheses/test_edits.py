"""Edits are told by their structure: each applies to its formula, changes it, and is worded from its parts alone."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from lockstep.engine.graph.formula import FORMULAS, Node, evaluate
from lockstep.workbench.diagnosis.hypotheses.edits import Edit, apply, leaves, nodes, together
from lockstep.workbench.diagnosis.hypotheses.formula_text import formula_text
from lockstep.workbench.diagnosis.hypotheses.generate import Choices, edits_of
from lockstep.workbench.diagnosis.hypotheses.operands import alike, moved_name
from lockstep.workbench.diagnosis.hypotheses.rowwise import trial_of
from lockstep.workbench.diagnosis.hypotheses.trial import ELEMENTS
from tests.workbench.diagnosis.variants.made import ROWS, drawn, made_site

CHOICES = Choices(
    operands={"x": ["other"], "gate": ["other"]}, numbers={"eps": (1e-5,)}, dtypes=("bfloat16",)
)


@pytest.mark.parametrize("kind", ["norm", "residual", "activation"])
def test_every_edit_applies_changes_the_formula_and_is_there_once(kind: str) -> None:
    formula = FORMULAS[kind]  # type: ignore[index]
    found = list(edits_of(formula, CHOICES))
    assert len(found) == len(set(found)) > 40
    for edit in found:
        changed = apply(edit.with_numbers([0.5] * edit.free), formula)
        assert changed != formula, edit
        assert set(leaves(changed)) <= {*leaves(formula), "other"}


def test_tensors_of_another_rank_replace_inputs_and_leave_the_scalar_of_a_layer() -> None:
    scaled = Node("multiply", (FORMULAS["residual"], Node("layer_scalar")))
    elsewhere = {"x": "x @ rank 1", "y": "y @ rank 1"}
    found = edits_of(scaled, Choices(together=[elsewhere], vectors=("layer_scalar",)))
    (edit,) = (one for one in found if one.kind == "operands")
    assert leaves(apply(edit, scaled)) == [*elsewhere.values(), "layer_scalar"]


def test_two_edits_are_the_same_in_either_order() -> None:
    edits = [
        Edit((0, 1, 0, 1), "number", (1e-5,)),
        Edit((1,), "applied", ("plus_one",)),
        Edit((0, 1), "left_out", (0.0,)),
    ]
    made = {together(some, FORMULAS["norm"]) for some in permutations(edits)}
    assert {formula_text(one) for one in made} == {"x / (mean(x²) + 1e-05) * (1 + weight)"}


def test_an_edit_that_finds_another_node_than_it_was_made_for_is_refused() -> None:
    root, mean = Edit((0, 1), "left_out", (0.0,)), Edit((0, 1, 0), "function", ("subtract",))
    with pytest.raises(IndexError):
        together(
            [Edit((0, 1), "function", ("square",)), Edit((0, 1), "left_out", (0.0,)), root, mean],
            FORMULAS["norm"],
        )


def test_a_formula_reads_as_it_is_computed() -> None:
    """Parentheses stand where they are needed: Python reads the text as the tree says."""
    x, y = np.array([3.0, 4.0]), np.array([5.0, -7.0])
    tree = FORMULAS["residual"]
    for edit in (
        Edit((1,), "applied", ("scaled", 2.0)),
        Edit((0,), "applied", ("minus_one",)),
        Edit((), "function", ("divide",)),
        Edit((), "repeated", ("y",)),
    ):
        changed = apply(edit, tree)
        reported = formula_text(changed)
        value = {"scaled": x + 2 * y, "minus_one": x - 1 + y, "divide": x / y, "y": x + (x + y)}[
            str(edit.detail[0])
        ]
        text = {"scaled": "x + 2 * y", "minus_one": "x - 1 + y", "divide": "x / y", "y": "x + x + y"}
        assert reported == text[str(edit.detail[0])]
        if edit.kind != "applied":
            assert np.array_equal(evaluate(changed, {"x": x, "y": y}), value)


@pytest.mark.parametrize(
    ("inner", "outer", "numbers"),
    [
        ("softplus", "clamped", ("least_step", "largest_step")),
        ("square", "mean", ()),
        ("log1p", "floor", ()),
    ],
)
def test_two_functions_of_one_argument_are_tried_in_the_other_order(
    inner: str, outer: str, numbers: tuple[str, ...]
) -> None:
    formula = Node(outer, (Node(inner, (Node("x"),)), *map(Node, numbers)))
    found = [
        one for one in edits_of(formula, Choices(numbers=dict.fromkeys(numbers, ()))) if one.kind == "outside"
    ]
    assert found == [Edit((), "outside", (0.0,))]
    x = np.array([[0.5, 2.0, 1.25]])
    plain = {
        "softplus": lambda x: np.log(1 + np.exp(x)), "clamped": lambda x: np.minimum(np.maximum(x, 1.0), 1.5),
        "square": lambda x: x * x, "mean": lambda x: np.array([[x.sum() / 3]]), "log1p": lambda x: np.log(1 + x),
        "floor": np.floor,
    }  # fmt: skip
    given = {"x": x, "least_step": 1.0, "largest_step": 1.5}
    assert np.allclose(evaluate(apply(found[0], formula), given), plain[inner](plain[outer](x)))


def test_what_stands_for_another_function_is_exchanged_as_that_one() -> None:
    formula = Node("summed_heads", (Node("above_zero", (Node("x"),)), Node("weights")))
    found = set(edits_of(formula, Choices()))
    assert {Edit((0,), "function", ("silu",)), Edit((), "within", ("above_zero", 0.0))} <= found
    assert Edit((0,), "function", ("relu",)) not in found


def test_tensors_that_stand_alike_to_two_layers() -> None:
    assert alike("layers.2.mlp.down", 3, "layers.4.mlp.down", 5)
    assert not alike("layers.2.mlp.down", 3, "layers.2.mlp.up", 3)
    assert alike("embed", 0, "layers.1.mlp_residual", 2)  # the stream that enters
    assert moved_name("layers.1.attn_norm", 2) == "layers.3.attn_norm"
    assert moved_name("model.layers.1.mlp.weight", -1) == "model.layers.0.mlp.weight"


def test_what_an_edit_costs_does_not_grow_with_the_rows() -> None:
    rng, sizes = np.random.default_rng(0), []
    for times in (1, 40):
        x, y = (drawn(rng, len(ROWS) * times, 512) for _ in range(2))
        site = made_site("residual", "layers.1.mlp_residual", {"x": x, "y": y}, x - y, rows=ROWS * times)
        found = trial_of(site)
        assert found is not None
        sizes.append(len(found[0].rows) * 512)
    assert max(sizes) <= ELEMENTS
    assert len(list(nodes(FORMULAS["residual"]))) == 3
