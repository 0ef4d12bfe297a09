"""Bases that change from step to step, and rotations that run before the norm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.workbench.diagnosis.hypotheses.rotation.test_rotation import X, site
from tests.workbench.diagnosis.variants.made import (
    DECODE,
    POSITIONS,
    ROWS,
    Array,
    best,
    drawn,
    made_site,
    names,
    of_model,
)

pytestmark = pytest.mark.sampled_file(2)

DIM = X.shape[-1]
W = 1 + drawn(np.random.default_rng(3), DIM) / 4


def turned(x: Array, bases: Array) -> Array:
    """Each token's heads by a base of its own, [N]."""
    angles = POSITIONS[:, None, None] * bases[:, None, None] ** -(np.arange(0, DIM, 2) / DIM)
    z = (x[..., : DIM // 2] + 1j * x[..., DIM // 2 :]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], -1)


def test_a_base_made_anew_in_each_decode_step_is_reported_with_its_rule() -> None:
    lengths = np.array([row.length for row in ROWS])
    grown = 5e5 * (2.0 * lengths / 4 - 1) ** (DIM / (DIM - 2))
    found = best(site(turned(X, np.where(DECODE, grown, 5e5))))[0].variant
    assert (found.name, found.kind) == ("rope_theta_by_step", "rope")
    assert "dynamic NTK scaling by 2 of a context trained to 4" in found.text


def test_random_damage_to_a_rotation_is_not_blamed_on_its_base() -> None:
    noise = 1 + 1e-2 * np.random.default_rng(2).random(X.shape)
    assert "rope_theta_by_step" not in names(site(turned(X, np.full(len(X), 5e5)) * noise))


def test_a_rotation_before_the_norm_is_reported_at_the_norm() -> None:
    def normed(x: Array) -> Array:
        return F.rms_norm(torch.tensor(x), (DIM,), torch.tensor(W), 1e-6).numpy()

    def at_norm(seen: Array) -> set[str]:
        weights, given = {"model.layers.1.self_attn.q_norm.weight": W}, {"x": X.reshape(len(X), -1)}
        model = of_model(family="qwen3", qk_norm=True)
        found = made_site("norm", "layers.1.attn.q_norm", given, seen, weights=weights, model=model)
        return names(found) if found.deviation is not None else set()

    assert at_norm(normed(X)) == set()
    assert at_norm(normed(turned(X, np.full(len(X), 5e5)))) == {"norm_inserted"}
    noise = 1 + 0.1 * np.random.default_rng(2).random(X.shape)
    assert "norm_inserted" not in at_norm(normed(X) * noise)


def test_pairs_at_positions_of_their_own_are_reported_with_their_rule() -> None:
    """Sections of pairs for time, height and width: the last one stands still."""
    at = np.repeat(POSITIONS[:, None, None], DIM // 2, axis=-1)
    at[..., 5:] = 2.0
    z = (X[..., : DIM // 2] + 1j * X[..., DIM // 2 :]) * np.exp(
        1j * at * 5e5 ** -(np.arange(0, DIM, 2) / DIM)
    )
    found = best(site(np.concatenate([z.real, z.imag], -1)))[0].variant
    assert (found.name, found.kind) == ("positions_of_pairs", "positions")
    assert "pairs 5 to 7 of 8" in found.text
    assert "position 2" in found.text


def test_pairs_of_an_image_s_grid_are_reported_by_section() -> None:
    at = np.repeat(POSITIONS[:, None, None], DIM // 2, axis=-1)
    at[..., 4:6], at[..., 6:] = at[..., 4:6] // 4, at[..., 6:] % 4
    z = (X[..., : DIM // 2] + 1j * X[..., DIM // 2 :]) * np.exp(
        1j * at * 5e5 ** -(np.arange(0, DIM, 2) / DIM)
    )
    found = best(site(np.concatenate([z.real, z.imag], -1)))[0].variant
    assert (found.name, found.kind) == ("positions_of_pairs", "positions")
    assert "pairs 4 to 5 of 8" in found.text
    assert "pairs 6 to 7 of 8" in found.text


def test_frequencies_up_to_half_a_turn_are_reported() -> None:
    twice = 5e5 ** -(np.arange(0, DIM, 2) / DIM) * np.where(np.arange(DIM // 2) < 4, 2.0, 1.0)
    z = (X[..., : DIM // 2] + 1j * X[..., DIM // 2 :]) * np.exp(1j * POSITIONS[:, None, None] * twice)
    found = {one.variant.name for one in best(site(np.concatenate([z.real, z.imag], -1)))}
    assert found & {"rope_frequencies", "positions_of_pairs"}
