"""Rows of experts with what is not theirs: made with torch in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

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


@pytest.mark.parametrize("by", ["step", "sequence"])
def test_rows_beyond_the_capacity_of_an_expert_are_named(by: str) -> None:
    right, met = _rows(IDS) + torch.tensor(BIASES)[IDS], Counter[tuple[int, int, int]]()
    for token, row in enumerate(ROWS):
        for slot, expert in enumerate(IDS[token].tolist()):
            met[key := (row.step, row.seq * (by == "sequence"), expert)] += 1
            right[token, slot] *= met[key] <= 4
    found = _site(right)
    assert names(found) == {"experts_capacity"}
    assert "takes 4 rows of a pass" in best(found)[0].variant.text


@pytest.mark.parametrize(
    ("factors", "name", "words"),
    [
        (torch.full((COUNT,), 0.5), "experts_scaled", "the experts' product is 1/2 times"),
        (torch.linspace(0.6, 1.7, COUNT), "experts_scaled_apart", "a factor of each expert, 0.6 to 1.7"),
    ],
)
def test_products_off_by_a_factor_are_named(factors: torch.Tensor, name: str, words: str) -> None:
    """Biases are right: they are added behind."""
    found = _site(_rows(IDS) * factors.double()[IDS][..., None] + torch.tensor(BIASES)[IDS])
    assert names(found) == {name}
    assert words in best(found)[0].variant.text


def test_weights_of_before_an_update_are_told_from_noise() -> None:
    random = torch.Generator().manual_seed(2)
    right = _rows(IDS) + torch.tensor(BIASES)[IDS]
    former = 0.02 * torch.randn(MATRICES.shape, generator=random, dtype=torch.float64)
    stale = _site(right + torch.einsum("nsoi,ni->nso", former[IDS], torch.tensor(X)))
    assert names(stale) == {"experts_differ"}
    noise = 0.2 * torch.randn(right.shape, generator=random, dtype=torch.float64)
    assert not names(_site(right + noise))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda rows: [rows[0], *rows[:-1]], "scale of the token before"),
        (lambda rows: [rows[-1]] * len(rows), "scale of the last token"),
    ],
)
@pytest.mark.parametrize("bits", [0, 8])
def test_rows_that_are_read_with_the_scale_of_another_are_named(
    other: Callable[[list[int]], list[int]], words: str, bits: int
) -> None:
    """In the prompts alone, where a pass of a sequence has several tokens."""
    largest = torch.tensor(X).abs().amax(-1, keepdim=True)
    read, scale = torch.tensor(X), largest.clone()
    for seq in range(2):
        rows = [i for i, row in enumerate(ROWS) if row.step == 0 and row.seq == seq]
        scale[rows] = largest[other(rows)]
    if bits:
        read = (read / largest * 127).round() / 127 * largest
    through = torch.einsum("nsoi,ni->nso", torch.tensor(MATRICES)[IDS], read * scale / largest)
    found = _site(through + torch.tensor(BIASES)[IDS])
    assert names(found) == {"expert_rows_scaled"}
    text = best(found)[0].variant.text
    assert words in text
    assert ("of eight bits" in text) == bool(bits)
