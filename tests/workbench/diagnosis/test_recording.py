"""What is read of a recording."""

from __future__ import annotations

import numpy as np

from lockstep.workbench.diagnosis.recording import unpadded


def test_columns_behind_the_vocabulary_are_left_out_where_they_are_zeros() -> None:
    logits = np.arange(1.0, 9.0).reshape(2, 4)
    padded = np.pad(logits, ((0, 0), (0, 3)))
    np.testing.assert_array_equal(unpadded(padded, 4), logits)
    np.testing.assert_array_equal(unpadded(np.where(padded == 0, -np.inf, padded), 4), logits)
    np.testing.assert_array_equal(unpadded(logits, 4), logits)
    assert unpadded(padded + 1, 4).shape == (2, 7), "what is no padding stays"
    assert unpadded(logits, 5).shape == (2, 4), "a column that is not there is not made up"
