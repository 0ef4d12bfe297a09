"""What may be asked of the golden recorder."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.workbench.references.request import (
    DTYPES,
    GoldenRequest,
    GoldenSequence,
    RecordingJob,
    ReferenceFailure,
    decode_jobs,
)

ids = st.lists(st.integers(0, 2**31), min_size=1, max_size=5).map(tuple)
sequences = st.lists(st.builds(GoldenSequence, ids, st.none() | ids), min_size=1, max_size=3).map(tuple)


@given(sequences, st.integers(0, 99), st.sampled_from(DTYPES), st.integers(1, 64))
def test_a_job_survives_json(sequences: Any, steps: int, dtype: Any, threads: int) -> None:
    job = RecordingJob(
        GoldenRequest("/models/a", sequences, steps, dtype, "cuda:1", threads), "d", "/tmp/a.session"
    )
    assert decode_jobs(msgspec.json.encode([job])) == [job]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8"}, "'int8' - at `.*dtype`"),
        ({"dtype": "\x1b[31mred"}, r"\\x1b\[31mred"),
        ({"steps": -1}, "steps must be at least 0"),
        ({"threads": 0}, "threads at least 1"),
        ({"sequences": []}, "at least one sequence"),
        ({"sequences": [{"prompt": [], "forced": None}]}, "sequence 0 has an empty prompt"),
        ({"sequences": [{"prompt": [1], "forced": [-4]}]}, "negative token id"),
        ({"sequences": [{"prompt": ["1"], "forced": None}]}, "Expected `int`, got `str`"),
        ({"sequences": [{"forced": None}]}, "missing required field `prompt`"),
        ({"sequences": 7}, "Expected `array`"),
    ],
)
def test_nonsense_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    good = msgspec.to_builtins(RecordingJob(GoldenRequest("/models/a", (GoldenSequence((1,)),), 2), "d", "o"))
    job = good | {"request": good["request"] | change}
    with pytest.raises(ReferenceFailure, match=message) as refused:
        decode_jobs(msgspec.json.encode([job]))
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", [b"", b"{}", b"[7]", b"\xff", b"[" * 10_000])
def test_what_is_no_list_of_jobs_is_refused(text: bytes) -> None:
    with pytest.raises(ReferenceFailure, match="not a golden request"):
        decode_jobs(text)


def test_a_sequence_leaves_after_its_forced_ids() -> None:
    assert [GoldenSequence((1,), (5, 6)).runs(step) for step in range(4)] == [True, True, True, False]
    assert GoldenSequence((1,)).runs(10_000)
