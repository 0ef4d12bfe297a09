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


@pytest.mark.parametrize(
    ("role", "name"), [("shared", "shared_expert_on_every_rank"), ("x", "routed_experts_on_every_rank")]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_sum_over_the_ranks_in_place_of_the_rank_s_own_term_is_named(
    role: str, name: str, rank: int
) -> None:
    """As where one of both is computed elsewhere and comes back summed up."""
    terms = {
        "x": tuple(drawn(RNG, len(ROWS), 3, 64) for _ in range(2)),
        "shared": tuple(drawn(RNG, len(ROWS), 64) for _ in range(2)),
    }
    own = {one: held[rank] for one, held in terms.items()} | {"weights": SHARES.numpy()}
    read = {one: torch.tensor(x) for one, x in (own | {role: sum(terms[role])}).items()}
    seen = torch.einsum("nsh,ns->nh", read["x"], read["weights"]) + read["shared"]
    others = {"layers.1.mlp.experts.down": terms["x"], "layers.1.mlp.shared.down": terms["shared"]}
    model = of_model(experts=ExpertsConfig(8, 3, 48, (True, True, True), shared_width=96))
    found = made_site(
        "combine",
        "layers.1.mlp.combine.partial",
        own,
        seen.numpy(),
        model=model,
        others=others,
        tp=2,
        rank=rank,
    )
    assert names(found) == {name}
