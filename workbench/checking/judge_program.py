"""Judges a run, asked over a socket: `python -m lockstep.workbench.checking.judge_program SOCKET LIFELINE`.

`workbench.checking.reference_judge` is the other side.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

from lockstep.engine.lifeline import end_with_starter
from lockstep.engine.ranks.wire import Connection, Disconnected
from lockstep.sessions import Session
from lockstep.sessions.keeping import keeping
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.checking.judge_messages import (
    REQUESTS,
    SIDES,
    JudgeAnswer,
    JudgedTaps,
    JudgedUntapped,
    JudgeLedger,
    JudgeRequest,
    JudgeTaps,
    JudgeUntapped,
    NotJudged,
)
from lockstep.workbench.checking.reference_judge import JudgeHere
from lockstep.workbench.diagnosis.measure import Recordings
from lockstep.workbench.diagnosis.one_thread import one_thread_for
from lockstep.workbench.diagnosis.operations.facts import Facts


def _serve(asked: socket.socket) -> None:
    sides = Connection(asked, SIDES).receive()
    with ExitStack() as stack:
        engine, golden, floor = (
            None if path is None else stack.enter_context(Session.open(Path(path), UNLIMITED))
            for path in (sides.engine, sides.golden, sides.floor)
        )
        assert engine is not None
        assert golden is not None
        stack.enter_context(keeping(engine, golden, floor))
        stack.enter_context(one_thread_for(engine))
        judge = JudgeHere(Recordings.of(engine, golden, floor), Facts.of(Path(sides.checkpoint), sides.dtype))
        connection = Connection(asked, REQUESTS)
        while True:
            connection.send(_answered(judge, connection.receive()))


def _answered(judge: JudgeHere, request: JudgeRequest) -> JudgeAnswer:
    try:
        match request:
            case JudgeTaps():
                return JudgedTaps(judge.taps())
            case JudgeUntapped():
                return JudgedUntapped(judge.untapped(Path(request.recording)))
            case JudgeLedger():
                return JudgedTaps(judge.ledger(Path(request.recording)))
    except Exception:  # who asked judges by itself then, and has the error where the user sees it
        return NotJudged()


def _main() -> None:
    descriptor, lifeline = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl+c is its starter's
    end_with_starter(int(lifeline), lambda: None)
    try:
        _serve(socket.socket(fileno=int(descriptor)))
    except Disconnected:
        return


if __name__ == "__main__":
    _main()
    os._exit(0)
