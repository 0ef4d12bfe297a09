"""Activations as engines get them wrong, made with torch's own functions in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from tests.workbench.diagnosis.variants.made import (
    DECODE,
    ROWS,
    Array,
    accepted,
    best,
    drawn,
    made_site,
    of_model,
)

pytestmark = pytest.mark.sampled_file(3)

RNG = np.random.default_rng(0)
GATE, UP, OTHER = (drawn(RNG, len(ROWS), 96, size=3) for _ in range(3))
G, U = torch.tensor(GATE), torch.tensor(UP)


def site(seen: Array, gate: Array = GATE, up: Array = UP, **options: Any) -> Any:
    others = {"layers.0.mlp.gate": OTHER, "layers.0.mlp.up": OTHER + 1}
    return made_site(
        "activation", "layers.1.mlp.act", {"gate": gate, "up": up}, seen, others=others, **options
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_silu_in_any_precision_is_right(dtype: str) -> None:
    at = getattr(torch, dtype)
    g, u = G.to(at), U.to(at)
    for seen in (F.silu(g) * u, (F.silu(g.float()) * u.float()).to(at), g * torch.sigmoid(g) * u):
        assert site(seen.double().numpy(), dtype=dtype).deviation is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_gate_so_low_that_its_sigmoid_underflows_is_right(dtype: str) -> None:
    gate = np.linspace(-120.0, -6.0, GATE.size).reshape(GATE.shape)
    g, u = (torch.tensor(x).to(getattr(torch, dtype)) for x in (gate, UP))
    forms = [F.silu(g) * u, g * torch.sigmoid(g) * u, g / (1 + torch.exp(-g)) * u]
    for seen in forms[:2] if dtype == "float16" else forms:  # where exp overflows from 12 on
        assert site(seen.double().numpy(), gate, dtype=dtype).deviation is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_result_in_eight_bits_is_named(dtype: torch.dtype) -> None:
    """Its smallest numbers are those that are rounded to steps of one size."""
    right = F.silu(G) * (0.05 * U)
    assert ((right.abs() < 2**-7) & (right != 0)).any()
    found = accepted(site(right.to(dtype).double().numpy(), up=0.05 * UP))
    assert found[0].variant.name == "low_precision"
    assert ("e4m3" if dtype == torch.float8_e4m3fn else "e5m2") in found[0].variant.text


def largest(x: Tensor, count: int) -> Tensor:
    return x.where(x.abs() >= x.abs().topk(count, -1).values[:, -1:], 0.0)


def wrapped(size: int) -> Tensor:
    """Of each pass its gate and up side by side, read at an index below `size`."""
    parts, start = [], 0
    passes = [len(list(rows)) for _, rows in groupby(ROWS, key=lambda row: (row.step, row.seq))]
    for count in passes:
        flat = BOTH[start : start + count].flatten()
        at = torch.arange(count)[:, None] * 192 + torch.arange(96)
        parts.append(F.silu(flat[at % size]) * flat[(at + 96) % size])
        start += count
    return torch.cat(parts)


BOTH = torch.cat([G, U], -1)
CASES: dict[str, tuple[Callable[[], Tensor], str]] = {
    "swapped": (lambda: F.silu(U) * G, "silu(up) * gate"),
    "gelu": (lambda: F.gelu(G) * U, "gelu(gate) * up"),
    "gelu tanh": (lambda: F.gelu(G, approximate="tanh") * U, "gelu"),  # bfloat16 cannot tell them apart
    "quick gelu": (lambda: ACT2FN["quick_gelu"](G) * U, "quick_gelu(gate) * up"),
    "relu": (lambda: F.relu(G) * U, "relu(gate) * up"),
    "sigmoid": (lambda: G.sigmoid() * U, "sigmoid(gate) * up"),
    "mish": (lambda: F.mish(G) * U, "mish(gate) * up"),
    "gelu of up": (lambda: F.gelu(U) * G, "gelu(up) * gate"),
    "no activation": (lambda: G * U, "gate * up"),
    "no product": (lambda: F.silu(G), "silu(gate)"),
    "of the product": (lambda: F.silu(G * U), "silu(gate * up)"),
    "added": (lambda: F.silu(G) + U, "silu(gate) + up"),
    "swish of 1.3": (lambda: G * torch.sigmoid(1.3 * G) * U, "sigmoid(1.3 * gate)"),
    "leaky": (lambda: F.leaky_relu(G, 0.2) * U, "leaky(gate, 0.2)"),
    "interleaved": (lambda: F.silu(BOTH[:, ::2]) * BOTH[:, 1::2], "even_columns(gate, up)"),
    "gate clamped": (lambda: F.silu(G.clamp(max=7.0)) * U, "gate is clamped at 7"),
    "both clamped": (
        lambda: F.silu(G.clamp(max=1.5)) * U.clamp(-1.5, 1.5),
        "up is clamped to ±1.5; gate is clamped at 1.5 from above",
    ),
    "product clamped": (lambda: (F.silu(G) * U).clamp(-20, 20), "clamped to ±20"),
    "dropped": (
        lambda: (F.silu(G) * U).where(G.abs() > 0.4, 0.0),
        "gate is zero where it is below some 0.4 in size",
    ),
    "the largest 40": (lambda: largest(F.silu(G) * U, 40), "only the 40 largest numbers"),
    "wrapped": (lambda: wrapped(1024), "packed side by side, are read at an index that wraps at 1024"),
    "halved": (lambda: 0.5 * F.silu(G) * U, "multiplied by 1/2"),
    "other layer's": (lambda: F.silu(torch.tensor(OTHER)) * U, "gate of layer 0"),
    "other token's": (lambda: (F.silu(G) * U).roll(1, 0), "another token"),
}


#: What any operation may be told to do, as well.
SAME = {"cut_off"}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_other_activations_are_named(case: str, dtype: str) -> None:
    make, words = CASES[case]
    found = best(site(make().numpy(), dtype=dtype))
    assert any(words in one.variant.text for one in found), [
        o.variant.text for o in accepted(site(make().numpy()))
    ]
    assert {one.variant.name for one in found} - SAME == {found[0].variant.name}


def test_gelu_in_float32_loses_the_digits_of_its_tail() -> None:
    """1 + erf cancels far below 0."""
    found = best(site((F.gelu(2 * G.float()) * U.float()).double().numpy(), gate=2 * GATE))
    assert [one.variant.fitted["formula"] for one in found if one.accepted] == ["gelu(gate) * up"]


def test_wrong_in_decode_only() -> None:
    right, wrong = (F.silu(G) * U).numpy(), (F.gelu(G) * U).numpy()
    found = site(np.where(DECODE[:, None], wrong, right))
    assert found.deviation.steps == (1, 2, 3)
    assert [one.variant.fitted["formula"] for one in best(found)] == ["gelu(gate) * up"]


def test_the_product_in_bfloat16_of_a_float32_engine() -> None:
    seen = (F.silu(G).bfloat16().double() * U).numpy()
    assert [one.variant.text for one in best(site(seen))] == ["silu(gate) is rounded to bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_function_and_a_limit_at_once(dtype: str) -> None:
    (found, *_) = best(site((F.gelu(G) * U.clamp(-2, 2)).numpy(), dtype=dtype))
    assert found.variant.text == (
        "up is clamped to ±2: gelu(gate) * clamp(up, ±2) is computed instead of silu(gate) * up"
    )


def test_noise_is_given_no_name() -> None:
    for size in (1e-3, 1.0):
        assert accepted(site((F.silu(G) * U).numpy() + RNG.normal(0, size, GATE.shape))) == []


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (F.silu(G) * U.roll(1, -1), "the columns of up are out of order: moved by 1"),
        (F.silu(G.flip(-1)) * U, "silu(gate) is read backwards"),
        ((F.silu(G) * U).roll(-2, -1), "the result are out of order, 2 after it"),
    ],
)
def test_columns_that_are_paired_otherwise(seen: Tensor, words: str) -> None:
    assert words in best(site(seen.numpy()))[0].variant.text


def test_a_rank_s_gate_with_columns_of_the_whole_up() -> None:
    whole = (UP, OTHER)
    shifted = np.concatenate(whole, -1)[:, 7:103]
    found = made_site(
        "activation", "layers.1.mlp.act", {"gate": GATE, "up": UP}, (F.silu(G) * torch.tensor(shifted)).numpy(),
        tp=2, others={"layers.1.mlp.up": whole},
    )  # fmt: skip
    assert "the columns of up of all ranks are out of order, 7 after it" in best(found)[0].variant.text


def test_an_mlp_without_a_gate_is_diagnosed_as_well() -> None:
    """As Nemotron-H's, relu² of up: nothing that is tried looks for a gate."""
    model = of_model(gated=False, activation="relu2")
    found = best(made_site("activation", "layers.1.mlp.act", {"up": UP}, F.relu(U).numpy(), model=model))
    assert [one.variant.name for one in found] == ["activation_function"]
    right = made_site("activation", "layers.1.mlp.act", {"up": UP}, F.relu(U).square().numpy(), model=model)
    assert right.deviation is None
