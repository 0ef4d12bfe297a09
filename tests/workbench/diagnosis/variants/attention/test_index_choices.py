"""What an indexer's mask may hide, on scores by the formula."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph import operation_of
from lockstep.engine.graph.formula import FORMULAS, evaluate, numbers_of
from lockstep.engine.graph.index_choice import as_seen
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.variants.attention.index_choices import index_scores
from lockstep.workbench.diagnosis.variants.overflow import not_finite
from tests.checkpoints import tiny_config

WHOLE = ModelConfig.from_hf(tiny_config("deepseek_v32").to_dict())
MODEL = as_seen(operation_of(WHOLE, "attn.index_scores"), WHOLE)
TOKENS = 9
APART = np.subtract.outer(np.arange(TOKENS), np.arange(TOKENS))


def site(hidden: np.ndarray) -> Site:
    """A prefill whose scores are right but for what is hidden as well."""
    random, heads, dim = np.random.default_rng(0), MODEL.num_heads, MODEL.head_dim
    inputs = {
        "q": random.normal(size=(TOKENS, heads, dim)),
        "k": random.normal(size=(TOKENS, 1, dim)),
        "weights": random.normal(size=(TOKENS, heads)),
    }
    given: dict[str, Any] = {**numbers_of(MODEL), **inputs, "allowed": APART >= 0}
    expected = np.asarray(evaluate(FORMULAS["index_scores"], given))
    seen = np.where(hidden, -np.inf, expected)
    part = SimpleNamespace(inputs=inputs, expected=expected, seen=seen, fits=True)
    made = SimpleNamespace(parts=[part], operation="index_scores", facts=SimpleNamespace(model=MODEL))
    return cast(Site, made)


@pytest.mark.parametrize(
    ("hidden", "name", "words"),
    [
        (APART == 0, "index_own_key_hidden", "strictly causal"),
        (APART >= 3, "index_window", "the 3 newest keys"),
    ],
)
def test_keys_that_are_hidden_too_are_a_mask_s_matter(hidden: np.ndarray, name: str, words: str) -> None:
    wrong = site(hidden)
    (found,) = (one for one in index_scores(wrong) if one.name == name)
    (guess,) = found.predicted
    assert np.array_equal(guess, wrong.parts[0].seen)
    assert words in found.text
    assert not list(not_finite(wrong))


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_weights_of_heads_that_go_through_a_function_are_named(function: str) -> None:
    wrong = site(np.zeros((TOKENS, TOKENS), dtype=bool))
    part = wrong.parts[0]
    weights = getattr(torch, function)(
        torch.tensor(part.inputs["weights"]), **({"dim": -1} if "max" in function else {})
    )
    q, k = (torch.tensor(part.inputs[name]) for name in "qk")
    products = F.relu(torch.einsum("thd,kd->htk", q, k[:, 0]) * MODEL.head_dim**-0.5)
    seen = torch.einsum("htk,th->tk", products, weights) * MODEL.num_heads**-0.5
    seen = seen.masked_fill(torch.tensor(APART < 0), -torch.inf).numpy()
    guesses = {one.name: one.predicted[0][0] for one in index_scores(wrong)}
    near = {name for name, guess in guesses.items() if np.allclose(guess, seen)}
    assert near == {f"index_weights_{function}"}
