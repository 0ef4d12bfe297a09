"""The process that judges beside causes gives the verdicts that this one gives, and is not relied on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from lockstep.sessions import Session
from lockstep.workbench.checking import reference_judge as module
from lockstep.workbench.checking.reference_judge import JudgeBeside, JudgeHere, reference_judge
from lockstep.workbench.diagnosis.judgement import DiagnosisError
from lockstep.workbench.diagnosis.measure import Recordings
from lockstep.workbench.diagnosis.operations.facts import Facts
from tests.workbench.diagnosis.synthetic import Case, synthetic, tiny_case


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return tiny_case(tmp_path_factory.mktemp("judged"))


@contextmanager
def judges(case: Case, engine: Session) -> Iterator[tuple[JudgeHere, JudgeBeside, int]]:
    """One here, one beside, and the process of that."""
    sides = Recordings.of(engine, case.golden, case.floor)
    facts = Facts.of(case.model_dir, "float32")
    before = set(_children())
    with reference_judge(sides, facts, case.model_dir, lambda: None, True) as beside:
        assert isinstance(beside, JudgeBeside)
        (process,) = set(_children()) - before
        yield JudgeHere(sides, facts), beside, process
    assert process not in _children()


def _children() -> list[int]:
    found = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
    return list(map(int, found.split()))


@pytest.fixture
def wrong(case: Case, tmp_path: Path) -> Iterator[Session]:
    with synthetic(tmp_path / "run.session", case.floor, spoil={"logits": lambda x, at: x * 1.01}) as session:
        yield session


@pytest.mark.slow
def test_the_verdicts_are_those_of_this_process(case: Case, wrong: Session) -> None:
    with judges(case, wrong) as (here, beside, _):
        for judge in ("taps", "untapped", "ledger"):
            asked = () if judge == "taps" else (wrong.path,)
            ours, theirs = getattr(here, judge)(*asked), getattr(beside, judge)(*asked)
            assert msgspec.json.encode(theirs) == msgspec.json.encode(ours)  # where NaN equals itself
        assert beside.taps().failed


def test_a_process_that_is_lost_is_done_without(case: Case, wrong: Session) -> None:
    with judges(case, wrong) as (here, beside, process):
        os.kill(process, signal.SIGKILL)
        assert beside.taps().first_divergence == here.taps().first_divergence


@pytest.mark.slow
def test_a_process_that_is_stopped_is_done_without(
    case: Case, wrong: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.0)
    with judges(case, wrong) as (here, beside, process):
        os.kill(process, signal.SIGSTOP)
        assert beside.taps().first_divergence == here.taps().first_divergence
        os.kill(process, signal.SIGCONT)  # its answer comes too late, and is none to the next question
        assert beside.untapped(wrong.path) == here.untapped(wrong.path)


def test_an_error_is_raised_in_this_process(case: Case, tmp_path: Path) -> None:
    with (
        synthetic(tmp_path / "run.session", case.floor, skip=lambda tap: True) as nothing,
        judges(case, nothing) as (_, beside, _),
        pytest.raises(DiagnosisError, match="no tensor of any tap"),
    ):
        beside.taps()


def test_who_waits_is_asked_whether_to_wait_on(case: Case, wrong: Session) -> None:
    def interrupted() -> None:
        raise InterruptedError

    with judges(case, wrong) as (_, beside, process):
        os.kill(process, signal.SIGSTOP)
        beside.waiting = interrupted
        with pytest.raises(InterruptedError):
            beside.taps()
