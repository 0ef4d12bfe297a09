"""What may be asked of the golden recorder."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.references.request import DTYPES, GoldenRequest, GoldenSequence, ReferenceFailure

ids = st.lists(st.integers(0, 2**31), min_size=1, max_size=5).map(tuple)
sequences = st.lists(st.builds(GoldenSequence, ids, st.none() | ids), min_size=1, max_size=3).map(tuple)


@given(sequences, st.integers(0, 99), st.sampled_from(DTYPES), st.integers(1, 64))
def test_a_request_survives_json(sequences: Any, steps: int, dtype: Any, threads: int) -> None:
    request = GoldenRequest("/models/a", sequences, steps, dtype, "cuda:1", threads)
    assert GoldenRequest.from_json(json.loads(json.dumps(request.to_json()))) == request


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not one of float64, float32"),
        ({"dtype": "\x1b[31mred"}, r"\?\[31mred"),
        ({"steps": -1}, "steps must be at least 0"),
        ({"threads": 0}, "threads at least 1"),
        ({"sequences": []}, "at least one sequence"),
        ({"sequences": [{"prompt": [], "forced": None}]}, "sequence 0 has an empty prompt"),
        ({"sequences": [{"prompt": [1], "forced": [-4]}]}, "negative token id"),
        ({"sequences": [{"prompt": ["1"], "forced": None}]}, "token ids must be integers"),
        ({"sequences": [{"forced": None}]}, "KeyError: 'prompt'"),
        ({"sequences": 7}, "TypeError"),
    ],
)
def test_nonsense_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    good = GoldenRequest("/models/a", (GoldenSequence((1,)),), 2).to_json()
    with pytest.raises(ReferenceFailure, match=message) as refused:
        GoldenRequest.from_json(good | change)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


def test_a_sequence_leaves_after_its_forced_ids() -> None:
    assert [GoldenSequence((1,), (5, 6)).runs(step) for step in range(4)] == [True, True, True, False]
    assert GoldenSequence((1,)).runs(10_000)
