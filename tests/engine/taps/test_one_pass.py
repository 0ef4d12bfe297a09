"""What the kernel that measures on a GPU is given; the kernel itself is tested where there is one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.taps.one_pass import divisors

BITS_31 = (1 << 31) - 1


@given(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=20), st.lists(st.integers(0, BITS_31)))
def test_a_product_and_a_shift_are_a_division(by: list[int], numbers: list[int]) -> None:
    for d, prepared in zip(by, divisors(np.array(by)).tolist(), strict=True):
        magic, shift = prepared >> 8, prepared & 255
        assert magic < 1 << 32  # the kernel takes the high word of a product of 32 bits each
        for n in [*numbers, 0, BITS_31, max(0, d - 1), d]:
            assert (n if prepared == 0 else (n * magic >> 32) >> shift) == n // max(1, d)
