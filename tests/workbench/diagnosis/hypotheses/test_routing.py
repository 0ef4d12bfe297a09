"""Routing to experts as routers get it wrong: made with torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.graph.routing import mixed
from lockstep.workbench.diagnosis.operations.site import Site
from tests.workbench.diagnosis.variants.made import ROWS, Array, best, drawn, made_site, names, of_model

pytestmark = pytest.mark.sampled_file(2)

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
        (SHARES * torch.tensor([1.0, 1.0, 0.0]), "slots_left_out"),
        (SHARES * torch.tensor([0.0, 1.0, 1.0]), "slots_left_out"),
    ],
)
def test_weights_are_not_those_of_the_slots(weights: Tensor, name: str | None) -> None:
    seen = torch.einsum("nsh,ns->nh", torch.tensor(OUTPUTS), weights).numpy()
    inputs = {"x": OUTPUTS, "weights": SHARES.numpy()}
    found = made_site("combine", "layers.1.mlp.combine.partial", inputs, seen, model=MODEL)
    assert (found.deviation is None) == (name is None)
    if name is not None:
        assert names(found) == {name}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("counted", "name"),
    [
        (SHARES, None),
        (torch.ones_like(SHARES), "expert_bias_unweighed"),
        (torch.zeros_like(SHARES), "expert_bias_missing"),
        (2 * SHARES, "expert_bias_twice"),
    ],
)
def test_biases_of_down_that_count_otherwise_in_the_sum_are_named(
    counted: Tensor, name: str | None, dtype: str
) -> None:
    biases = torch.tensor(drawn(RNG, 8, 64))
    held = {f"model.layers.1.mlp.experts.{i}.down_proj.bias": one.numpy() for i, one in enumerate(biases)}
    weighed = torch.tensor(drawn(RNG, *OUTPUTS.shape)) * SHARES[..., None]
    seen = weighed.sum(1) + (biases[IDS] * counted[..., None]).sum(1)
    inputs = {"x": (weighed / SHARES[..., None] + biases[IDS]).numpy(), "weights": SHARES.numpy()}
    model = of_model(experts=ExpertsConfig(8, 3, 48, (True, True, True), biased=True))
    ids = {"layers.1.mlp.topk_ids": IDS.double().numpy()}
    found = made_site(
        "combine", "layers.1.mlp.combine.partial", inputs, seen.numpy(), model=model, weights=held, others=ids,
        dtype=dtype,
    )  # fmt: skip
    assert (found.deviation is None) == (name is None)
    if name is not None:
        assert names(found) == {name}


WITH_SHARED = of_model(experts=ExpertsConfig(8, 3, 48, (True, True, True), shared_width=96))
SHARED = {layer: drawn(RNG, len(ROWS), 64) for layer in range(3)}
ROUTED = torch.einsum("nsh,ns->nh", torch.tensor(OUTPUTS), SHARES).numpy()


def _with_shared(seen: Array, layer: int = 1) -> Site:
    inputs = {"x": OUTPUTS, "weights": SHARES.numpy(), "shared": SHARED[layer]}
    others = {f"layers.{one}.mlp.shared.down": x for one, x in SHARED.items()}
    tap = f"layers.{layer}.mlp.combine.partial"
    return made_site("combine", tap, inputs, seen, model=WITH_SHARED, others=others)


def _of_step_before(x: Array) -> Array:
    """The row at the same place of the step before, of which the first one of each sequence is its prompt's."""
    found = x.copy()
    for step in range(1, 4):
        of, at = ([i for i, row in enumerate(ROWS) if row.step == one] for one in (step - 1, step))
        found[at] = x[of[: len(at)]]
    return found


@pytest.mark.parametrize(
    ("read", "layer", "words"),
    [
        (SHARED[0], 1, "shared expert gives of layer 0 is read"),
        (SHARED[2], 1, "shared expert gives of layer 2 is read"),
        (_of_step_before(SHARED[2]), 0, "shared expert gives of layer 2, of the step before is read"),
        (_of_step_before(SHARED[1]), 1, "what the shared expert gives, of the step before is read"),
    ],
)
def test_what_a_buffer_holds_of_another_layer_or_step_is_named(read: Array, layer: int, words: str) -> None:
    found = best(_with_shared(ROUTED + read, layer))
    assert {one.variant.name for one in found} == {"combine_operand"}
    assert words in found[0].variant.text


@pytest.mark.parametrize(
    ("added", "words"), [(ROUTED, "weighed_sum(x, weights)"), (ROUTED + SHARED[1], "of the pass is added")]
)
def test_a_row_of_another_token_that_is_added_is_named(added: Array, words: str) -> None:
    right, first = ROUTED + SHARED[1], {row.step: i for i, row in reversed(list(enumerate(ROWS)))}
    last = {row.step: i for i, row in enumerate(ROWS)}
    seen = right.copy()
    seen[list(first.values())] += added[[last[step] for step in first]]
    assert _with_shared(right).deviation is None
    found = best(_with_shared(seen))
    assert {one.variant.name for one in found} == {"combine_rows_added"}
    assert "the row of the last token" in found[0].variant.text
    assert words in found[0].variant.text


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


def _weights_site(seen: Tensor, ids: Tensor, *, dtype: str = "float32", tp: int = 1, rank: int = 0) -> Site:
    inputs = {"logits": LOGITS, "ids": ids.numpy()}
    return made_site(
        "choice_weights",
        "layers.2.mlp.topk_weights",
        inputs,
        seen.numpy(),
        model=MODEL,
        dtype=dtype,
        tp=tp,
        rank=rank,
    )


SORTED = IDS.sort(-1).values
STEPS = torch.tensor([row.step for row in ROWS])


def _shared(scores: Tensor) -> Tensor:
    taken = scores.gather(1, SORTED)
    return taken / taken.sum(-1, keepdim=True)


def test_a_softmax_over_the_tokens_is_named() -> None:
    logits = torch.tensor(LOGITS)
    scores = torch.cat([logits[step == STEPS].softmax(0) for step in STEPS.unique()])
    assert names(_weights_site(_shared(scores), SORTED)) == {"softmax_over_tokens"}
    best_of = scores.topk(3).indices.sort(-1).values.numpy()
    found = made_site("choice", "layers.2.mlp.topk_ids", {"logits": LOGITS}, best_of, model=MODEL)
    assert names(found) == {"softmax_over_tokens"}


def test_logits_that_are_read_as_the_other_16_bit_dtype_are_named() -> None:
    misread = torch.tensor(LOGITS).to(torch.float16).view(torch.bfloat16).double()
    found = _weights_site(_shared(misread.softmax(-1)), SORTED, dtype="float16")
    assert names(found) == {"router_logits_misread"}
    assert "written as float16 and read as bfloat16" in best(found)[0].variant.text


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_renormalised_over_the_experts_of_a_rank_are_named(rank: int) -> None:
    taken = torch.tensor(LOGITS).softmax(-1).gather(1, SORTED)
    own = (rank == SORTED // 4).double()
    sums = (taken * own).sum(-1, keepdim=True)
    seen = taken / torch.where(sums > 0, sums, taken.sum(-1, keepdim=True))
    assert names(_weights_site(seen, SORTED, tp=2, rank=rank)) == {"weights_renormalised_by_rank"}


def test_experts_that_are_dealt_to_groups_in_turn_are_named() -> None:
    model = of_model(
        experts=ExpertsConfig(8, 3, 48, (True, True, True), groups=4, top_groups=2, group_best=1)
    )
    logits = LOGITS + np.arange(8) / 512  # no two are equal
    scores = torch.tensor(logits).softmax(-1)
    group = torch.arange(8) % 4
    best_of = torch.stack([scores[:, group == one].amax(-1) for one in range(4)], -1).topk(2).indices
    inside = (group[None, :, None] == best_of[:, None]).any(-1)
    seen = scores.masked_fill(~inside, -1).topk(3).indices.sort(-1).values.numpy()
    found = made_site("choice", "layers.0.mlp.topk_ids", {"logits": logits}, seen, model=model)
    assert names(found) == {"groups_in_turn"}
    assert "expert e to group e % 4" in best(found)[0].variant.text


def test_the_least_weight_of_a_token_that_is_dropped_is_named() -> None:
    taken = torch.tensor(LOGITS).softmax(-1).gather(1, SORTED)
    kept = taken.scatter(1, taken.argmin(-1, keepdim=True), 0.0)
    assert names(_weights_site(kept / kept.sum(-1, keepdim=True), SORTED)) == {"least_weight_dropped"}


def _again(logits: Tensor) -> Tensor:
    left, found = logits.clone(), []
    for _ in range(3):
        found.append(left.argmax(-1, keepdim=True))
        left.scatter_(1, found[-1], 0.0)
    return torch.cat(found, -1)


@pytest.mark.parametrize(
    ("chosen", "name"),
    [
        (lambda logits: logits.float().view(torch.int32).topk(3).indices, "choice_by_bits"),
        (lambda logits: logits.abs().topk(3).indices, "choice_by_size"),
        (lambda logits: (-logits).topk(3).indices, "choice_of_the_lowest"),
        (_again, "experts_chosen_again"),
    ],
)
def test_experts_that_are_chosen_otherwise_are_named(chosen: Callable[[Tensor], Tensor], name: str) -> None:
    logits = LOGITS - 0.5 + np.arange(8) / 512  # some of each sign, no two equal
    seen = chosen(torch.tensor(logits)).sort(-1).values.numpy()
    found = made_site("choice", "layers.0.mlp.topk_ids", {"logits": logits}, seen, model=MODEL)
    assert names(found) == {name}


def _other_weights() -> list[tuple[str, ExpertsConfig, Callable[[Tensor, Tensor], Tensor]]]:
    """Name of the cause, the model's experts, and what weights are of logits [N, E] and ids."""
    layers = (True, True, True)

    def mixer(logits: Tensor, ids: Tensor) -> Tensor:
        return torch.tensor(mixed(logits.numpy(), ids.numpy(), 0.01))

    def within(logits: Tensor, ids: Tensor) -> Tensor:
        best = logits.softmax(-1).unflatten(-1, (4, 2)).amax(-1).topk(2).indices
        out = torch.ones(len(logits), 4).scatter_(1, best, 0).bool().repeat_interleave(2, -1)
        return logits.masked_fill(out, -torch.inf).softmax(-1).gather(1, ids)

    plain = ExpertsConfig(8, 3, 48, layers, renormalised=False)
    return [
        (
            "weights_by_softmax_of_chosen",
            replace(plain, scores="sigmoid"),
            lambda x, i: x.gather(1, i).softmax(-1),
        ),
        ("weights_within_groups", replace(plain, groups=4, top_groups=2, group_best=1), within),
        ("choice_weights_number", replace(plain, top_k=2, scores="logits", jitter=0.3), mixer),
    ]


@pytest.mark.parametrize(("name", "experts", "weigh"), _other_weights(), ids=lambda one: str(one)[:24])
def test_weights_that_are_made_otherwise_are_named(
    name: str, experts: ExpertsConfig, weigh: Callable[[Tensor, Tensor], Tensor]
) -> None:
    logits, scores = torch.tensor(LOGITS), torch.tensor(LOGITS)
    if experts.groups > 1:
        best_of = logits.softmax(-1).unflatten(-1, (4, 2)).amax(-1).topk(2).indices
        out = torch.ones(len(logits), 4).scatter_(1, best_of, 0).bool().repeat_interleave(2, -1)
        scores = logits.masked_fill(out, -torch.inf)
    ids = scores.topk(experts.top_k).indices.sort(-1).values
    inputs = {"logits": LOGITS, "ids": ids.numpy()}
    seen, model = weigh(logits, ids).numpy(), of_model(experts=experts)
    found = made_site("choice_weights", "layers.2.mlp.topk_weights", inputs, seen, model=model)
    assert best(found)[0].variant.name == name


CORRECTION = drawn(RNG, 8, size=0.1)
CORRECTED = ExpertsConfig(
    8, 3, 48, (True, True, True), scores="sigmoid", correction=True, groups=4, top_groups=2, group_best=1
)
_BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"


def test_weights_over_the_sum_of_corrected_scores_are_named() -> None:
    taken, own = torch.tensor(LOGITS).sigmoid().gather(1, SORTED), torch.tensor(CORRECTION)[SORTED]
    seen = (taken / (taken + own).sum(-1, keepdim=True)).numpy()
    inputs = {"logits": LOGITS, "ids": SORTED.numpy()}
    found = made_site(
        "choice_weights", "layers.2.mlp.topk_weights", inputs, seen, model=of_model(experts=CORRECTED),
        weights={_BIAS: CORRECTION},
    )  # fmt: skip
    assert names(found) == {"weights_over_corrected"}


@pytest.mark.parametrize(
    ("last", "words"),
    [(None, ("without the correction bias", "from all groups")), (5, ("only experts from 0 to 5",))],
)
def test_choices_among_others_are_named(last: int | None, words: tuple[str, ...]) -> None:
    """Two edits of a choice at once; a choice among the first experts alone."""
    experts = CORRECTED if last is None else ExpertsConfig(8, 3, 48, (True, True, True))
    scores = torch.tensor(LOGITS + np.arange(8) / 512)
    seen = scores[:, : None if last is None else last + 1].topk(3).indices.sort(-1).values.numpy()
    site = made_site(
        "choice", "layers.2.mlp.topk_ids", {"logits": scores.numpy()}, seen, model=of_model(experts=experts),
        weights={_BIAS: 8 * CORRECTION},
    )  # fmt: skip
    text = best(site)[0].variant.text
    assert all(one in text for one in words), text
