"""Cosines and sines that are read in the wrong place of a table, and partners in other heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import rotate_half

from tests.workbench.diagnosis.hypotheses.rotation.test_rotation import FREQ, X, site
from tests.workbench.diagnosis.variants.made import POSITIONS, Array, accepted

pytestmark = pytest.mark.sampled_file(3)

#: A row of a table for each position: eight cosines, then eight sines; a few more than there are tokens.
TABLE = np.concatenate([f(np.arange(40.0)[:, None] * FREQ) for f in (np.cos, np.sin)], axis=1).ravel()
AT = 16 * POSITIONS.astype(int)[:, None] + np.arange(8)


def turned(cosine: Array, sine: Array, x: Array = X) -> Array:
    """Pairs (i, i + 8) by these numbers [N, 8]."""
    left, right = x[..., :8], x[..., 8:]
    c, s = cosine[:, None], sine[:, None]
    return np.concatenate([left * c - right * s, right * c + left * s], -1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("cosine", "sine", "words"),
    [
        (0, 12, "the sines 4 entries late"),
        (0, 24, "the sines 16 entries late"),
        (1, 9, "the cosines 1 entry late and sines 1 entry late"),
        (0, 7, "the sines 1 entry early"),
    ],
)
def test_a_table_read_in_the_wrong_place_is_named(dtype: str, cosine: int, sine: int, words: str) -> None:
    found = accepted(site(turned(TABLE[AT + cosine], TABLE[AT + sine]), dtype=dtype))
    assert found[0].variant.name == "rope_table_misread"
    assert words in found[0].variant.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("numbers", [(1.0, 1.0), (0.0, 0.0)])
def test_pairs_that_a_table_does_not_have_are_named(dtype: str, numbers: tuple[float, float]) -> None:
    cosine, sine = TABLE[AT].copy(), TABLE[AT + 8].copy()
    cosine[:, 2:4], sine[:, 2:4] = numbers
    found = accepted(site(turned(cosine, sine), dtype=dtype))
    assert found[0].variant.name == "rope_table_constant"
    assert "pairs 2 to 3 of 8" in found[0].variant.text


@pytest.mark.parametrize("together", [2, 4])
def test_halves_of_several_heads_are_named(together: int) -> None:
    """As transformers' `rotate_half` gives them where heads are not told apart yet."""
    rows = torch.tensor(X).flatten(1).unflatten(1, (4 // together, 16 * together))
    partner = rotate_half(rows).reshape(X.shape).numpy()
    cosine, sine = (np.tile(TABLE[AT + by], 2)[:, None] for by in (0, 8))
    (found,) = accepted(site(X * cosine + partner * sine))
    assert found.variant.name == "rope_across_heads"
    assert ("all heads" if together == 4 else "2 heads") in found.variant.text
