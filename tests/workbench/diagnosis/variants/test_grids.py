"""Results that lie on a grid of levels are named, whatever the recipe of its scales."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lockstep.workbench.diagnosis.operations.site import Site
from tests.workbench.diagnosis.variants.made import ROWS, Array, accepted, made_site, names

RNG = np.random.default_rng(8)
X, Y = (RNG.normal(size=(len(ROWS), 64)).astype(np.float32).astype(np.float64) for _ in range(2))
SUM = X + Y


def site(seen: Array) -> Site:
    return made_site("residual", "layers.1.mlp_residual", {"x": X, "y": Y}, seen)


def integers(scale: Array | float, most: int = 127) -> Array:
    return np.clip(np.rint(SUM / scale), -most, most) * scale


def from_the_least(bits: int) -> Array:
    least, most = SUM.min(0), SUM.max(0)
    step = (most - least) / (2**bits - 1)
    return np.rint((SUM - least) / step) * step + least


GRIDS: list[tuple[Callable[[], Array], tuple[str, ...]]] = [
    (lambda: integers(1 / 32), ("a common step of 1/32",)),
    (lambda: integers(np.abs(SUM).max(1, keepdims=True) / 127), ("a step per token", "8 bits")),
    (lambda: integers(np.abs(SUM).max(0) / 7), ("a step per column", "4 bits")),
    (lambda: integers(np.abs(SUM[0]).max() / 127 / 2), ("clipped to the ends",)),
    (lambda: from_the_least(4), ("a step per column", "4 bits")),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "words"), GRIDS, ids=[" ".join(words) for _, words in GRIDS])
def test_results_on_a_grid_are_named(seen: Callable[[], Array], words: tuple[str, ...]) -> None:
    found = accepted(site(seen()))
    assert [one.variant.name for one in found] == ["quantised"]
    assert all(word in found[0].variant.text for word in words), found[0].variant.text


def test_random_damage_and_numbers_of_a_float_are_not_on_a_grid() -> None:
    for size in (2.0**-9, 0.3):
        assert names(site(SUM * (1 + size * RNG.normal(size=SUM.shape)))) == set()
    fraction, exponent = np.frexp(SUM + 0.01)
    assert "quantised" not in names(site(np.ldexp(np.rint(fraction * 16) / 16, exponent)))
