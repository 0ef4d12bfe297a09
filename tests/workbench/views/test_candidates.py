"""Probabilities of recorded candidates: one function for panes, reports and commands."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sessions import Session, SessionWriter
from sessions.meta import SessionMeta
from sessions.records import SequenceStep, StepRecord, Tap
from workbench.views.candidates import candidates, emitted_probability, first_difference, margin, probability
from workbench.views.logits import logits
from workbench.views.source import SessionSource
from workbench.views.token_line import TokenCell, TokenLine, TokenLines, TokenRow, compare
from workbench.views.token_texts import TokenTexts
from workbench.views.where import Where

TEXTS = TokenTexts({1: "a", 2: "b"})


def _told(logits: list[float], logsumexp: float | None = 3.0) -> SequenceStep:
    return SequenceStep(
        0, [7], [0], [[1]], emitted=2, topk_ids=[1, 2], topk_logits=logits, logsumexp=logsumexp
    )


def test_candidates_are_as_recorded() -> None:
    one, other = candidates(_told([2.5, 1.0]), TEXTS)
    assert (one.label, one.token, one.chosen, other.chosen) == ("a", 1, False, True)
    assert one.probability == pytest.approx(math.exp(-0.5))
    assert emitted_probability(_told([2.5, 1.0])) == other.probability
    assert margin(_told([2.5, 1.0])) == 1.5
    assert len(candidates(_told([2.5, 1.0]), TEXTS, 1)) == 1
    assert candidates(_told([2.5, 1.0], None), TEXTS)[0].probability is None
    assert probability(3.0000001, 3.0) == 1.0


def test_the_probability_of_nan_is_not_one(tmp_path: Path) -> None:
    nan = math.nan
    path = tmp_path / "nan.session"
    with SessionWriter.create(
        path, taps=[Tap(0, "embed", "replicate")], ranks=1, meta=SessionMeta()
    ) as writer:
        writer.step(0, StepRecord(0, "prefill", [_told([nan, nan], nan)], 0.1))
    with Session.open(path) as session:
        found = logits(SessionSource(session), Where())
        cell = TokenLines().line(SessionSource(session), 0, 0).tokens.cells[-1]
    assert math.isnan(cell.surprise or 0), "the strip and the timeline mark it"
    assert found is not None
    assert all(
        one.candidate.probability is None or math.isnan(one.candidate.probability) for one in found.candidates
    )
    assert found.history[-1][2] is None or math.isnan(found.history[-1][2])
    assert found.covered is not None
    assert math.isnan(found.covered), "the sum of what is NaN is NaN"


def test_lines_differ_by_token_not_by_what_is_shown_of_it() -> None:
    def line(*tokens: int) -> TokenLine:
        return TokenLine(
            TokenRow.of([TokenCell("·", step, token=token) for step, token in enumerate(tokens)])
        )

    assert compare(line(1, 2, 3), line(1, 9, 3)).first == 1
    assert compare(line(1, 2), line(1, 2, 3)).first is None
    assert first_difference([1, None], [1, 2]) == 1


def test_a_position_is_named_by_the_token_that_went_in_there(tmp_path: Path) -> None:
    """Also where the prefill came in chunks, whose steps emit nothing."""
    path, texts = tmp_path / "chunks.session", TokenTexts({i: f"t{i}" for i in range(10)})
    with SessionWriter.create(
        path, taps=[Tap(0, "embed", "replicate")], ranks=1, meta=SessionMeta()
    ) as writer:
        for step, (ids, at, emitted) in enumerate([([1, 2], 0, None), ([3], 2, 4), ([4], 3, 5)]):
            told = SequenceStep(0, ids, list(range(at, at + len(ids))), [[at + len(ids)]], emitted=emitted)
            writer.step(0, StepRecord(step, "prefill" if step < 2 else "decode", [told], 0.1))
    with Session.open(path) as session:
        line = TokenLines().line(SessionSource(session, texts), 0, 0)
    assert [line.label(position) for position in range(6)] == ["t1", "t2", "t3", "t4", "t5", ""]
    assert [cell.label for cell in line.tokens.cells] == ["t1", "t2", "…", "t4", "t5"]
    assert line.at(1) == 3
