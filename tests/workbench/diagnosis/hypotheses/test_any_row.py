"""Row-wise operations without hypotheses of their own: what may be done to any operand, or to the result, is tried."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lockstep.workbench.diagnosis.operations.facts import rounded
from tests.workbench.diagnosis.variants.made import ROWS, Array, best, made_site

RNG = np.random.default_rng(3)
X, Y = (RNG.normal(size=(len(ROWS), 64)).astype(np.float32).astype(np.float64) for _ in range(2))

#: Case -> what two blocks side by side come to, words.
SUMS: dict[str, tuple[Callable[[], Array], str]] = {
    "columns": (lambda: np.roll(X, 1, 1) + Y, "the columns of x are out of order: moved by 1"),
    "doubled": (lambda: X + 2 * Y, "x + y + y is computed instead of x + y"),
    "another token": (lambda: np.roll(X, 1, 0) + Y, "x of another token is added"),
    "backwards": (lambda: (X + Y)[:, ::-1], "the result is read backwards"),
    "rounded": (lambda: rounded(X, "bfloat16") + Y, "x is rounded to bfloat16"),
}


@pytest.mark.parametrize("case", SUMS)
def test_what_was_done_to_a_term_is_named(case: str) -> None:
    seen, words = SUMS[case]
    found = best(made_site("mixed", "layers.1.attn.mixed", {"x": X, "y": Y}, seen()))
    assert any(words in one.variant.text for one in found), [one.variant.text for one in found]
