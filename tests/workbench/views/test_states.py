"""States over steps: norms of what all ranks hold, and changes from step to step."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from lockstep.sessions import Session, SessionWriter
from lockstep.sessions.meta import SessionMeta
from lockstep.sessions.records import SequenceStep, StepRecord, Tap, TensorRecord
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.states import state_histories
from lockstep.workbench.views.token_texts import TokenTexts
from lockstep.workbench.views.where import Where

TAP = "layers.1.attn.state"


def test_norms_and_changes_are_of_the_whole_state(tmp_path: Path) -> None:
    states = [np.zeros((1, 4, 2, 3), np.float32) for _ in range(3)]
    states[0][0, 0, 0, 0] = 3
    states[1][:] = states[0]
    states[1][0, 3, 1, 2] = 4
    states[2][:] = states[1]
    path = tmp_path / "a.session"
    with SessionWriter.create(path, taps=[Tap(0, TAP, "shard(1)")], ranks=2, meta=SessionMeta()) as writer:
        for step, whole in enumerate(states):
            tensors = [
                TensorRecord(TAP, rank, 0, np.ascontiguousarray(whole[:, 2 * rank : 2 * rank + 2]), "float32")
                for rank in range(2)
            ]
            reported = SequenceStep(0, [7], [step], [[step + 1] * 2] * 2)
            writer.step(0, StepRecord(step, "decode", [reported], 0.1, tensors=tensors))
    source = SessionSource(Session.open(path), TokenTexts({}))
    (found,) = state_histories(source, Where(0, 2), 3)
    assert (found.layer, found.first, found.norms) == (1, 0, (3, 5, 5))
    assert math.isnan(found.changes[0])
    assert found.changes[1:] == (4 / 3, 0)
    assert state_histories(source, Where(0, 0), 1) == ()
