"""Which experts are chosen is judged as a set, and excused where rounding decides between two."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph import operation_of
from lockstep.workbench.diagnosis.operations.expected import Operands
from lockstep.workbench.diagnosis.operations.experts import choice, settled_choice
from lockstep.workbench.diagnosis.operations.facts import Facts
from tests.checkpoints import tiny_config

LOGITS = [[3.0, 1.0, 2.0, 0.0, -1.0, -2.0, -3.0, -4.0]]


def settled(logits: list[list[float]], seen: list[list[float]], family: str = "qwen3_moe") -> bool:
    """Whether a choice of experts by these logits is taken for right."""
    model = ModelConfig.from_hf(tiny_config(family).to_dict()).of_layer(2)
    facts = Facts(model, "float32", lambda name: np.zeros(8, np.float32))
    correction = {"correction": "bias"} if family == "glm4_moe" else {}
    declared = operation_of(model, "mlp.topk_ids")
    o = Operands(facts, (), {"logits": np.array(logits)}, correction, None, None, declared)
    expected, _ = choice(o)
    return bool(np.array_equal(*settled_choice(o, np.array(seen), expected)))


@pytest.mark.parametrize(
    ("second", "seen", "right"),
    [
        (2.0, [0, 2], True),
        (2.0, [2, 0], True),  # in any order
        (2.0, [0, 1], False),
        (1.0, [0, 1], True),  # as good as the other
        (1.0 + 1e-7, [0, 1], True),
        (1.0 + 1e-3, [0, 1], False),
        (1.0, [0, 3], False),
        (1.0, [0, 0], False),
        (1.0, [0, 8], False),
        (1.0, [0, -1], False),
    ],
)
def test_of_experts_that_are_equally_good_either_is_right(
    second: float, seen: list[float], right: bool
) -> None:
    (row,) = LOGITS
    assert settled([[*row[:2], second, *row[3:]]], [seen]) == right


def test_of_groups_that_are_equally_good_either_is_right() -> None:
    """Two of four groups of two, three experts."""
    row = [2.0, 2.0, 1.0, 1.0, 1.0, 1.0, -4.0, -4.0]
    assert settled([row], [[0, 1, 2]], "glm4_moe")
    assert settled([row], [[0, 1, 5]], "glm4_moe")
    assert not settled([row], [[0, 1, 6]], "glm4_moe")
    assert not settled([row], [[0, 2, 4]], "glm4_moe")
