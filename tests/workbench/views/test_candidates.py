"""Probabilities of recorded candidates: one function for panes, reports and commands."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.sessions import Session, SessionWriter
from lockstep.sessions.meta import SessionMeta
from lockstep.sessions.records import STATISTICS, SequenceStep, StepInFlight, StepRecord, Tap
from lockstep.workbench.tui.panes.followed import history_lines, move
from lockstep.workbench.views.candidate_history import candidate_history
from lockstep.workbench.views.candidates import (
    candidates,
    emitted_probability,
    first_difference,
    margin,
    probability,
)
from lockstep.workbench.views.logits import logits
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.token_line import TokenCell, TokenLine, TokenLines, TokenRow, compare
from lockstep.workbench.views.token_texts import TokenTexts
from lockstep.workbench.views.where import Where

TEXTS = TokenTexts({1: "a", 2: "b"})


def _reported(logits: list[float], logsumexp: float | None = 3.0) -> SequenceStep:
    return SequenceStep(
        0, [7], [0], [[1]], emitted=2, topk_ids=[1, 2], topk_logits=logits, logsumexp=logsumexp
    )


def test_candidates_are_as_recorded() -> None:
    one, other = candidates(_reported([2.5, 1.0]), TEXTS)
    assert (one.label, one.token, one.chosen, other.chosen) == ("a", 1, False, True)
    assert one.probability == pytest.approx(math.exp(-0.5))
    assert emitted_probability(_reported([2.5, 1.0])) == other.probability
    assert margin(_reported([2.5, 1.0])) == 1.5
    assert len(candidates(_reported([2.5, 1.0]), TEXTS, 1)) == 1
    assert candidates(_reported([2.5, 1.0], None), TEXTS)[0].probability is None
    assert probability(3.0000001, 3.0) == 1.0


def test_the_probability_of_nan_is_not_one(tmp_path: Path) -> None:
    nan = math.nan
    path = tmp_path / "nan.session"
    with SessionWriter.create(
        path, taps=[Tap(0, "embed", "replicate")], ranks=1, meta=SessionMeta()
    ) as writer:
        writer.step(0, StepRecord(0, "prefill", [_reported([nan, nan], nan)], 0.1))
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
            reported = SequenceStep(
                0, ids, list(range(at, at + len(ids))), [[at + len(ids)]], emitted=emitted
            )
            writer.step(0, StepRecord(step, "prefill" if step < 2 else "decode", [reported], 0.1))
    with Session.open(path) as session:
        line = TokenLines().line(SessionSource(session, texts), 0, 0)
    assert [line.label(position) for position in range(6)] == ["t1", "t2", "t3", "t4", "t5", ""]
    assert [cell.label for cell in line.tokens.cells] == ["t1", "t2", "…", "t4", "t5"]
    assert line.at(1) == 3


def test_the_prompt_is_there_while_the_first_step_is_under_way(tmp_path: Path) -> None:
    path, texts = tmp_path / "under_way.session", TokenTexts({i: f"t{i}" for i in range(10)})
    stats = np.ones((1, 1, len(STATISTICS)), np.float32)
    with SessionWriter.create(
        path, taps=[Tap(0, "embed", "replicate")], ranks=1, meta=SessionMeta()
    ) as writer:
        reported = SequenceStep(0, [1, 2], [0, 1], [[2]])
        writer.in_flight(0, StepInFlight(0, 0, [reported], stats))
        with Session.open(path) as session:
            lines = TokenLines()
            line = lines.line(SessionSource(session, texts), 0, 0)
            assert [cell.label for cell in line.tokens.cells] == ["t1", "t2", "…"]
            assert (line.at(0), line.label(1)) == (2, "t2")
            writer.step(0, StepRecord(0, "prefill", [replace(reported, emitted=3)], 0.1))
            session.refresh()
            over = lines.line(SessionSource(session, texts), 0, 0)
            assert [cell.label for cell in over.tokens.cells] == ["t1", "t2", "t3"]


def test_a_candidate_over_the_steps_has_its_rank_where_it_was_recorded(tmp_path: Path) -> None:
    path, texts = tmp_path / "steps.session", TokenTexts({1: "a", 2: "b", 3: "c"})
    ranked = [
        ([1, 2], [2.0, 1.0]),
        ([3, 1], [2.0, -9.0]),
        ([3, 2], [2.0, 1.0]),
        ([1, 3], [math.nan, math.nan]),
    ]
    with SessionWriter.create(
        path, taps=[Tap(0, "embed", "replicate")], ranks=1, meta=SessionMeta()
    ) as writer:
        for step, (ids, values) in enumerate(ranked):
            reported = SequenceStep(
                0, [7], [step], [[step + 1]], emitted=ids[0], topk_ids=ids, topk_logits=values, logsumexp=3.0
            )
            writer.step(0, StepRecord(step, "decode", [reported], 0.1))
    with Session.open(path) as session:
        source, found = SessionSource(session, texts), None
        while found is None or not found.complete:
            found = candidate_history(source, Where(), 1, found)
    assert [point.rank for point in found.points] == [0, 1, None, 0]
    assert [point.chosen for point in found.points] == [True, False, False, True]
    assert found.points[0].probability == pytest.approx(math.exp(-1.0))
    assert found.points[1].probability == pytest.approx(math.exp(-12.0))
    assert math.isnan(found.points[3].probability or 0)
    assert (found.topk, found.label, found.best) == (2, "a", found.points[0])
    lines = ["".join(text for text, _ in line) for line in history_lines(found, 1, 78, 7)]
    assert "in the top 2 at 3 of 4 steps" in lines[0]
    assert "best: rank 1, 0.3679, at step 0" in lines[0]
    assert "6.1e-6" in next(line for line in lines if line.startswith("p") and "NaN" in line)
    assert next(line for line in lines if line.startswith("rank")).split() == [
        "rank",
        "1",
        "▸",
        "2",
        "-",
        "1",
        "▸",
    ]
    assert "×" in lines[1], "NaN is drawn as such"
    assert all(len(line) <= 78 for line in lines)
    assert len(lines) <= 7


def test_a_move_is_from_the_rank_before() -> None:
    assert [move(0, 3), move(3, 0), move(2, 2), move(1, None)] == ["4 ▲3", "1 ▼3", "·", "new"]
