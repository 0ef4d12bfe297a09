"""What is said of a linear layer or an embedding where no known mistake fits."""

from __future__ import annotations

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.products.products import product_unknown
from tests.workbench.diagnosis.variants.made import ROWS, drawn, fits, made_site

RNG = np.random.default_rng(0)
NAME = "model.layers.1.mlp.gate_proj.weight"
TOKENS, W, TABLE = drawn(RNG, 5, 64), drawn(RNG, 96, 64, size=0.1), drawn(RNG, 131, 64)
X = TOKENS[[row.token % 5 for row in ROWS]] + drawn(RNG, len(ROWS), 64, size=0.3)


def printed(seen: np.ndarray) -> list[str]:
    site = made_site("linear", "layers.1.mlp.gate", {"x": X}, seen, weights={NAME: W})
    return [
        f"{one.variant.name}: {one.variant.text}" for one in fits(site, [product_unknown]) if one.accepted
    ]


def test_an_input_that_was_not_recorded_is_reported_by_its_output() -> None:
    first = X.copy()
    first[:, :3] = 0
    for x, words in (
        (np.tanh(X), "differs by"),
        (first, "3 of 64 in features, the first is 0, which are zero"),
        (X + drawn(RNG, 64), "the same vector is added to every token"),
        (drawn(RNG, *X.shape), "it has nothing of it"),
    ):
        (found,) = [one for one in printed(x @ W.T) if one.startswith("another_input")]
        assert words in found


def test_weights_that_differ_are_reported_by_the_angles_of_the_error() -> None:
    (found,) = printed(X @ (W * RNG.uniform(0.5, 1.5, W.shape)).T)
    assert found.startswith("weight_differs")
    some = X @ W.T
    some[:, 88:] = X @ drawn(RNG, 8, 64).T
    (found,) = printed(some)
    assert f"8 rows of {NAME} (the first is 88)" in found


def test_noise_on_the_output_is_neither() -> None:
    assert not printed(X @ W.T + drawn(RNG, len(X), 96, size=0.05))


def test_rows_of_the_table_with_other_numbers_are_reported_by_their_ids() -> None:
    ids = [row.token for row in ROWS]
    anew, wrong = drawn(RNG, *TABLE.shape), TABLE[ids]
    for seen, names in (
        (np.where(np.array(ids)[:, None] >= 50, anew[ids], wrong), "ids from 50 on"),
        (np.where(np.array(ids)[:, None] == 41, anew[ids], wrong), "1 ids (41)"),
        (anew[ids], "all ids"),
        (wrong + drawn(RNG, *wrong.shape), ""),
    ):
        site = made_site("embedding", "embed", {}, seen, weights={"model.embed_tokens.weight": TABLE})
        found = [one.variant.text for one in fits(site, [product_unknown]) if one.accepted]
        assert [names in text for text in found] == ([True] if names else []), names
