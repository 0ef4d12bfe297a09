"""Statistics over steps and the agreement of replicas, the same in every view."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lockstep.sessions import Session, SessionWriter
from lockstep.sessions.meta import SessionMeta
from lockstep.sessions.records import SequenceStep, StepRecord, Tap
from lockstep.workbench.views.operations import operations
from lockstep.workbench.views.series import history
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where

TAPS = [
    Tap(0, "embed", "replicate"),
    Tap(1, "layers.0.attn.k_proj", "shard(1,replicas=2)"),
    Tap(2, "layers.0.attn.o_proj.partial", "partial"),
    Tap(3, "logits", "replicate"),
]


def test_the_report_and_the_pane_show_the_same_of_replicas(tmp_path: Path) -> None:
    path = tmp_path / "replicas.session"
    sums = np.array([[5, 5], [6, 7], [8, 9], [0, 0]], np.uint64)  # the KV replicas differ; logits did not run
    stats = np.ones((4, 2, 8), np.float32)
    with SessionWriter.create(path, taps=TAPS, ranks=2, meta=SessionMeta()) as writer:
        writer.step(0, StepRecord(0, "prefill", [SequenceStep(0, [1], [0], [[1], [1]])], 0.1, stats, sums))
    with Session.open(path) as session:
        reported = [history(session, tap, 0, 0, 10).agree for tap in TAPS]
        assert reported == [True, False, None, None]
        assert operations(SessionSource(session), Where()).agreement == ("=", "≠", "", "")
