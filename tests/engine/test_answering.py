"""A program that is asked over a socket ends when it is to, and leaves no descriptor behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.engine import answering
from lockstep.engine.answering import AnsweringProcess

#: A module that is at hand, whatever it makes of its arguments.
PROGRAM = "lockstep.workbench.checking.judge_program"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_it_ends_and_leaves_nothing() -> None:
    before = descriptors()
    started = AnsweringProcess.start(PROGRAM)
    assert started.process.poll() is None
    started.end()
    assert started.process.returncode is not None
    assert not Path(f"/proc/{started.process.pid}").exists()
    assert descriptors() == before


def test_what_cannot_be_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*words: object, **named: object) -> None:
        raise BlockingIOError

    before = descriptors()
    monkeypatch.setattr(answering, "start_python", refused)
    with pytest.raises(BlockingIOError):
        AnsweringProcess.start(PROGRAM)
    assert descriptors() == before
