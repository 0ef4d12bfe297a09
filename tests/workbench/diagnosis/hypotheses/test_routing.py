"""Weights of experts in another order, or applied twice: made with torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.engine.config.experts import ExpertsConfig
from tests.workbench.diagnosis.variants.made import ROWS, drawn, made_site, names, of_model

RNG = np.random.default_rng(3)
MODEL = of_model(experts=ExpertsConfig(8, 3, 48, (True, True, True)))
LOGITS = drawn(RNG, len(ROWS), 8)
OUTPUTS = drawn(RNG, len(ROWS), 3, 64)
CHOSEN, IDS = torch.tensor(LOGITS).softmax(-1).topk(3)
SHARES = CHOSEN / CHOSEN.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("weights", "name"),
    [
        (SHARES, None),
        (SHARES**2, "weights_applied_twice"),
        (SHARES.flip(-1), "slots_backwards"),
        (torch.ones_like(SHARES), "combine_unweighted"),
    ],
)
def test_weights_are_not_those_of_the_slots(weights: Tensor, name: str | None) -> None:
    seen = torch.einsum("nsh,ns->nh", torch.tensor(OUTPUTS), weights).numpy()
    inputs = {"x": OUTPUTS, "weights": SHARES.numpy()}
    found = made_site("combine", "layers.1.mlp.combine.partial", inputs, seen, model=MODEL)
    assert (found.deviation is None) == (name is None)
    if name is not None:
        assert names(found) == {name}


def test_weights_that_stand_by_size_beside_sorted_ids_are_named() -> None:
    ids = IDS.sort(-1).values.numpy()
    inputs = {"logits": LOGITS, "ids": ids}
    found = made_site("choice_weights", "layers.1.mlp.topk_weights", inputs, SHARES.numpy(), model=MODEL)
    assert names(found) == {"weights_by_size"}
    taken = torch.tensor(LOGITS).softmax(-1).gather(1, torch.tensor(ids))
    right = (taken / taken.sum(-1, keepdim=True)).numpy()
    assert (
        made_site("choice_weights", "layers.1.mlp.topk_weights", inputs, right, model=MODEL).deviation is None
    )
