"""What has an effect in a few tokens is no note, however many other tokens are right."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from lockstep.sessions import Session
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.checking.recorded_run import diagnose_recording
from tests.workbench.diagnosis.bugs.all_bugs import bugs
from tests.workbench.diagnosis.bugs.bug import Bug, Place
from tests.workbench.diagnosis.bugs.patched import Patched
from tests.workbench.diagnosis.bugs.recording import Recordings


@pytest.mark.sampled(2)
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


@pytest.mark.slow
@pytest.mark.parametrize(("model", "most", "one"), [("qwen3", -10.0, -3.0), ("llama-bias", -14.0, -3.2)])
def test_what_shows_beside_the_reference_is_no_note(
    model: str, most: float, one: float, tmp_path: Path
) -> None:
    """A mask that is not quite lost in rounding: among all rows it is, but a verdict shows the one in which it is not,
    there or in a later layer. A run that leaves the reference has it as the cause."""

    def patch(p: Patched) -> None:
        def mask(scores: Tensor, allowed: Tensor) -> Tensor:
            added = scores.new_full(scores.shape, most)
            if scores.shape[2] > 1:
                added[:, 2, 3] = one
            return scores + added.masked_fill(allowed, 0)

        p.attention((0,), mask=mask)

    bug = Bug("weak", "", (), "", Place(()), patch, model, "bfloat16")
    recorded = Recordings(tmp_path, steps=1).of(bug)
    with Session.open(recorded.engine, UNLIMITED) as ours:
        found = diagnose_recording(ours, recorded.checkpoint, golden=recorded.golden, floor=recorded.floor)
    noted = any("differs, has no effect here" in note for note in found.event.notes)
    assert noted is (found.event.verdict == "match")
    assert noted or found.causes[0].tap == "layers.0.attn.scores"


def test_what_is_wrong_in_the_same_way_further_on_is_no_note(tmp_path: Path) -> None:
    """Rows of experts that a rank does not hold: what it makes of them ends at down, if that is right."""
    recorded = Recordings(tmp_path, steps=1).of(bugs()["experts_of_others_are_the_last_of_the_first_rank"])
    with Session.open(recorded.engine, UNLIMITED) as ours:
        found = diagnose_recording(ours, recorded.checkpoint, golden=recorded.golden, floor=recorded.floor)
    assert [cause.tap for cause in found.causes] == [
        f"layers.0.mlp.experts.{one}" for one in ("gate", "up", "down")
    ]
    assert {cause.name for cause in found.causes} == {"experts_exchanged"}
