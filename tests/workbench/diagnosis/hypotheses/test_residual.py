"""Residual streams as engines get them wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lockstep.workbench.diagnosis.hypotheses.edits import Edit
from lockstep.workbench.diagnosis.hypotheses.operands import READER
from tests.workbench.diagnosis.variants.made import (
    DECODE,
    MODEL,
    ROWS,
    Array,
    accepted,
    best,
    drawn,
    made_site,
    names,
    of_model,
)

pytestmark = pytest.mark.sampled_file(3)

RNG = np.random.default_rng(0)
X, Y, E, N = (drawn(RNG, len(ROWS), 64) for _ in range(4))
EARLIER, INPUT = (drawn(RNG, *X.shape) for _ in range(2))
OTHERS = {
    "embed": E,
    "layers.1.mlp_norm": N,
    "layers.0.mlp_residual": INPUT,
    "layers.0.attn_residual": EARLIER,
}


def site(seen: Array, **options: Any) -> Any:
    return made_site("residual", "layers.1.mlp_residual", {"x": X, "y": Y}, seen, others=OTHERS, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_sum_is_right_in_any_precision(dtype: str) -> None:
    at = getattr(torch, dtype)
    seen = torch.tensor(X).to(at) + torch.tensor(Y).to(at)
    assert site(seen.double().numpy(), dtype=dtype).deviation is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_sum_inside_of_the_product_is_right(dtype: str) -> None:
    """It is of the branch's output before that is rounded, which shows most where the two cancel."""
    at, y = getattr(torch, dtype), torch.tensor(RNG.normal(size=X.shape))
    x = (-y + 0.02 * torch.tensor(X)).to(at).double()
    seen = (x + y).to(at).double()
    inputs = {"x": x.numpy(), "y": y.to(at).double().numpy()}
    assert made_site("residual", "layers.1.mlp_residual", inputs, seen.numpy(), dtype=dtype).deviation is None


CASES: dict[str, tuple[Array, str, str]] = {
    "missing": (Y, "residual_left_out", "stream is not added"),
    "no branch": (X, "residual_left_out", "output is not added"),
    "twice": (2 * X + Y, "residual_repeated", "stream is added 2 times"),
    "branch twice": (X + 2 * Y, "residual_repeated", "added 2 times"),
    "subtracted": (X - Y, "residual_function", "subtracted"),
    "scaled": (X + Y / np.sqrt(2), "residual_applied", "1/sqrt(2)"),
    "both scaled": (0.5 * (X + Y), "residual_applied", "the result is multiplied by 1/2"),
    "odd factor": (X + 0.377 * Y, "residual_applied", "0.377"),
    "after the norm": (N + Y, "residual_operand", "output of the MLP's norm"),
    "parallel": (INPUT + Y, "residual_operand", "enters layer 1"),
    "skipped": (INPUT, "residual_operand", "enters layer 1"),
    "embedding again": (X + Y + E, "residual_applied", "the embedding is added as well"),
    "of another layer": (EARLIER + Y, "residual_operand", "the attention of layer 0"),
    "other token's branch": (
        X + np.roll(Y, 1, axis=0),
        "residual_leaf_rows_moved",
        "MLP's output of another token",
    ),
    "other token added": (
        X + Y + np.roll(X + Y, 1, axis=0),
        "residual_rows_added",
        "the row of another token is added",
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_wrong_sums_are_named(case: str, dtype: str) -> None:
    seen, name, words = CASES[case]
    found = best(site(seen, dtype=dtype))
    assert {one.variant.name for one in found} == {name}, [one.variant.text for one in accepted(site(seen))]
    assert any(words in one.variant.text for one in found), [one.variant.text for one in found]


def test_wrong_in_decode_only() -> None:
    found = site(np.where(DECODE[:, None], Y, X + Y))
    assert (names(found), found.deviation.steps) == ({"residual_left_out"}, (1, 2, 3))


def test_a_stream_in_bfloat16_of_a_float32_engine() -> None:
    found = best(site(torch.tensor(X + Y).bfloat16().double().numpy()))
    assert found[0].variant.text == "the result is rounded to bfloat16"
    assert all("bfloat16" in one.variant.text for one in found)  # also told of results as such


def test_noise_is_given_no_name() -> None:
    for size in (1e-4, 1e-2, 1.0):
        assert accepted(site(X + Y + RNG.normal(0, size, X.shape))) == []


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (X + (1 + 3e-5) * Y, "the MLP's output is multiplied by 1.00003 before"),
        ((1 - 2e-5) * X + Y, "the residual stream is multiplied by 0.99998"),
        ((1 + 4e-5) * (X + Y), "the result is multiplied by 1.00004"),
    ],
)
def test_a_factor_of_nearly_one(seen: Array, words: str) -> None:
    assert words in best(site(seen))[0].variant.text


def test_a_stream_of_eight_bits() -> None:
    low = torch.tensor(X).to(torch.float8_e4m3fn).double().numpy()
    assert "input x: rounded to float8 (e4m3)" in best(site(low + Y))[0].variant.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("tap", "reader", "weight"),
    [
        ("layers.1.attn_residual", "layers.1.mlp_norm", "model.layers.1.post_attention_layernorm.weight"),
        ("layers.0.mlp_residual", "layers.1.attn_norm", "model.layers.1.input_layernorm.weight"),
        (f"layers.{MODEL.num_layers - 1}.mlp_residual", "final_norm", "model.norm.weight"),
    ],
)
def test_the_norm_that_reads_the_sum_goes_on_in_its_place(
    tap: str, reader: str, weight: str, dtype: str
) -> None:
    """Of a norm that overwrites its input the sentence is the same at each of the three, whether what came out of it
    was recorded (it may be wrong itself) or not."""
    stated = "the output of the norm that reads the sum goes on in place of the sum"
    overwritten = (Edit((), "operand", (READER,)),)
    recorded = made_site("residual", tap, {"x": X, "y": Y}, N, others={reader: N}, dtype=dtype)
    w = drawn(RNG, 64)
    normed = torch.nn.functional.rms_norm(torch.tensor(X + Y), (64,), torch.tensor(w), MODEL.rms_eps).numpy()
    alone = made_site("residual", tap, {"x": X, "y": Y}, normed, weights={weight: w}, dtype=dtype)
    for made in (recorded, alone):
        assert [(one.variant.text, one.variant.edits) for one in best(made)] == [(stated, overwritten)]


def test_a_branch_that_is_normed_before_it_is_added() -> None:
    weight = {"model.layers.1.post_attention_layernorm.weight": drawn(RNG, 64)}
    normed = Y / np.sqrt((Y**2).mean(-1, keepdims=True) + 1e-5)
    (w,) = weight.values()
    for seen, words in (
        (X + normed, "divided by its root mean square"),
        (X + normed * w, "multiplied by post_attention_layernorm.weight"),
    ):
        (found,) = best(site(seen, weights=weight))
        assert found.variant.name == "residual_inserted"
        assert words in found.variant.text
    gates = RNG.uniform(0.2, 1, (len(ROWS), 1))
    assert names(site(X + gates * Y)) == {"residual_leaf_rows_scaled"}
    assert not accepted(site(X + Y + 0.1 * RNG.normal(size=X.shape)))


MULTIPLIED = of_model(residual_multiplier=0.22)
SCALARS = {f"model.layers.{layer}.layer_scalar": np.array([by]) for layer, by in enumerate((0.5, 0.75, 1.25))}


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (X + Y, "the MLP's output is not multiplied by 0.22"),
        (X + 0.22 * 0.22 * Y, "residual_multiplier is 0.0484 instead of 0.22"),
        (0.22 * (X + Y), "the residual stream is multiplied by 0.22"),
        (X, "the MLP's output is not added to the residual stream"),
        (INPUT + 0.22 * Y, "enters layer 1"),
    ],
)
def test_a_multiplied_branch(seen: Array, words: str) -> None:
    assert site(X + 0.22 * Y, model=MULTIPLIED).deviation is None
    found = best(site(seen, model=MULTIPLIED))
    assert found
    assert all(words in one.variant.text for one in found), [one.variant.text for one in found]


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (X + Y, "the layer's output is not multiplied by its scalar"),
        (0.75 * 0.75 * (X + Y), "by its scalar twice"),
        (X + 0.75 * Y, "the layer's scalar multiplies the MLP's output, not the sum"),
        (0.75 * X, "the MLP's output is not added to the residual stream"),
        (0.75 * Y, "the residual stream is not added to the MLP's output"),
        (0.5 * (X + Y), "layer_scalar of the layer before is read instead of the layer's scalar"),
    ],
)
def test_a_scaled_sum(seen: Array, words: str) -> None:
    model = of_model(family="gemma4_text", layer_scalar=True)
    assert site(0.75 * (X + Y), model=model, weights=SCALARS).deviation is None
    found = best(site(seen, model=model, weights=SCALARS))
    assert found
    assert all(words in one.variant.text for one in found), [one.variant.text for one in found]
