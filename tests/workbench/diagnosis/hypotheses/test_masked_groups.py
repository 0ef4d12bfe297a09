"""Groups of experts that are out by a score of 0, against torch's choice by such scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.engine.config import ModelConfig
from tests.checkpoints import tiny_config
from tests.workbench.diagnosis.variants.made import ROWS, accepted, made_site

MODEL = ModelConfig.from_hf(tiny_config("deepseek_v3").to_dict()).of_layer(1)
TAP = "layers.1.mlp.topk_ids"


@pytest.mark.parametrize(("around", "masked", "named"), [(-2.0, 0.0, True), (-2.0, -torch.inf, False)])
def test_groups_are_masked_by_zero(around: float, masked: float, named: bool) -> None:
    """Where biases are below all scores any expert of a group that is out is chosen before those that are in."""
    experts = MODEL.experts
    assert experts is not None
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(ROWS), experts.count, generator=generator, dtype=torch.float64)
    bias = around + 0.2 * torch.randn(experts.count, generator=generator, dtype=torch.float64)
    groups = (logits.sigmoid() + bias).unflatten(-1, (experts.groups, -1))
    best = groups.topk(2, -1)[0].sum(-1).topk(experts.top_groups, -1)[1]
    out = torch.ones_like(groups[..., 0]).scatter_(1, best, 0).bool()
    ids = groups.masked_fill(out[..., None], masked).flatten(1).topk(experts.top_k, -1)[1]
    weights = {"model.layers.1.mlp.gate.e_score_correction_bias": bias.numpy()}
    site = made_site(
        "choice",
        TAP,
        {"logits": logits.numpy()},
        np.sort(ids.double().numpy(), -1),
        model=MODEL,
        weights=weights,
    )
    found = {one.variant.name for one in accepted(site)} if site.deviation else set()
    assert found == ({"groups_masked_by_zero"} if named else set())
