"""Who holds a run against the reference: this process, or one beside it, while this one names causes.

Both keep a core busy with Python, so that threads gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from select import select
from typing import ClassVar, Protocol

from lockstep.engine.answering import AnsweringProcess
from lockstep.engine.ranks.vitals import Waiting, vitals_of
from lockstep.engine.ranks.wire import Connection, Disconnected
from lockstep.sessions import Session
from lockstep.sessions.keeping import keeping
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.checking.judge_messages import (
    ANSWERS,
    JudgeAnswer,
    JudgedTaps,
    JudgedUntapped,
    JudgeLedger,
    JudgeRequest,
    JudgeTaps,
    JudgeUntapped,
    SidesToJudge,
)
from lockstep.workbench.checking.untapped import judge_untapped
from lockstep.workbench.diagnosis.judgement import Judgement
from lockstep.workbench.diagnosis.ledger import ledger
from lockstep.workbench.diagnosis.measure import Recordings
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.verdict import judge
from lockstep.workbench.judgements.golden_event import UntappedRun

#: Seconds between two calls of who waits.
_TICK = 0.1
#: Seconds after which a process that somebody has stopped is done without.
_PATIENCE = 5.0
_PROGRAM = "lockstep.workbench.checking.judge_program"


class ReferenceJudge(Protocol):
    """Judges a run, and its recordings in other ways. SessionError and DiagnosisError as `judge`. `beside`: another
    process may still be at it."""

    beside: ClassVar[bool]

    def taps(self) -> Judgement:
        """The verdict on every tap."""

    def untapped(self, recording: Path) -> UntappedRun:
        """That on the run without taps."""

    def ledger(self, recording: Path) -> Judgement:
        """That on every tap, with what each operation does wrong where all before it are corrected."""


@dataclass
class JudgeHere:
    """Judges in this process."""

    beside: ClassVar[bool] = False
    sides: Recordings
    facts: Facts

    @cached_property
    def _judged(self) -> Judgement:
        return judge(self.sides, self.facts)

    def taps(self) -> Judgement:
        """The verdict on every tap."""
        return self._judged

    def untapped(self, recording: Path) -> UntappedRun:
        """That on the run without taps."""
        with _read(recording) as session:
            return judge_untapped(session, self.sides, self._judged, self.facts)

    def ledger(self, recording: Path) -> Judgement:
        """That on every tap, with the error ledger."""
        with _read(recording) as session:
            return ledger(self._judged, self.sides.held(session))


@contextmanager
def _read(recording: Path) -> Iterator[Session]:
    with Session.open(recording, UNLIMITED) as session, keeping(session):
        yield session


@dataclass
class JudgeBeside:
    """Judges in a process of its own, which was asked about the taps; where that is lost, stopped or has no answer
    `here`: an error is raised there. `waiting` is called now and then while it is awaited."""

    beside: ClassVar[bool] = True
    here: JudgeHere
    waiting: Callable[[], None]
    _connection: Connection[JudgeAnswer]
    _pid: int
    _lost: bool = False

    def taps(self) -> Judgement:
        """The verdict on every tap."""
        return self._judged

    @cached_property
    def _judged(self) -> Judgement:
        answer = self._answer()  # to what it was asked first
        return answer.judgement if isinstance(answer, JudgedTaps) else self.here.taps()

    def untapped(self, recording: Path) -> UntappedRun:
        """That on the run without taps."""
        answer = self._asked(JudgeUntapped(str(recording)))
        return answer.run if isinstance(answer, JudgedUntapped) else self.here.untapped(recording)

    def ledger(self, recording: Path) -> Judgement:
        """That on every tap, with the error ledger."""
        answer = self._asked(JudgeLedger(str(recording)))
        return answer.judgement if isinstance(answer, JudgedTaps) else self.here.ledger(recording)

    def _asked(self, request: JudgeRequest) -> JudgeAnswer | None:
        self.taps()  # answers come in turn
        if self._lost:
            return None
        try:
            self._connection.send(request)
        except Disconnected:
            return None
        return self._answer()

    def _answer(self) -> JudgeAnswer | None:
        waited = Waiting()
        while not select([self._connection], [], [], _TICK)[0]:
            self.waiting()
            if waited.look() >= _PATIENCE and vitals_of(self._pid).held:
                self._lost = True
                return None
        try:
            return self._connection.receive()
        except Disconnected:
            return None


@contextmanager
def reference_judge(
    sides: Recordings, facts: Facts, checkpoint: Path, waiting: Callable[[], None], beside: bool
) -> Iterator[ReferenceJudge]:
    """A judge of `sides`, who has judged every tap or does so `beside` this process until the context ends."""
    here = JudgeHere(sides, facts)
    if not beside:
        here.taps()
        yield here
        return
    started = AnsweringProcess.start(_PROGRAM)
    try:
        connection = Connection(started.socket, ANSWERS)
        with suppress(Disconnected):  # it is lost: it will have no answer
            connection.send(_sides(here, checkpoint))
            connection.send(JudgeTaps())
        yield JudgeBeside(here, waiting, connection, started.process.pid)
    finally:
        started.end()


def _sides(judge: JudgeHere, checkpoint: Path) -> SidesToJudge:
    sides = judge.sides
    floor = None if sides.floor is None else str(sides.floor.session.path)
    engine, golden = str(sides.engine.session.path), str(sides.golden.session.path)
    return SidesToJudge(engine, golden, floor, str(checkpoint), judge.facts.dtype)
