"""Functions that mix tokens: each pass by itself."""

from __future__ import annotations

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.trial import mixing
from lockstep.workbench.diagnosis.operations.recorded import Row


def test_rows_in_turn_stay_in_their_pass() -> None:
    rows = [Row(step, 0, i, 0, i) for i, step in enumerate([0, 0, 0, 1, 2, 2])]
    found = mixing(rows)["rows_before_in_turn"](np.arange(6.0)[:, None])
    assert found[:, 0].tolist() == [2, 0, 1, 3, 5, 4]
