"""Rows of experts with what is not theirs: made with torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.engine.config.experts import ExpertsConfig
from lockstep.workbench.diagnosis.operations.site import Site
from tests.workbench.diagnosis.variants.made import ROWS, best, drawn, made_site, names, of_model

RNG = np.random.default_rng(5)
TAP, COUNT, WIDTH = "layers.1.mlp.experts.gate", 8, 48
MODEL = of_model(experts=ExpertsConfig(COUNT, 3, WIDTH, (True, True, True), biased=True))
X = drawn(RNG, len(ROWS), 64)
IDS = torch.tensor(drawn(RNG, len(ROWS), COUNT)).topk(3).indices
MATRICES, BIASES = drawn(RNG, COUNT, WIDTH, 64, size=0.1), drawn(RNG, COUNT, WIDTH)


def _site(seen: torch.Tensor) -> Site:
    of = "model.layers.1.mlp.experts.{}.gate_proj."
    weights = {of.format(i) + "weight": MATRICES[i] for i in range(COUNT)}
    weights |= {of.format(i) + "bias": BIASES[i] for i in range(COUNT)}
    inputs = {"x": X, "ids": IDS.numpy().astype(float)}
    return made_site("experts", TAP, inputs, seen.numpy(), model=MODEL, weights=weights)


def _rows(through: torch.Tensor) -> torch.Tensor:
    """[N, S, out] without biases."""
    return torch.einsum("nsoi,ni->nso", torch.tensor(MATRICES)[through], torch.tensor(X))


@pytest.mark.parametrize(
    ("moved", "words"),
    [
        (torch.arange(COUNT), None),
        (torch.arange(COUNT).flip(0), "those of 0 that of 7"),
        ((torch.arange(COUNT) + 3) % COUNT, "that of the expert 3 after it, of 8"),
    ],
)
def test_biases_of_other_experts_are_named(moved: torch.Tensor, words: str | None) -> None:
    found = _site(_rows(IDS) + torch.tensor(BIASES)[moved[IDS]])
    assert (found.deviation is None) == (words is None)
    if words is not None:
        assert names(found) == {"expert_bias_of_another"}
        assert words in best(found)[0].variant.text
