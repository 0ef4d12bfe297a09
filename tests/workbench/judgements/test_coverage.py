"""What a verdict rests on, from both recordings."""

from __future__ import annotations

from pathlib import Path

from lockstep.sessions import Session
from lockstep.workbench.checking.forced_run import record_reference
from lockstep.workbench.judgements.coverage import coverage
from tests.checkpoints import tiny_checkpoint


def test_rows_of_two_float64_recordings_are_aligned(tmp_path: Path) -> None:
    """Neither side is rounded to a dtype: a recording of float64 is aligned with itself as any other."""
    checkpoint = tiny_checkpoint(tmp_path, "llama")
    reference = record_reference(checkpoint, [[3, 130, 17, 99, 4]], 2, "float32", floor=False)
    with Session.open(reference.golden) as one, Session.open(reference.golden) as other:
        assert one.meta.config.dtype == "float64"
        found = coverage(one, other)
    assert (found.aligned, found.rows) == (7, 7)
