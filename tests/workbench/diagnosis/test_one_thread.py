"""Judging on one thread: while a recording is short, and what others have set is there again, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from threadpoolctl import ThreadpoolController

from lockstep.sessions import Session
from lockstep.workbench.diagnosis import one_thread
from lockstep.workbench.diagnosis.one_thread import one_thread_for

OPENBLAS = ThreadpoolController().select(internal_api="openblas")
RECORDED = Path(__file__).parents[3] / "sessions" / "recorded"


def threads() -> set[int]:
    return {one["num_threads"] for one in OPENBLAS.info()}


@pytest.fixture
def recorded() -> Iterator[Session]:
    with Session.open(next(iter(sorted(RECORDED.glob("*.session"))))) as session:
        yield session


def test_inside_numpy_has_one_thread_and_afterwards_as_many_as_before(recorded: Session) -> None:
    with OPENBLAS.limit(limits=2):
        before = threads()
        with one_thread_for(recorded), one_thread_for(recorded):
            assert threads() <= {1}  # none where numpy has another library
        assert threads() == before
        with pytest.raises(ValueError, match="wrong"), one_thread_for(recorded):
            raise ValueError("wrong")
        assert threads() == before


def test_a_recording_of_many_tokens_is_judged_on_all(
    recorded: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = sum(len(one.ids) for step in recorded.steps() for one in recorded.step(step).sequences)
    with OPENBLAS.limit(limits=2):
        for many, expected in ((tokens, {2}), (tokens + 1, {1})):
            monkeypatch.setattr(one_thread, "MANY", many)
            with one_thread_for(recorded):
                assert threads() <= expected
