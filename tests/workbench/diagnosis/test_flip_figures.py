"""By how little experts were chosen: the distance of two scores, and of groups what makes the other one the best."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.engine.config import ModelConfig
from lockstep.workbench.diagnosis.flip_figures import _Choice
from lockstep.workbench.diagnosis.operations.facts import Facts
from tests.checkpoints import tiny_config


def choice(family: str) -> _Choice:
    """Of a tiny model of eight experts without a correction."""
    model = ModelConfig.from_hf(tiny_config(family).to_dict()).of_layer(2)
    return _Choice(Facts(model, "bfloat16", lambda name: None), 2, 0.0, np.zeros((8, 4)), None)


def test_of_one_expert_for_another_it_is_the_distance_of_their_scores() -> None:
    logits = np.array([3.0, 1.0, 1.01, 0.0, -1.0, -2.0, -3.0, -4.0])
    scores = np.exp(logits) / np.exp(logits).sum()
    margin, rounding = choice("qwen3_moe").margin(logits, [2.0], [1.0], 2.0**-8)
    assert margin == pytest.approx(scores[2] - scores[1], rel=1e-6)
    assert 0 < rounding < margin


def test_of_groups_it_is_what_makes_the_other_one_the_better() -> None:
    """Four groups of two, of which two are chosen, three experts: the last group is worse than the second by 0.01 in
    the sum of its scores, though one expert of it is better."""
    wanted = np.array([0.9, 0.9, 0.5, 0.5, 0.1, 0.1, 0.6, 0.39])
    logits = np.log(wanted / (1 - wanted))
    margin, _ = choice("glm4_moe").margin(logits, [2.0], [6.0], 2.0**-8)
    assert margin == pytest.approx(0.01, rel=1e-3)
