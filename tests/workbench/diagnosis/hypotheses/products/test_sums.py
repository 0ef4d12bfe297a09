"""Sums in pieces of fewer bits, and sums of what a buffer held before, are named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from lockstep.engine.config.experts import ExpertsConfig
from lockstep.workbench.diagnosis.banks import stages
from lockstep.workbench.diagnosis.operations.site import Site
from tests.workbench.diagnosis.variants.made import (
    DECODE,
    MODEL,
    ROWS,
    Array,
    accepted,
    drawn,
    fits,
    made_site,
    of_model,
)

pytestmark = pytest.mark.sampled_file(2)

RNG = np.random.default_rng(4)
TAP = "layers.1.attn.o_proj"
PARTIALS = RNG.normal(size=(2, len(ROWS), MODEL.hidden_size)).astype(np.float32)
OTHERS = {
    f"layers.{layer}.{kind}": tuple(RNG.normal(size=PARTIALS.shape).astype(np.float32).astype(np.float64))
    for layer in range(3)
    for kind in ("attn.o_proj", "attn.o_proj.partial", "mlp.down", "mlp.down.partial")
}


def low(x: Array, dtype: torch.dtype = torch.bfloat16) -> Array:
    return torch.from_numpy(np.asarray(x, np.float32)).to(dtype).double().numpy()


def int8(x: Array) -> Array:
    scale = np.abs(x).max(-1, keepdims=True) / 127
    return np.rint(x / scale) * scale


def own_term(tap: str, seen: Array, x: Array, weight: Array) -> Site:
    """Rank 1's term of a sum over two ranks: `x` and `weight` are whole, `seen` is what the rank has."""
    kind, module = (
        ("mlp.shared.act", "mlp.shared_expert.down_proj") if "shared" in tap else ("mlp.act", "mlp.down_proj")
    )
    experts = ExpertsConfig(count=4, top_k=2, width=8, layers=(True,) * 3, shared_width=x.shape[1])
    half = x.shape[1] // 2
    others = {f"layers.1.{kind}": (x[:, :half], x[:, half:])}
    return made_site(
        "linear", tap, {"x": x[:, half:]}, seen, weights={f"model.layers.1.{module}.weight": weight}, others=others,
        model=of_model(family="qwen2_moe", experts=experts) if "shared" in tap else MODEL,
        tp=2, rank=1, columns=slice(half, 2 * half),
    )  # fmt: skip


@pytest.mark.parametrize("tap", ["layers.1.mlp.shared.down", "layers.1.mlp.down.partial"])
def test_a_term_that_is_the_sum_already_is_named(tap: str) -> None:
    x, weight = drawn(RNG, len(ROWS), 96), drawn(RNG, 64, 96)
    terms = torch.tensor(x) @ torch.tensor(weight).T
    first = accepted(own_term(tap, terms.numpy(), x, weight))[0].variant
    assert (first.name, first.kind) == ("summed_already", "reduce")
    assert "rank 1 has the whole sum where its own term is due" in first.text
    assert "counts 2 times" in first.text


def test_other_terms_are_not_taken_for_the_sum() -> None:
    x, weight, tap = drawn(RNG, len(ROWS), 96), drawn(RNG, 64, 96), "layers.1.mlp.shared.down"
    own, other = x[:, 48:] @ weight[:, 48:].T, x[:, :48] @ weight[:, :48].T
    assert own_term(tap, own, x, weight).deviation is None
    for seen in (2 * own, other, own + 2 * other, x[:, 48:] @ weight[:, :48].T, own / 2):
        found = accepted(own_term(tap, seen, x, weight))
        assert "summed_already" not in {one.variant.name for one in found}


def reduced(seen: Array) -> Site:
    others = {**OTHERS, TAP: seen.astype(np.float64), f"{TAP}.partial": tuple(PARTIALS.astype(np.float64))}
    return made_site("reduce", TAP, {"partial": PARTIALS}, seen, others=others, tp=2)


def decode(changed: Array) -> Array:
    return np.where(DECODE[:, None], changed, PARTIALS.sum(0))


SUMS: list[tuple[Callable[[], Array], str, str]] = [
    (lambda: low(PARTIALS).sum(0), "low_precision_sum", "partial sums are rounded to bfloat16"),
    (lambda: low(PARTIALS[0]) + PARTIALS[1], "low_precision_sum", "rank 0 is rounded to bfloat16"),
    (lambda: int8(PARTIALS).sum(0), "low_precision_sum", "int8 with a scale per row"),
    (lambda: decode(OTHERS["layers.0.attn.o_proj"][0]), "stale_output", "that of layer 0"),
    (lambda: decode(OTHERS["layers.2.mlp.down"][0]), "stale_output", "what layers.2.mlp.down held"),
    (lambda: decode(PARTIALS[0] + OTHERS["layers.0.attn.o_proj.partial"][1]), "stale_partial", "of layer 0"),
    (lambda: decode(PARTIALS[1] + OTHERS["layers.1.mlp.down.partial"][0]), "stale_partial", "mlp.down.partial held"),
    (lambda: decode(PARTIALS[0] + np.roll(PARTIALS[1], 1, 0)), "stale_partial", "token that ran just before"),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "name", "words"), SUMS, ids=[words for _, _, words in SUMS])
def test_wrong_sums_over_the_ranks_are_named(seen: Callable[[], Array], name: str, words: str) -> None:
    found = accepted(reduced(seen()))
    assert found[0].variant.name == name
    assert words in found[0].variant.text


LAST = stages("linear")[1]
X, WEIGHT = drawn(RNG, len(ROWS), 96), drawn(RNG, 64, 96, size=0.1)


def product(seen: Array) -> Site:
    weights = {"model.layers.1.mlp.down_proj.weight": WEIGHT}
    return made_site("linear", "layers.1.mlp.down", {"x": X}, seen, weights=weights)


def pieces(count: int, x: Array = X, weight: Array = WEIGHT) -> list[Array]:
    cuts = zip(np.split(x, count, 1), np.split(weight, count, 1), strict=True)
    return [(a @ b.T).astype(np.float32) for a, b in cuts]


def running(parts: list[Array]) -> Array:
    total = low(parts[0])
    for part in parts[1:]:
        total = low(total + part)
    return total


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (np.sum([low(one) for one in pieces(4)], 0), "4 pieces of 24 in features, each kept in bfloat16"),
        (np.sum([low(one, torch.float16) for one in pieces(8)], 0), "8 pieces of 12 in features, each kept in float16"),
        (np.sum([low(X[:, i::2] @ WEIGHT[:, i::2].T) for i in (0, 1)], 0), "dealt in turn, each kept in bfloat16"),
        (running(pieces(6)), "6 pieces of 16 in features, the sum so far kept in bfloat16"),
    ],
)  # fmt: skip
def test_products_in_pieces_of_fewer_bits_are_named(seen: Array, words: str) -> None:
    texts = [one.variant.text for one in fits(product(seen), LAST) if one.accepted]
    assert texts
    assert any(words in text for text in texts), texts


def test_random_damage_is_not_blamed_on_sums() -> None:
    for size in (2.0**-9, 0.5):
        noise = 1 + size * RNG.normal(size=(len(ROWS), 64))
        assert accepted(reduced(PARTIALS.sum(0) * noise)) == []
        assert not [one for one in fits(product(X @ WEIGHT.T * noise), LAST) if one.accepted]
