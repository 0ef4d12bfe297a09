"""Routing as transformers has it, in float32, and as its formulas state, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.graph import operation_of
from lockstep.engine.graph.formula import evaluate, formula_of, numbers_of
from lockstep.engine.rules import routing
from tests.checkpoints import tiny_config

ROUTERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "shares": (Qwen3MoeTopKRouter, {"family": "qwen3_moe"}),
    "scores": (Qwen3MoeTopKRouter, {"family": "qwen3_moe", "norm_topk_prob": False}),
    "mixtral": (MixtralTopKRouter, {"family": "mixtral", "num_experts_per_tok": 4}),
    "groups": (Glm4MoeTopkRouter, {"family": "glm4_moe"}),
    "one-group": (Glm4MoeTopkRouter, {"family": "glm4_moe", "n_group": 1, "topk_group": 1}),
    "best-of-group": (DeepseekV2TopkRouter, {"family": "deepseek_v2"}),
    "greedy": (DeepseekV2TopkRouter, {"family": "deepseek_v2", "topk_method": "greedy"}),
    "deepseek-v3": (DeepseekV3TopkRouter, {"family": "deepseek_v3"}),
    "all-groups": (Glm4MoeTopkRouter, {"family": "glm4_moe", "n_group": 2, "topk_group": 2, "norm_topk_prob": False}),
}  # fmt: skip


def made(name: str) -> tuple[Any, ModelConfig, torch.Tensor]:
    """A random router of transformers, the model that it is of, and what goes in."""
    kind, settings = ROUTERS[name]
    config = tiny_config(**settings)
    router, generator = kind(config), torch.Generator().manual_seed(5)
    router.weight.data = torch.randn(router.weight.shape, generator=generator) / 8
    if hasattr(router, "e_score_correction_bias"):
        router.e_score_correction_bias.copy_(0.2 * torch.randn(8, generator=generator))
    return router, ModelConfig.from_hf(config.to_dict()), torch.randn(40, 64, generator=generator)


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_and_weights_are_transformers(name: str) -> None:
    router, model, x = made(name)
    assert model.experts is not None
    logits, weights, ids = router(x)
    order = ids.argsort(-1)
    correction = getattr(router, "e_score_correction_bias", None)
    scores = routing.scores(logits, model.experts)
    found = routing.best(scores, correction, model.experts)
    assert torch.equal(found, ids.gather(-1, order))
    torch.testing.assert_close(
        routing.weights(scores, found, correction, model.experts),
        weights.gather(-1, order),
        rtol=1e-6,
        atol=1e-7,
    )


@pytest.mark.parametrize("name", ROUTERS)
def test_the_formulas_are_transformers(name: str) -> None:
    router, model, x = made(name)
    logits, weights, ids = (one.detach().double().numpy() for one in router(x))
    order = np.argsort(ids, -1)
    correction = getattr(router, "e_score_correction_bias", torch.zeros(8)).double().numpy()
    given = {**numbers_of(model), "logits": logits, "correction": correction}
    layer = model.of_layer(2)
    choice, of_choice = (operation_of(layer, f"mlp.topk_{one}") for one in ("ids", "weights"))
    assert choice is not None
    assert of_choice is not None
    found = evaluate(formula_of(choice, layer), given)
    assert np.array_equal(found, np.take_along_axis(ids, order, -1))
    np.testing.assert_allclose(
        evaluate(formula_of(of_choice, layer), given | {"ids": found}),
        np.take_along_axis(weights, order, -1),
        rtol=2e-6,
    )


def test_sums_are_made_in_float32_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    outputs = torch.randn(11, 3, 16, generator=generator).bfloat16()
    weights = torch.rand(11, 3, generator=generator)
    expected = torch.einsum("tsh,ts->th", outputs.double(), weights.double())
    whole = routing.weighed_sum(outputs, weights)
    monkeypatch.setattr(routing, "_WIDENED", 100)
    assert torch.equal(routing.weighed_sum(outputs, weights), whole)
    assert whole.dtype == torch.bfloat16
    assert (whole.double() - expected).abs().max() <= 2.0**-8 * expected.abs().max()


def test_more_experts_than_there_are_cannot_be_chosen() -> None:
    with pytest.raises(ValueError, match="num_experts_per_tok is 9: there are 8 experts"):
        ExpertsConfig(8, 9, 32, (True,))
