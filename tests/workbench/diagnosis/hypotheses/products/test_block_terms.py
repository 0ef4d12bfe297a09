"""Quantised weights that were dequantised wrongly, block by block."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.workbench.diagnosis.hypotheses.products.block_terms import block_terms
from lockstep.workbench.diagnosis.operations.site import Site
from tests.workbench.diagnosis.variants.made import ROWS, Array, accepted, drawn, fits, made_site

RNG = np.random.default_rng(0)
NAME = "model.layers.1.mlp.down_proj.weight"
X, W = drawn(RNG, len(ROWS), 96), drawn(RNG, 64, 96, size=0.1)
GROUPS = W.reshape(64, 3, 32)
SCALES = np.abs(GROUPS).max(-1, keepdims=True)
TILES = W.reshape(4, 16, 6, 16)


def site(weight: Array, dtype: str = "float32") -> Site:
    return made_site(
        "linear", "layers.1.mlp.down", {"x": X}, X @ weight.reshape(64, 96).T, weights={NAME: W}, dtype=dtype
    )


FOURS = np.clip(np.round(W / 0.05), -8, 7) * 0.05
LEAST = GROUPS.min(-1, keepdims=True)
BUGS = {
    "neighbour": (GROUPS / SCALES * np.roll(SCALES, 1, 1), "block_scales", "32 in features", "the neighbouring block"),
    "first": (GROUPS / SCALES * SCALES[:, :1], "block_scales", "32 in features", "first block's scale"),
    "exponents": (GROUPS * 2.0 ** RNG.integers(-2, 3, (64, 3, 1)), "block_scales", "each row", "powers of two"),
    "tiles": (TILES * RNG.uniform(0.5, 2, (4, 1, 6, 1)), "block_scales", "16 out features × 16 in", "wrong scale"),
    "minimum": (GROUPS - 2 * LEAST, "block_offsets", "32 in features", "zero point"),
    "asymmetric": (GROUPS * 1.5 - LEAST, "block_scales_and_offsets", "32", "a wrong scale and a wrong"),
    "unsigned": (W + 0.8 * (W < 0), "unsigned", "the whole", "without their sign bit"),
    "two's complement": (W - np.where(W < 0, -0.4, 0.4), "sign_offset", "the whole", "two's complement"),
    "rounded": (np.round(GROUPS / SCALES * 127) / 127 * np.roll(SCALES, 1, 1), "block_scales", "32", "it is rounded"),
}  # fmt: skip


@pytest.mark.parametrize("case", BUGS)
def test_a_block_that_is_dequantised_wrongly_is_named(case: str) -> None:
    weight, name, block, words = BUGS[case]
    (found,) = fits(site(weight), [block_terms])
    assert (found.accepted, found.variant.name) == (True, name)
    assert block in found.variant.text
    assert words in found.variant.text


def test_offsets_of_some_blocks_are_no_adapter() -> None:
    """Of the blocks of sixteen every second takes the zero points of the one before: together a matrix of low rank."""
    groups = W.reshape(64, 6, 16)
    step = np.ptp(groups, axis=-1, keepdims=True) / 15
    zeros = np.round(-groups.min(-1, keepdims=True) / step)
    wrong = groups + step * (zeros - zeros[:, np.arange(6) // 2 * 2])
    first = accepted(site(wrong))[0]
    assert first.variant.name == "block_offsets"
    assert "3 of 6 blocks of 16 in features in each row" in first.variant.text


def test_an_adapter_is_no_offset_of_blocks() -> None:
    down, up = drawn(RNG, 2, 96, size=0.1), drawn(RNG, 64, 2, size=0.1)
    assert accepted(site(W + up @ down))[0].variant.name == "low_rank"


def test_another_ranks_scales_are_reported() -> None:
    own, first = W[:, 48:].reshape(64, 3, 16), np.abs(W[:, :48].reshape(64, 3, 16)).max(-1, keepdims=True)
    wrong = (own / np.abs(own).max(-1, keepdims=True) * first).reshape(64, 48)
    made = made_site("linear", "layers.1.mlp.down.partial", {"x": X[:, 48:]}, X[:, 48:] @ wrong.T, weights={NAME: W},
                     tp=2, rank=1, columns=slice(48, 96))  # fmt: skip
    (found,) = fits(made, [block_terms])
    assert "the scales are those of rank 0's part" in found.variant.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_damage_without_blocks_is_none(dtype: str) -> None:
    for wrong in (
        W + drawn(RNG, 64, 96, size=0.02),
        W * RNG.uniform(0.5, 1.5, W.shape),
        W[RNG.permutation(64)],
    ):
        assert not [one for one in fits(site(wrong, dtype), [block_terms]) if one.accepted]
