"""Shards of a rank that begin elsewhere in the weight than they should, made of numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lockstep.workbench.diagnosis.hypotheses.products.products import product_edits, product_maps
from lockstep.workbench.diagnosis.operations.site import Site
from tests.workbench.diagnosis.variants.made import ROWS, Array, drawn, fits, made_site

UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"
OWN = slice(48, 96)


def columns_from(start: int, damage: float = 0.0) -> Site:
    """Rank 1 of 2: a partial of down_proj with the columns from `start` on."""
    rng = np.random.default_rng(1)
    x, weight = drawn(rng, len(ROWS), 48), drawn(rng, 64, 96)
    seen = x @ _held(weight.T, start) + damage * drawn(rng, len(ROWS), 64)
    return made_site(
        "linear",
        "layers.1.mlp.down.partial",
        {"x": x},
        seen,
        weights={DOWN: weight},
        tp=2,
        rank=1,
        columns=OWN,
    )


def rows_from(start: int) -> Site:
    """Rank 1 of 2: up_proj with the rows from `start` on."""
    rng = np.random.default_rng(2)
    x, weight = drawn(rng, len(ROWS), 64), drawn(rng, 96, 64)
    seen = x @ _held(weight, start).T
    return made_site(
        "linear", "layers.1.mlp.up", {"x": x}, seen, weights={UP: weight}, tp=2, rank=1, span=OWN
    )


def _held(whole: Array, start: int) -> Array:
    held = whole[start : start + 48]
    return np.pad(held, ((0, 48 - len(held)), (0, 0)))


@pytest.mark.parametrize(
    ("site", "start", "words"),
    [
        (columns_from(32), 32, "columns of model.layers.1.mlp.down_proj.weight from 32 on, not from 48"),
        (columns_from(56), 56, "past the end of 96 into zeros; 56 is 1 × 56, as if each rank held 56"),
        (rows_from(64), 64, "rows of model.layers.1.mlp.up_proj.weight from 64 on, not from 48"),
    ],
)
def test_where_the_shard_begins_is_reported(site: Site, start: int, words: str) -> None:
    (fit,) = [one for one in fits(site, (product_edits,)) if one.accepted]
    assert (fit.variant.kind, fit.variant.fitted["start"]) == ("sharding", start)
    assert words in fit.variant.text


def test_damage_is_no_other_start() -> None:
    assert not [one for one in fits(columns_from(48, damage=1.0), (product_edits,)) if one.accepted]


@pytest.mark.parametrize(
    ("others", "name"),
    [(1.0, "weight_zero"), (0.0, "input_zero")],
    ids=["others have some", "nobody has any"],
)
def test_a_rank_that_alone_has_nothing_was_never_loaded(others: float, name: str) -> None:
    rng = np.random.default_rng(3)
    x, weight, tap = drawn(rng, len(ROWS), 48), drawn(rng, 64, 96), "layers.1.mlp.down.partial"
    seen = np.zeros((len(ROWS), 64))
    site = made_site(
        "linear", tap, {"x": x}, seen, weights={DOWN: weight}, others={tap: seen + others}, tp=2, rank=1,
        columns=OWN,
    )  # fmt: skip
    (fit,) = [one for one in fits(site, (product_maps,)) if one.accepted]
    assert fit.variant.name == name


def test_a_weight_that_is_not_cut_is_named() -> None:
    rng = np.random.default_rng(3)
    x, weight = drawn(rng, len(ROWS), 64), drawn(rng, 96, 64)
    right = made_site(
        "linear", "layers.1.mlp.up", {"x": x}, x @ weight[OWN].T, weights={UP: weight}, tp=2, span=OWN
    )
    site = replace(right, parts=(replace(right.parts[0], seen=x @ weight.T),))
    (fit,) = [one for one in fits(site, (product_maps,)) if one.accepted]
    assert fit.variant.name == "not_cut"
    assert "with all of model.layers.1.mlp.up_proj, not with its part" in fit.variant.text
