"""What has an effect in a few tokens is no note, however many other tokens are right."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from lockstep.sessions import Session
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.checking.recorded_run import diagnose_recording
from tests.workbench.diagnosis.bugs.bug import Bug, Place
from tests.workbench.diagnosis.bugs.patched import Patched
from tests.workbench.diagnosis.bugs.recording import Recordings


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_cache_that_is_wrong_in_decode_alone_is_a_cause(dtype: str, tmp_path: Path) -> None:
    """Two of 21 tokens, in the rounding of all of which their error was lost."""

    def patch(p: Patched) -> None:
        def read(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return (k.flip(1), v.flip(1)) if p.decode else (k, v)

        p.cache((0,), read=read)

    recorded = Recordings(tmp_path, steps=1).of(
        Bug("heads_flipped", "", (), "", Place(()), patch, "llama-bias", dtype)
    )
    with Session.open(recorded.engine, UNLIMITED) as ours:
        found = diagnose_recording(ours, recorded.checkpoint, golden=recorded.golden, floor=recorded.floor)
    assert found.event.verdict == "diverged"
    assert found.causes[0].tap == "layers.0.attn.k_cache"
