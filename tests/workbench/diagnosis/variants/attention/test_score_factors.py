"""Scores scaled by a factor for each query, key or step are named; masks of no known form, too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workbench.diagnosis.variants.attention_run import At, Run, causes, model, names

INF = torch.inf


def seen_keys(x: Tensor) -> Tensor:
    """How many keys each query sees, [T, 1]."""
    return torch.arange(x.shape[2] - x.shape[1] + 1, x.shape[2] + 1)[:, None].float()


def by_key(x: Tensor, at: At) -> Tensor:
    return x * (1.0 + torch.arange(x.shape[2]) % 3)


def of_dimensions(x: Tensor, at: At, weights: Tensor) -> Tensor:
    k = at.taps["k_cache"].repeat_interleave(2, 1)
    return (torch.einsum("thd,khd->htk", at.taps["q_rope"] * weights, k) / 4).masked_fill(x == -INF, -INF)


def hidden_here_and_there(x: Tensor, at: At) -> Tensor:
    keys = torch.arange(x.shape[2])
    return x.masked_fill((keys * 7 + seen_keys(x) * 3) % 5 == 0, -INF)


FACTORS: list[tuple[str, Any, str, str]] = [
    # id, what is done, the cause's name, words of its text
    ("log", lambda x, at: x * (seen_keys(x).log() / math.log(4)).clamp(min=1), "scores_scale_of_queries", "log(4)"),
    ("root", lambda x, at: x / seen_keys(x).sqrt(), "scores_scale_of_queries", "1/sqrt(n)"),
    ("table", lambda x, at: x * (1 + seen_keys(x) % 3), "scores_scale_of_queries", "factor of its position"),
    ("keys", by_key, "scores_scale_of_keys", "of each key"),
    ("steps", lambda x, at: x * (1 + at.step), "scores_scale_of_steps", "each step"),
    ("dimensions", lambda x, at: of_dimensions(x, at, 1.0 * (torch.arange(16) < 12)), "keys_kept_up_to",
     "from dim 12 on there is nothing but zeros"),
    ("mask", hidden_here_and_there, "mask_irregular", "hides"),
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("spoil", "name", "words"), [one[1:] for one in FACTORS], ids=[one[0] for one in FACTORS]
)
def test_factors_that_differ_are_named(spoil: Any, name: str, words: str) -> None:
    found = causes(Run(model(), {"scores": spoil}), "scores")
    assert found, "nothing named"
    assert (found[0].variant.name, words in found[0].variant.text) == (name, True), found[0].variant.text


def test_random_damage_is_not_a_factor_and_not_a_mask() -> None:
    noise = torch.Generator().manual_seed(5)
    run = Run(model(), {"scores": lambda x, at: x * (1 + torch.rand(x.shape, generator=noise))})
    assert names(run, "scores") == []


def test_nan_is_not_blamed_on_what_it_has_made_of_a_later_layer() -> None:
    """Scores of layer 1 are NaN, and so, as a consequence, are the keys and queries of layer 2."""

    def nan_after(layer: int) -> Any:
        return lambda x, at: torch.where(x == -INF, x, torch.nan) if at.layer == layer else x

    run = Run(model(), {"scores": nan_after(1), "k_rope": nan_after(2), "q_rope": nan_after(2)})
    found = names(run, "scores")
    assert found
    assert not {"cache_of_another_layer", "queries_of_another_layer"} & set(found)
