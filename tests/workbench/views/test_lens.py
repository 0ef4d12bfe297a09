"""The lens as it is recorded and shown: one type, whoever wrote it."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from lockstep.sessions import Session, SessionWriter
from lockstep.sessions.meta import SessionMeta
from lockstep.sessions.records import JSON, SequenceStep, StepRecord, Tap
from lockstep.workbench.views.lens import KIND, LensEvent, LensRow, lens, recorded_lens
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.token_texts import TokenTexts
from lockstep.workbench.views.where import Where

ROW = LensRow("layers.0.mlp_residual", (4, 9), (2.0, None), 2.5, 0.7)
EVENT = LensEvent(0, (ROW,), (ROW,))


def _session(path: Path, *data: JSON) -> Session:
    with SessionWriter.create(
        path, taps=[Tap(0, "embed", "replicate")], ranks=1, meta=SessionMeta()
    ) as writer:
        writer.step(0, StepRecord(0, "prefill", [SequenceStep(0, [7], [0], [[1]], emitted=9)], 0.1))
        for one in data:
            writer.event(0, 0, KIND, "lens", one)
    return Session.open(path)


def test_what_is_written_is_read_and_shown(tmp_path: Path) -> None:
    with _session(tmp_path / "a.session", msgspec.to_builtins(EVENT)) as session:
        assert recorded_lens(session, 0, 0) == EVENT
        shown = lens(SessionSource(session, TokenTexts({4: "a"})), Where())
    (layer,) = shown.layers
    assert (layer.name, layer.place, shown.emitted) == ("layer 0", 1, "‹9›")
    assert [one.label for one in layer.candidates] == ["a", "‹9›"]
    assert math.isnan(layer.candidates[1].probability or 0), "its logit was not finite"
    assert [one.token for one in layer.golden] == [one.token for one in layer.candidates]


@pytest.mark.parametrize(
    "data",
    [
        None, [], {"seq": 0}, {"seq": 0, "layers": [{"tap": 3}]},
        {"seq": 0, "layers": [{"tap": "embed", "ids": [], "logits": []}]},
        {"seq": 0, "layers": [{"tap": "embed", "ids": [1, 2], "logits": [0.5]}]},
        {"seq": 0, "layers": [{"tap": "embed", "ids": [1], "logits": [0.5]}], "golden": []},
        {"seq": 1, "layers": []},
    ],
)  # fmt: skip
def test_what_a_stranger_wrote_is_passed_over(tmp_path: Path, data: JSON) -> None:
    with _session(tmp_path / "a.session", msgspec.to_builtins(EVENT), data) as session:
        assert recorded_lens(session, 0, 0) == EVENT
