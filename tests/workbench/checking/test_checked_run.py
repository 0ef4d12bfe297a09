"""A run is recorded again in other ways: beside what is done meanwhile, or before it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lockstep.sessions import Session, SessionWriter, VerdictRecord
from lockstep.sessions.meta import SessionMeta
from lockstep.sessions.records import Tap
from lockstep.workbench.checking.checked_run import Progress, RunsAgain
from lockstep.workbench.checking.corrections import Corrections
from lockstep.workbench.judgements.golden_event import GoldenEvent
from lockstep.workbench.models.capture import FULL, Capture


@dataclass
class Run:
    """Writes empty sessions. `passes` takes part in each pass."""

    passes: Callable[[], None] = lambda: None
    of: int = 3
    path: Path = Path("run.session")
    branch: int = 0
    checkpoint: Path = Path("model")
    rules: Mapping[str, str] = field(default_factory=dict)
    heard: list[tuple[str, int, int, bool]] = field(default_factory=list)
    threads: list[bool] = field(default_factory=list)
    main: int = field(default_factory=threading.get_ident)

    def progress(self, what: str, done: int, of: int) -> None:
        self.heard.append((what, done, of, threading.get_ident() == self.main))

    def record(
        self,
        path: Path,
        corrected: Corrections | None = None,
        capture: Capture = FULL,
        progress: Progress | None = None,
    ) -> None:
        assert progress is not None
        taps = [Tap(0, "embed", "replicate")]
        with SessionWriter.create(path, taps=taps, ranks=1, meta=SessionMeta(source=path.stem)):
            self.threads.append(threading.get_ident() == self.main)
            for done in range(self.of):
                self.passes()
                progress(path.stem, done + 1, self.of)

    def store(self, verdicts: Sequence[VerdictRecord], event: GoldenEvent) -> None:
        raise AssertionError


@pytest.mark.parametrize("beside", [False, True])
def test_recordings_come_in_the_order_asked_for(beside: bool) -> None:
    run = Run()
    with RunsAgain.of(run, beside) as again:
        recordings = [again.record(name) for name in ("untapped", "ledger")]
        for name, recording in zip(("untapped", "ledger"), recordings, strict=True):
            with Session.open(again.awaited(recording)) as session:
                assert session.meta.source == name
    assert run.threads == [not beside] * 2


@pytest.mark.parametrize("beside", [False, True])
def test_progress_is_reported_by_one_thread_alone(beside: bool) -> None:
    """What another one reports would come between."""
    may_go_on = threading.Event()

    def slow() -> None:
        assert may_go_on.wait(10)

    run = Run(slow)
    if not beside:
        may_go_on.set()
    with RunsAgain.of(run, beside) as again:
        recording = again.record("untapped")
        threading.Timer(0.3, may_go_on.set).start()  # by then progress was asked for
        again.awaited(recording)
    assert run.heard
    assert all(ours for *_, ours in run.heard)


def test_an_error_ends_what_nobody_waits_for_at_its_next_pass() -> None:
    begun = threading.Event()

    def left(run: Run) -> None:
        with RunsAgain.of(run, True) as again:
            again.record("untapped")
            begun.wait()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        left(Run(begun.set, of=10**9))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPool")]


def test_what_recording_raises_is_raised_where_it_is_awaited() -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with RunsAgain.of(Run(passes=broken), True) as again:
        recording = again.record("untapped")
        with pytest.raises(ZeroDivisionError):
            again.awaited(recording)
