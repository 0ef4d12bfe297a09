"""What is always on screen of a run that another engine made."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lockstep.sessions import SequenceStep, Session, SessionWriter, StepRecord, Tap, TensorRecord
from lockstep.sessions.meta import ConfigMeta, ForeignMeta, SessionMeta
from lockstep.workbench.views.overview import overview
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.token_texts import TokenTexts

ABSENT = {"layers.0.attn.probs": "not in the dump\x1b[31m"}


def source(path: Path, foreign: ForeignMeta | None) -> SessionSource:
    meta = SessionMeta(
        source="vllm 0.32.0\x1b[2J", config=ConfigMeta(tp=2, dtype="float32"), absent=ABSENT, foreign=foreign
    )
    with SessionWriter.create(path, taps=[Tap(0, "embed", "replicate")], ranks=2, meta=meta) as writer:
        tensors = [TensorRecord("embed", 0, 0, np.ones((1, 4), np.float32), "float32")]
        writer.step(0, StepRecord(0, "prefill", [SequenceStep(0, [1], [0], [])], 0.0, tensors=tensors))
    return SessionSource(Session.open(path), TokenTexts({}))


def test_whose_run_it_is_and_what_it_lacks_is_reported(tmp_path: Path) -> None:
    found = overview(source(tmp_path / "a.session", ForeignMeta(mode="eager", ranks=(0,))))
    assert found.engine == "vllm 0.32.0␛, eager, 1 of 2 ranks"
    assert found.absent == {"layers.0.attn.probs": "not in the dump␛"}


def test_a_run_of_ours_has_rules_and_no_engine(tmp_path: Path) -> None:
    assert overview(source(tmp_path / "a.session", None)).engine == ""
