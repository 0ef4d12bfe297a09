"""The golden event: what was written is read back; what a stranger wrote is cleaned or is none."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from lockstep.sessions import Session, SessionWriter
from lockstep.sessions.meta import SessionMeta
from lockstep.workbench.judgements.cause import Cause
from lockstep.workbench.judgements.golden_event import (
    KIND,
    Divergence,
    GoldenEvent,
    TokenMismatch,
    golden_events,
    last_golden_event,
    plain,
)

RECORDED = sorted((Path(__file__).parents[3] / "sessions" / "recorded").glob("*.session"))


def written(path: Path, *data: object) -> Path:
    with SessionWriter.create(path, taps=[], ranks=1, meta=SessionMeta()) as writer:
        for one in data:
            writer.event(0, 1, KIND, "", one)
    return path


def test_what_was_written_is_read_back_and_what_is_not_finite_is_not_there(tmp_path: Path) -> None:
    first = Divergence("logits", None, 2, 0, 1, (1,), math.inf, np.float64(0.5), math.nan, "NaN")
    event = GoldenEvent(
        verdict="diverged", max_abs_logits=math.nan, first_divergence=first, steps=3, words=first.in_words(),
        token_mismatches=(TokenMismatch(2, 0, -1, 7, math.inf, False),), rules={"mask": "additive"},
        causes=(
            Cause("a", "b", {"n": np.int64(3)}, 0.5, kind="rope", steps=(1, 2), confidence=math.nan),
            Cause("c", "d", None, 0.0, fault="mask=none", place="layers 0–3"),
        ),
    )  # fmt: skip
    with Session.open(written(tmp_path / "a.session", plain(event))) as session:
        read = last_golden_event(session, 0)
    assert read is not None
    assert read.first_divergence == Divergence("logits", None, 2, 0, 1, (1,), None, 0.5, None, "NaN")
    assert read.max_abs_logits is None
    assert read.causes_in_words() == ["b (leaves 50 % of the error)", "layers 0–3: d"]
    assert (read.causes[0].kind, read.causes[0].steps, read.causes[0].confidence) == ("rope", (1, 2), None)
    assert plain(event)["causes"][0]["class"] == "rope"
    assert read.words == "logits at step 2, rank 1: NaN"
    assert read.rules == {"mask": "additive"}


@pytest.mark.parametrize(
    "data",
    [None, 7, "x", [], {}, {"verdict": "maybe"},
     {"verdict": "match", "steps": "many"}, {"verdict": "match", "causes": 5},
     {"verdict": "match", "first_divergence": {"tap": 3}}, {"verdict": "match", "token_mismatches": [{}]}],
)  # fmt: skip
def test_what_is_no_judgement_is_left_out(tmp_path: Path, data: object) -> None:
    path = written(tmp_path / "a.session", {"verdict": "match", "steps": 4}, data)
    with Session.open(path) as session:
        assert [event.steps for event in golden_events(session, 0)] == [4]
        assert last_golden_event(session, 1) is None


def test_a_strangers_texts_are_cleaned(tmp_path: Path) -> None:
    evil = "\x1b[31m" + "x" * 5000
    data = {
        "verdict": "diverged",
        "words": evil,
        "causes": [{"text": evil}],
        "notes": [evil],
        "rules": {evil: evil},
    }
    with Session.open(written(tmp_path / "a.session", data)) as session:
        event = last_golden_event(session, 0)
    assert event is not None
    for text in (event.words, event.causes[0].text, event.notes[0], *event.rules, *event.rules.values()):
        assert "\x1b" not in text
        assert len(text) <= 800


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_shipped_recordings_judgements_are_read_whole(path: Path) -> None:
    with Session.open(path) as session:
        for branch in (0, 1):
            reported = [event.data for event in session.events(branch=branch, kind=KIND)]
            assert reported
            for data, event in zip(reported, golden_events(session, branch), strict=True):
                read = {key: plain(event)[key] for key in data if key != "causes"}
                assert read == {key: data[key] for key in read}
                # Recorded before a cause's parameters were called its transform.
                for cause, kept in zip(data["causes"], event.causes, strict=True):
                    assert (cause["name"], cause["text"], cause["residual"]) == (
                        kept.name,
                        kept.text,
                        kept.residual,
                    )
