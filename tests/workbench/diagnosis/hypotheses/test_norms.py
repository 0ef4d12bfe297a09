"""Norms as engines get them wrong, made with torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lockstep.engine.config.latent import LatentConfig
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
X = drawn(RNG, len(ROWS), 64) * 2.0 ** RNG.integers(-7, -2, size=(len(ROWS), 1))
W = 1 + drawn(RNG, 64) / 4
WEIGHTS = {
    f"model.layers.{i}.{kind}.weight": 1 + drawn(RNG, 64) / 4
    for i in range(3)
    for kind in ("input_layernorm", "post_attention_layernorm")
} | {"model.layers.1.input_layernorm.weight": W, "model.norm.weight": 1 + drawn(RNG, 64) / 4}
EPS = MODEL.rms_eps


def norm(x: Array = X, weight: Array = W, eps: float = EPS) -> Array:
    return F.rms_norm(torch.tensor(x), (x.shape[-1],), torch.tensor(weight), eps).numpy()


def site(seen: Array, **options: Any) -> Any:
    return made_site("norm", "layers.1.attn_norm", {"x": X}, seen, weights=WEIGHTS, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_equivalent_norms_are_no_deviation(dtype: str) -> None:
    at = getattr(torch, dtype)
    x, w = torch.tensor(X).to(at), torch.tensor(W).to(at)
    before = w * F.rms_norm(x.float(), (64,), None, EPS).to(at)
    after = (w.float() * F.rms_norm(x.float(), (64,), None, EPS)).to(at)
    for seen in (before, after, F.rms_norm(x, (64,), w, EPS)):
        assert site(seen.double().numpy(), dtype=dtype).deviation is None


T = torch.tensor(X)
SQUARES = T.pow(2).mean(-1, keepdim=True)
CASES: dict[str, tuple[Callable[[], Array], str, str]] = {
    "epsilon": (lambda: norm(eps=1e-5), "norm_number", "1e-05 instead of 1e-06"),
    "odd epsilon": (lambda: norm(eps=3.3e-4), "norm_number", "0.00033 instead"),
    "no epsilon": (lambda: norm(eps=0.0), "norm_left_out", "no epsilon"),
    "epsilon outside": (lambda: (T / (SQUARES.sqrt() + EPS)).numpy() * W, "norm_outside", "outside"),
    "weight absent": (lambda: norm(weight=np.ones(64)), "norm_left_out", "is not applied"),
    "one plus weight": (lambda: norm(weight=1 + W), "norm_applied", "1 + w"),
    "weight twice": (lambda: norm(weight=W * W), "norm_applied", "twice"),
    "other norm's weight": (
        lambda: norm(weight=WEIGHTS["model.layers.1.post_attention_layernorm.weight"]),
        "norm_operand", "post_attention_layernorm.weight of the same layer is read",
    ),
    "other layer's weight": (
        lambda: norm(weight=WEIGHTS["model.layers.0.input_layernorm.weight"]),
        "norm_operand", "input_layernorm.weight of the layer before is read",
    ),
    "layer norm": (lambda: F.layer_norm(T, (64,), torch.tensor(W), None, EPS).numpy(), "norm_applied", "LayerNorm"),
    "sum for mean": (
        lambda: (T / T.pow(2).sum(-1, keepdim=True).add(EPS).sqrt()).numpy() * W, "norm_function", "summed",
    ),
    "no root": (lambda: (T / SQUARES.add(EPS)).numpy() * W, "norm_left_out", "not its root"),
    "inverted": (lambda: (T * SQUARES.add(EPS).sqrt()).numpy() * W, "norm_function", "reciprocal"),
    "not normalised": (lambda: X * W, "norm_left_out", "not normalised"),
    "skipped": (lambda: X, "norm_skipped", "is skipped"),
    "twice": (lambda: norm(norm()), "norm_repeated", "twice"),
    "halves": (
        lambda: torch.cat([F.rms_norm(half, (32,), None, EPS) for half in T.chunk(2, -1)], -1).numpy() * W,
        "norm_function", "each of 2 parts",
    ),
    "first half's size": (
        lambda: (T / T[:, :32].pow(2).mean(-1, keepdim=True).add(EPS).sqrt()).numpy() * W,
        "norm_function", "part 0 of 2",
    ),
    "neighbour's row": (lambda: np.roll(norm(), 1, axis=0), "norm_rows_moved", "token 1 before"),
    "scaled": (lambda: 8.0 * norm(), "norm_applied", "multiplied by 8"),
    "bias": (lambda: norm() + np.linspace(-1, 1, 64), "norm_row_added", "same vector"),
    "unknown weight": (lambda: norm(weight=RNG.normal(size=64)), "norm_columns_scaled", "factor of its own"),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_wrong_norms_are_named(case: str, dtype: str) -> None:
    make, name, words = CASES[case]
    found = site(make(), dtype=dtype, tp=2)
    if dtype == "bfloat16" and found.deviation is None:
        assert case in ("epsilon outside", "no epsilon")  # within a rounding
        return
    reported = [one.variant for one in best(found) if one.variant.name == name]
    assert reported, [one.variant.text for one in accepted(found)]
    assert words in reported[0].text
    # The epsilons that bfloat16 cannot tell apart are all reported, and nothing else.
    assert {one.variant.name for one in best(found)} == {name}, [o.variant.text for o in best(found)]


def test_the_input_of_another_place() -> None:
    before, down = X / 4, drawn(RNG, *X.shape)
    others = {"layers.0.attn_residual": before, "layers.0.mlp.down": down, "embed": before + down}
    for seen, kind, words in (
        (before, "norm", "the stream after the attention of layer 0 is read"),
        (down, "residual", "the MLP's output of layer 0 is read"),
        (before + down, "residual", "the embedding is read"),
    ):
        (found,) = best(site(norm(seen), others=others))
        assert (found.variant.kind, words in found.variant.text) == (kind, True), found.variant.text


def test_a_norm_wrong_in_decode_only() -> None:
    seen = np.where(DECODE[:, None], X, norm())
    found = site(seen)
    assert found.deviation.steps == (1, 2, 3)
    assert names(found) == {"norm_skipped"}


def test_heads_are_normalised_together() -> None:
    x, w, other_w = drawn(RNG, len(ROWS), 4, 16), 1 + drawn(RNG, 16) / 4, 1 + drawn(RNG, 16) / 4
    seen = F.rms_norm(torch.tensor(x).flatten(1), (64,), None, EPS).reshape(x.shape).numpy() * w
    name = "layers.1.attn.q_norm"
    weights = {"model.layers.1.self_attn.q_norm.weight": w, "model.layers.1.self_attn.k_norm.weight": other_w}
    inputs = {"x": x.reshape(len(x), -1)}
    model = of_model(family="qwen3", qk_norm=True)
    assert names(made_site("norm", name, inputs, seen, weights=weights, model=model)) == {"norm_function"}
    other = F.rms_norm(torch.tensor(x), (16,), torch.tensor(other_w), EPS).numpy()
    found = best(made_site("norm", name, inputs, other, weights=weights, model=model))
    assert "self_attn.k_norm.weight of the same layer is read" in " ".join(one.variant.text for one in found)


def test_a_norm_over_the_whole_row_by_the_rank_s_own_squares() -> None:
    model = of_model(family="olmo2", qk_norm=True, qk_norm_whole=True)
    whole, w = drawn(RNG, len(ROWS), 64) * np.repeat([1.0, 3.0], 32), 1 + drawn(RNG, 64) / 4
    x, own = torch.tensor(whole[:, 32:]), torch.tensor(w[32:])
    found = made_site(
        "norm", "layers.1.attn.q_norm", {"x": whole[:, 32:], "whole": whole}, F.rms_norm(x, (32,), own, EPS).numpy(),
        weights={"model.layers.1.self_attn.q_norm.weight": w}, model=model, tp=2, rank=1, span=slice(32, 64),
    )  # fmt: skip
    (reported,) = best(found)
    assert (
        reported.variant.text
        == "the mean of squares is over the rank's own 32 columns, not over all 64 of the 2 ranks"
    )


def test_a_norm_of_a_rank_s_own_heads_that_reads_the_weight_from_its_beginning() -> None:
    """As where each rank normalises what it has by `weight[:width]`: right in the first rank's weight alone."""
    model = of_model(family="olmo2", qk_norm=True, qk_norm_whole=True)
    whole, w = drawn(RNG, len(ROWS), 64) * np.repeat([1.0, 3.0], 32), 1 + drawn(RNG, 64) / 4
    x, first = torch.tensor(whole[:, 32:]), torch.tensor(w[:32])
    found = made_site(
        "norm", "layers.1.attn.q_norm", {"x": whole[:, 32:], "whole": whole}, F.rms_norm(x, (32,), first, EPS).numpy(),
        weights={"model.layers.1.self_attn.q_norm.weight": w}, model=model, tp=2, rank=1, span=slice(32, 64),
    )  # fmt: skip
    reported = best(found)[0].variant.text
    assert "the mean of squares is over the rank's own 32 columns" in reported
    assert "the weight of the first rank's channels" in reported


def whole_heads(seen: Array, x: Array, w: Array) -> Any:
    """A norm over all heads on a rank that has gathered them all."""
    model = of_model(family="olmo2", qk_norm=True, qk_norm_whole=True)
    weights = {"model.layers.1.self_attn.q_norm.weight": w}
    inputs = {"x": x, "whole": x}
    return made_site("norm", "layers.1.attn.q_norm", inputs, seen, weights=weights, model=model, tp=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gathered_heads_normalised_by_the_squares_of_each_rank(dtype: str) -> None:
    x, w = torch.tensor(drawn(RNG, len(ROWS), 64) * np.repeat([1.0, 3.0], 32)), 1 + drawn(RNG, 64) / 4
    x = x.to(getattr(torch, dtype)).double()
    shards = torch.cat([F.rms_norm(shard, (32,), None, EPS) for shard in x.chunk(2, -1)], -1).numpy() * w
    (reported,) = best(whole_heads(shards, x.numpy(), w))
    assert reported.variant.text.startswith(
        "the mean of squares is over 32 columns, not over all 64: each of 2 parts"
    )


def test_gathered_heads_normalised_otherwise_are_not_taken_for_shards() -> None:
    x, w = drawn(RNG, len(ROWS), 64) * np.repeat([1.0, 3.0], 32), 1 + drawn(RNG, 64) / 4
    t = torch.tensor(x)
    assert whole_heads(F.rms_norm(t, (64,), torch.tensor(w), EPS).numpy(), x, w).deviation is None
    heads = F.rms_norm(t.unflatten(-1, (4, 16)), (16,), None, EPS).flatten(1).numpy() * w
    for seen in (heads, norm(x, w, eps=0.5), norm(x, w) * np.linspace(0.5, 2, len(x))[:, None]):
        texts = [one.variant.text for one in best(whole_heads(seen, x, w))]
        assert not any("over 32 columns" in text for text in texts), texts


def test_rounding_before_the_weight_in_a_float32_engine() -> None:
    seen = (F.rms_norm(T, (64,), None, EPS).bfloat16().double() * torch.tensor(W)).numpy()
    (found,) = best(site(seen))
    assert found.variant.text == "the normalised row is rounded to bfloat16"


def test_the_mean_square_in_bfloat16_of_a_float32_engine() -> None:
    low = T.bfloat16()
    seen = (T * torch.rsqrt(low.pow(2).mean(-1, keepdim=True).double() + EPS)).numpy() * W
    (found,) = best(site(seen))
    assert found.variant.text == "the mean square is computed in bfloat16"


def test_epsilon_and_the_weight_s_convention_at_once() -> None:
    (found,) = best(site(norm(weight=1 + W, eps=1e-4)))
    assert "is applied as 1 + w; epsilon is 0.0001 instead of 1e-06" in found.variant.text


def test_noise_is_given_no_name() -> None:
    for size in (1e-4, 1e-2, 1.0):
        assert accepted(site(norm() + RNG.normal(0, size, X.shape))) == []


def test_single_channels_of_the_weight() -> None:
    weight = W.copy()
    weight[[9, 30]] *= (-1, 1.5)
    first = best(site(norm(weight=weight)))[0].variant
    assert first.fitted["numbers"] == pytest.approx([9, -1, 30, 1.5], rel=1e-6)
    assert "single channels differ: 9 is -1 times" in first.text


def test_a_copy_that_differs_from_the_other_ranks_is_sharding() -> None:
    seen = norm() * 1.01
    found = made_site(
        "norm", "layers.1.attn_norm", {"x": X}, seen, weights=WEIGHTS, rank=1, tp=2,
        others={"layers.1.attn_norm": (norm(), seen)},
    )  # fmt: skip
    first = best(found)[0].variant
    assert (first.name, first.kind) == ("norm_applied", "sharding")
    assert "the copy of rank 1 differs" in first.text


def test_the_weight_of_eight_bits() -> None:
    low = torch.tensor(W).to(torch.float8_e4m3fn).double().numpy()
    assert "weight: rounded to float8 (e4m3)" in best(site(norm(weight=low)))[0].variant.text


def test_the_input_in_tf32() -> None:
    given = torch.tensor(X * 1.0137).float()
    low = (given.view(torch.int32) & ~0x1FFF).view(torch.float32).double().numpy()
    found = made_site("norm", "layers.1.attn_norm", {"x": given.double().numpy()}, norm(low), weights=WEIGHTS)
    assert "input x: rounded to TF32" in best(found)[0].variant.text


BIASES = {name.replace("weight", "bias"): drawn(RNG, 64) / 4 for name in WEIGHTS}
B = BIASES["model.layers.1.input_layernorm.bias"]
SHIFTED = T - T.mean(-1, keepdim=True)


def layer_norm(x: Any = T, weight: Array = W, bias: Array = B, eps: float = EPS) -> Array:
    return F.layer_norm(x, (64,), torch.tensor(weight), torch.tensor(bias), eps).numpy()


#: By the form of norm that the model has: what ran, and what is reported.
OF_FORM: dict[str, tuple[str, Callable[[], Array], str]] = {
    "no bias": ("layer", lambda: layer_norm(bias=0 * B), "input_layernorm.bias is not added"),
    "RMSNorm": ("layer", lambda: norm() + B, "RMSNorm runs in place of LayerNorm"),
    "RMSNorm without bias": ("layer", norm, "RMSNorm runs in place of LayerNorm"),
    "epsilon of LayerNorm": ("layer", lambda: layer_norm(eps=1e-3), "epsilon is 0.001 instead of 1e-06"),
    "no weight": ("layer", lambda: layer_norm(weight=np.ones(64)), "input_layernorm.weight is not applied"),
    "one element less": ("layer", lambda: (SHIFTED / T.std(-1, keepdim=True)).numpy() * W + B, "one element less"),
    "another norm's bias": (
        "layer", lambda: layer_norm(bias=BIASES["model.layers.1.post_attention_layernorm.bias"]),
        "post_attention_layernorm.bias of the same layer is read instead of model.layers.1.input_layernorm.bias",
    ),
    "vectors of the layer before": (
        "layer", lambda: layer_norm(
            T, WEIGHTS["model.layers.0.input_layernorm.weight"], BIASES["model.layers.0.input_layernorm.bias"]
        ), "input_layernorm.bias of the layer before is read",
    ),
    "root mean square": (
        "layer", lambda: (SHIFTED / (SQUARES + EPS).sqrt()).numpy() * W + B, "not its standard deviation",
    ),
    "bias before": ("layer", lambda: layer_norm(T + torch.tensor(B), bias=0 * B), "is added before the norm"),
    "bias twice": ("layer", lambda: layer_norm() + B, "input_layernorm.bias is multiplied by 2"),
    "bias subtracted": ("layer", lambda: layer_norm(bias=-B), "input_layernorm.bias is subtracted"),
    "skipped": ("layer", lambda: X, "is skipped"),
    "LayerNorm's 1 + w as w": ("layer_plus_one", layer_norm, "applied as w, not as 1 + w"),
    "1 + w as w": ("plus_one", norm, "applied as w, not as 1 + w"),
    "2 + w": ("plus_one", lambda: norm(weight=2 + W), "1 is added twice"),
    "centred": ("centred", norm, "RMSNorm runs in place of LayerNorm"),
    "bare": ("bare", lambda: norm(weight=np.ones(64)), "RMSNorm runs in place of LayerNorm"),
    "bare, not divided": ("bare", SHIFTED.numpy, "not divided by its standard deviation"),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_FORM)
@pytest.mark.sampled(2)
def test_norms_of_another_form_are_named(case: str) -> None:
    form, make, words = OF_FORM[case]
    held = {} if form == "bare" else {**WEIGHTS, **(BIASES if form.startswith("layer") else {})}
    at = made_site(
        "norm", "layers.1.attn_norm", {"x": X}, make(), weights=held, model=of_model(norm=form), tp=2
    )  # fmt: skip
    found = best(at)
    assert found
    assert all(words in one.variant.text for one in found), [one.variant.text for one in found]


def test_a_latent_whose_rotated_part_is_taken_from_the_front() -> None:
    model = of_model(latent=LatentConfig(kv_rank=32, plain_dim=16, rope_dim=8, value_dim=16))
    written, w, tap = drawn(RNG, len(ROWS), 40), 1 + drawn(RNG, 32) / 4, "layers.1.attn.kv_a_norm"
    seen = norm(written[:, 8:], w)
    site = made_site(
        "norm", tap, {"x": written[:, :32]}, seen, model=model, others={"layers.1.attn.kv_a_proj": written},
        weights={"model.layers.1.self_attn.kv_a_layernorm.weight": w},
    )  # fmt: skip
    assert "the rotated part being taken from its front" in best(site)[0].variant.text
