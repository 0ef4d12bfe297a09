"""Where engine and reference differ, the verdict says which of them is nearer to float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.workbench.diagnosis.measure import Recordings
from lockstep.workbench.diagnosis.verdict import judge
from tests.workbench.diagnosis.synthetic import Case, Place, synthetic


def towards_truth(case: Case, share: float) -> Any:
    """Logits between those of the reference at float32 (0) and the truth (1), with one activation off so that the two
    are compared at all."""

    def logits(x: np.ndarray, at: Place) -> np.ndarray:
        truth = case.golden.rebuilt("logits", step=at.step, seq=at.seq).array
        assert truth is not None
        return np.asarray(x + share * (truth - x))

    return {"logits": logits, "layers.0.mlp.act": lambda x, at: x * 1.01}


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.5, "the engine is nearer"),
        (-1.0, "transformers in float32 is nearer"),
        (0.0, "both are as near"),
        (-9.0, ""),
    ],
)
def test_the_nearer_one_is_reported(share: float, words: str, case: Case, tmp_path: Path) -> None:
    # Rounded to float32 the truth is some 1e-7 off as well.
    with synthetic(tmp_path / "a.session", case.floor, spoil=towards_truth(case, share)) as engine:
        notes = [
            note
            for note in judge(Recordings.of(engine, case.golden, case.floor)).notes
            if "from float64" in note
        ]
    assert [note.endswith(words) for note in notes] == ([True] if words else [])


def test_nothing_is_told_where_nothing_differs(case: Case) -> None:
    assert not any(
        "float64" in note for note in judge(Recordings.of(case.floor, case.golden, case.floor)).notes
    )
