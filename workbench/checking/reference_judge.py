"""Who holds a run against the reference: this process, or one beside it, which leaves this one to name causes.

Both are Python that keeps a core busy, so that threads would gain nothing.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from lockstep.engine.children import start_python
from lockstep.engine.lifeline import Lifeline
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

_PROGRAM = "lockstep.workbench.checking.judge_program"


class ReferenceJudge(Protocol):
    """Judges a run, and its recordings in other ways. SessionError and DiagnosisError as `judge`."""

    def taps(self) -> Judgement:
        """The verdict on every tap."""

    def untapped(self, recording: Path) -> UntappedRun:
        """That on the run without taps."""

    def ledger(self, recording: Path) -> Judgement:
        """That on every tap, with what each operation does wrong where all before it are corrected."""

    def close(self) -> None:
        """Nobody waits for a verdict any more."""


@dataclass
class JudgeHere:
    """Judges in this process."""

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

    def close(self) -> None:
        """Nothing goes on of which nobody knows."""


@contextmanager
def _read(recording: Path) -> Iterator[Session]:
    with Session.open(recording, UNLIMITED) as session, keeping(session):
        yield session


@dataclass
class JudgeBeside:
    """Judges in a process of its own, and where that is lost or has no answer `here`: the error is raised there."""

    here: JudgeHere
    _connection: Connection[JudgeAnswer]
    _closed: bool = field(default=False, init=False)

    def taps(self) -> Judgement:
        """The verdict on every tap."""
        answer = self._ask(JudgeTaps())
        return answer.judgement if isinstance(answer, JudgedTaps) else self.here.taps()

    def untapped(self, recording: Path) -> UntappedRun:
        """That on the run without taps."""
        answer = self._ask(JudgeUntapped(str(recording)))
        return answer.run if isinstance(answer, JudgedUntapped) else self.here.untapped(recording)

    def ledger(self, recording: Path) -> Judgement:
        """That on every tap, with the error ledger."""
        answer = self._ask(JudgeLedger(str(recording)))
        return answer.judgement if isinstance(answer, JudgedTaps) else self.here.ledger(recording)

    def _ask(self, request: JudgeRequest) -> JudgeAnswer | None:
        try:
            self._connection.send(request)
            return self._connection.receive()
        except Disconnected:
            if self._closed:  # nobody waits for an answer
                raise
            return None

    def close(self) -> None:
        """Nobody waits for a verdict any more: who does is Disconnected."""
        self._closed = True
        self._connection.socket.shutdown(socket.SHUT_RDWR)


@contextmanager
def reference_judge(
    sides: Recordings, facts: Facts, checkpoint: Path, beside: bool
) -> Iterator[ReferenceJudge]:
    """A judge of `sides`, `beside` this process, which ends with the context."""
    if not beside:
        yield JudgeHere(sides, facts)
        return
    here = JudgeHere(
        sides, Facts.of(checkpoint, facts.dtype)
    )  # weights are kept, and no two threads may keep them
    ours, theirs = socket.socketpair()
    lifeline = Lifeline()
    with ours:
        with theirs:
            try:
                process = start_python(
                    "-m", _PROGRAM, str(theirs.fileno()), str(lifeline.fd), stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, pass_fds=[theirs.fileno(), lifeline.fd],
                )  # fmt: skip
            finally:
                lifeline.handed_over()
        try:
            connection = Connection(ours, ANSWERS)
            connection.send(_sides(here, checkpoint))
            yield JudgeBeside(here, connection)
        finally:
            lifeline.close()
            process.kill()
            process.wait()


def _sides(judge: JudgeHere, checkpoint: Path) -> SidesToJudge:
    sides = judge.sides
    floor = None if sides.floor is None else str(sides.floor.session.path)
    engine, golden = str(sides.engine.session.path), str(sides.golden.session.path)
    return SidesToJudge(engine, golden, floor, str(checkpoint), judge.facts.dtype)
