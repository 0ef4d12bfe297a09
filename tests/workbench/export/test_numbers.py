"""Numbers as text: one form each, and NaN is never passed off as a number."""

from __future__ import annotations

import math

import pytest

from workbench.export.numbers import chance, fixed


@pytest.mark.parametrize(
    ("probability", "told"),
    [
        (None, "-"), (math.nan, "NaN"), (math.inf, "∞"), (0.0, "0"), (1.0, "1.0000"), (0.6065, "0.6065"),
        (0.01, "0.0100"), (1 / 120, "1 in 120"), (1 / 39_800, "1 in 40,000"), (4e-8, "1 in 2e7"),
    ],
)  # fmt: skip
def test_a_probability_says_something(probability: float | None, told: str) -> None:
    assert chance(probability) == told


def test_decimals_only_of_numbers() -> None:
    assert [fixed(value, 2) for value in (1.0, math.nan, -math.inf, None)] == ["1.00", "NaN", "-∞", "-"]
